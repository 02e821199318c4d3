"""One function of a package as an ONNX graph: op by op, names and shapes as in the package.

Floats of every width are float32 in the ONNX model, which holds each fp16 value exactly; arithmetic is that of the
MIL executor's fp32 mode. States become an input of their name and an output `NAME_next`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

import pdconvert
from pdconvert.errors import InputError
from pdconvert.executors.mil.values import FileValue
from pdconvert.executors.mil.view import FunctionView, Op, Value

if TYPE_CHECKING:
    from pdconvert.export.data import WeightData
    from pdconvert.export.weights import QuantizedWeight

OPSET = 21
"""The first ai.onnx opset with 4-bit types and DequantizeLinear by blocks."""
IR_VERSION = 10
ELEMENTS = {"fp16": ("FLOAT", np.float32), "fp32": ("FLOAT", np.float32), "int32": ("INT32", np.int32)}
"""MIL element type → ONNX type, and its numpy type."""
AFTER = "_next"
"""Suffix of the output that holds a state after the call."""


@dataclass
class GraphWriter:
    """Collects the nodes and initializers of one graph.

    Attributes:
        function: what is translated.
        data: where large initializers go.
        initializers: by name.
        quantized: output of a DequantizeLinear, which stands for a weight → the form of its codes.
        states: state → the tensor that was written into it.
    """

    function: FunctionView
    data: WeightData
    nodes: list[Any] = field(default_factory=list)
    initializers: dict[str, Any] = field(default_factory=dict)
    quantized: dict[str, QuantizedWeight] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)

    def name(self, value: Value) -> str:
        """The ONNX tensor of a value; a constant becomes an initializer when it is first asked for."""
        if id(value) in self._names:
            return self._names[id(value)]
        if value.held is None:
            return value.name
        name = value.name or f"constant_{len(self._names)}"
        self._names[id(value)] = name
        kind, dtype = element(value)
        key = record_key(value, kind)
        self.add_initializer(name, kind, value.shape, key, lambda: held_array(value).astype(dtype))
        return name

    def input(self, op: Op, parameter: str) -> str:
        """The tensor of a parameter that must be there."""
        value = op.input(parameter)
        if value is None:
            raise refusal(op, f"has no {parameter}")
        return self.name(value)

    def node(
        self, op_type: str, inputs: Sequence[str], output: str, domain: str = "", **attributes: Any
    ) -> str:
        """Add a node with one output; returns the output's name."""
        from onnx import helper

        self.nodes.append(
            helper.make_node(op_type, inputs, [output], name=output, domain=domain, **attributes)
        )
        return output

    def integers(self, output: str, values: Sequence[int]) -> str:
        """An int64 vector that a node takes as input, named after the node's output."""
        name = f"{output}_{len(self.initializers)}"
        self.add_initializer(name, "INT64", (len(values),), None, lambda: np.array(values, np.int64))
        return name

    def number(self, output: str, value: float) -> str:
        """A float32 scalar that a node takes as input."""
        name = f"{output}_{len(self.initializers)}"
        self.add_initializer(name, "FLOAT", (), None, lambda: np.array(value, np.float32))
        return name

    def add_initializer(self, name: str, kind: str, shape: Sequence[int], key: Any, make: Any) -> None:
        """Add an initializer, arguments as of `WeightData.initializer`."""
        self.initializers[name] = self.data.initializer(name, kind, tuple(shape), key, make)


def element(value: Value) -> tuple[str, Any]:
    """ONNX type of a value, and its numpy type.

    Raises:
        InputError: a type that this export does not have.
    """
    if value.dtype not in ELEMENTS:
        raise InputError(
            f"export onnx: {value.name or 'a constant'} is of type {value.dtype}, which is not exported"
        )
    return ELEMENTS[value.dtype]


def held_array(value: Value) -> np.ndarray:
    """The elements of a plain constant."""
    array = value.array()
    assert array is not None, f"{value.name} is no array"
    return array.reshape(value.shape)


def record_key(value: Value, kind: str) -> Any:
    """Equal for constants of the same bytes of a weight file in the same ONNX type."""
    held = value.held
    return (held.blob.path.name, held.offset, kind) if isinstance(held, FileValue) else None


def refusal(op: Op, why: str) -> InputError:
    """An op that cannot be translated, by name."""
    return InputError(f"export onnx: {op.type} {op.name!r} {why}; this export has no translation for it")


def translate(function: FunctionView, data: WeightData) -> tuple[Any, GraphWriter]:
    """A function as an ONNX model without weights, which go into `data`.

    Raises:
        InputError: an op without a row in the table, or a form of one that the row does not have.
    """
    from onnx import helper

    from pdconvert.export.rows import ROWS

    writer = GraphWriter(function, data)
    missing = sorted({op.type for op in function.ops} - set(ROWS))
    if missing:
        first = next(op for op in function.ops if op.type == missing[0])
        raise refusal(
            first, f"in function {function.name} has no row in the table (pdconvert/export/rows.py)"
        )
    for op in function.ops:
        ROWS[op.type](writer, op)
    inputs = [_info(name, value) for name, value in {**function.inputs, **function.states}.items()]
    outputs = [_info(name, value) for name, value in function.outputs.items()]
    outputs += [_info(name + AFTER, function.states[name]) for name in writer.states]
    for name, value in function.outputs.items():
        if writer.name(value) != name:
            writer.node("Identity", [writer.name(value)], name)
    for name, tensor in writer.states.items():
        writer.node("Identity", [tensor], name + AFTER)
    graph = helper.make_graph(
        writer.nodes, function.name, inputs, outputs, initializer=list(writer.initializers.values())
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="pdconvert",
        producer_version=pdconvert.__version__,
    )
    return model, writer


def _info(name: str, value: Value) -> Any:
    from onnx import TensorProto, helper

    return helper.make_tensor_value_info(name, TensorProto.DataType.Value(element(value)[0]), value.shape)
