"""Blocks into functions: one MIL program in which all functions share the weights by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Program, types

from pdconvert.blocks import KeysValuesLayer
from pdconvert.errors import InputError
from pdconvert.lowering.aten import ROWS, slice_axis
from pdconvert.lowering.contract import (
    FunctionShape,
    Interface,
    Part,
    attention_roles,
    input_ports,
    output_ports,
    state_ports,
)
from pdconvert.lowering.export import BlockGraph, export_block, signature
from pdconvert.model import ModelSpec
from pdconvert.program import Block
from pdconvert.quant.grid import LutLinear, QuantizedLinear
from pdconvert.quant.packing import BLOCK_SCALE_BITS
from pdconvert.quant.store import Stored, equal

DTYPES = {"fp16": types.fp16, "int32": types.int32}
SPECIFICATION_VERSIONS = {"iOS16": 7, "iOS17": 8, "iOS18": 9}
VIEWS = ("aten.view.default", "aten.reshape.default")
NARROWS = ("aten.narrow.default", "aten.narrow.int")
EMBEDDING = "embedding_weight"
LoadBlock = Callable[[str], Mapping[str, Stored]]


@dataclass
class Lowering:
    """What is needed to write functions.

    Attributes:
        spec: the model.
        skeletons: one weightless block per name, in order, the head last where there is one.
        load: the stored tensors of a block by name, memory-mapped.
        target: minimum deployment target, "iOS16" to "iOS18".
        interface: the recipe's choice of inputs and outputs.
    """

    spec: ModelSpec
    skeletons: Sequence[Block]
    load: LoadBlock
    target: str
    interface: Interface
    _graphs: dict[Any, BlockGraph] = field(default_factory=dict)

    def program(self, shapes: Sequence[FunctionShape], part: Part | None = None) -> Program:
        """The MIL program with one function per shape, the first one being the default.

        Args:
            part: the layers that it holds; all of them by default.
        """
        import coremltools as ct

        if self.target not in SPECIFICATION_VERSIONS:
            raise InputError(
                f"target {self.target} is not supported; use one of {', '.join(SPECIFICATION_VERSIONS)}"
            )
        mb.name_count.clear()  # names of constants count up per process; equal builds need equal names

        part = part or Part.whole(self.spec)
        program = Program()
        for shape in shapes:
            ports = input_ports(self.spec, shape, self.interface, part)
            inputs = {port.name: mb.placeholder(shape=port.shape, dtype=DTYPES[port.dtype]) for port in ports}
            for port in state_ports(self.spec, self.interface):
                inputs[port.name] = mb.state_tensor_placeholder(port.shape, DTYPES[port.dtype])
            with Function(inputs, opset_version=getattr(ct.target, self.target)) as function:
                function.set_outputs(self._function(dict(function.inputs), shape, part))
            program.add_function(shape.name, function)
        program.default_function_name = shapes[0].name
        program.export_as_multifunction = len(shapes) > 1
        return program

    def _function(self, inputs: dict[str, Any], shape: FunctionShape, part: Part) -> list[Any]:
        hidden = inputs["hidden"] if "hidden" in inputs else self._embed(inputs["token_ids"])
        caches: dict[str, list[Any]] = {"k": [], "v": []}
        by_role = {
            port.key: inputs[port.name] for port in input_ports(self.spec, shape, self.interface, part)
        }
        held = {
            port.name: mb.read_state(input=inputs[port.name], name=f"{port.name}_before")
            for port in state_ports(self.spec, self.interface)
        }
        for index, block in enumerate(self.skeletons[part.first : part.last]):
            attends = shape.past and not isinstance(block.module, KeysValuesLayer)
            past = _past(block, index, shape, inputs, held) if attends else []
            rope_mask = [by_role[role] for role in attention_roles(block.spec)]
            results = dict(
                zip(block.outputs, self._block(block, shape, [hidden, *rope_mask, *past]), strict=True)
            )
            hidden = results.get("hidden")
            for name, values in caches.items():
                values.append(results[name])
        outputs = [_gather_cache(values, name) for name, values in caches.items()]
        if held:
            _write_states(inputs, held, outputs)
        if not part.ends:
            outputs.append(mb.identity(x=hidden, name="next_hidden"))
        elif self.interface.outputs == "logits":
            outputs += self._logits(hidden, inputs.get("row"), shape)
        wanted = [port.name for port in output_ports(self.spec, shape, self.interface, part)]
        assert [output.name for output in outputs] == wanted, "outputs differ from the contract"
        return outputs

    def _embed(self, token_ids: Any) -> Any:
        """token_ids (1, S) int32 → hidden (1, H, 1, S)."""
        stored = self.load("embedding")["weight"]
        table = self._constant("embedding", _Parameter("weight", stored, tuple(stored.shape)))
        rows = mb.gather(x=table, indices=token_ids, axis=0, name="embedding_rows")
        scale = self.spec.embedding_scale * self.skeletons[0].layout.residual
        if scale != 1:
            rows = mb.mul(x=rows, y=np.float16(scale), name="embedding_scaled")
        return mb.expand_dims(x=mb.transpose(x=rows, perm=[0, 2, 1]), axes=[2], name="embedding_hidden")

    def _logits(self, hidden: Any, row: Any, shape: FunctionShape) -> list[Any]:
        """hidden (1, H, 1, S) → logits (1, V, 1, S), or (1, V, 1, 1) of one row by a one-hot `row` (1, 1, S, 1).

        Of a head in parts, the logits of each.
        """
        if row is not None:
            size, shape = self.spec.hidden_size, FunctionShape(1)
            states = mb.reshape(x=hidden, shape=[1, 1, size, hidden.shape[3]], name="head_states")
            chosen = mb.matmul(x=states, y=row, name="head_row")
            hidden = mb.reshape(x=chosen, shape=[1, size, 1, 1], name="head_hidden")
        pieces = self._block(self.skeletons[-1], shape, [hidden])
        names = ["logits"] if len(pieces) == 1 else [f"logits_{index + 1}" for index in range(len(pieces))]
        return [mb.identity(x=piece, name=name) for name, piece in zip(names, pieces, strict=True)]

    def _block(self, block: Block, shape: FunctionShape, inputs: Sequence[Any]) -> list[Any]:
        """Lower one block: its graph with its constants; `inputs` beyond what it takes are left out."""
        key = signature(block, shape)
        if key not in self._graphs:
            self._graphs[key] = export_block(block, self.spec.rope_of(block.spec).dims, shape)
        graph = self._graphs[key]
        values = dict(zip(graph.inputs, inputs[: len(graph.inputs)], strict=True))
        stored = self.load(block.name)
        shapes = {name: tuple(value.shape) for name, value in block.module.named_parameters()}
        constants = {
            placeholder: _Parameter(name, stored[name], shapes[name], block.factors.get(name, 1.0))
            for placeholder, name in graph.parameters.items()
        }
        return _Walk(self, block.name, values, constants).run(graph.graph)

    def _constant(self, block: str, parameter: _Parameter) -> Any:
        """A parameter as a MIL constant; equal weight ids share one blob, across functions and within one."""
        label, value = _identifier(f"{block}.{parameter.name}{parameter.suffix}"), parameter.graph_value()
        weight_id = EMBEDDING if self._is_embedding(block, parameter) else label
        if isinstance(value, QuantizedLinear):
            return self._quantized(label, weight_id, value, parameter.shape)
        if isinstance(value, LutLinear):
            return self._tables(label, value, parameter.shape)
        constant = mb.const(val=value.numpy().reshape(parameter.shape), name=label)
        constant.op.weight_id = weight_id
        return constant

    def _is_embedding(self, block: str, parameter: _Parameter) -> bool:
        """Whether a parameter is the tied head, whole and as the embedding in the graph is stored."""
        whole = parameter.rows is None and parameter.factor == 1
        if (block, parameter.name) != ("head", "lm_head.weight") or self.interface.embedding != "graph":
            return False
        return self.spec.tied and whole and equal(parameter.value, self.load("embedding")["weight"])

    def _quantized(self, label: str, weight_id: str, record: QuantizedLinear, shape: tuple[int, ...]) -> Any:
        """Codes with scales and zero points; an LPBQ grid's scales are the result of an op of their own."""
        codes = _array(record.codes, record.bits, len(shape)).reshape(shape)
        scales = _array(record.scales, 16, len(shape))
        zeros = None if record.zero_points is None else _array(record.zero_points, record.bits, len(shape))
        if self.target == "iOS18":
            if record.block_scales is not None:
                blocks = _array(record.block_scales, BLOCK_SCALE_BITS, len(shape))
                scales = mb.constexpr_blockwise_shift_scale(data=blocks, scale=scales, name=f"{label}_scales")
                _share(scales, weight_id, data="block_scales", scale="scale")
            optional = {} if zeros is None else {"offset": zeros}
            result = mb.constexpr_blockwise_shift_scale(data=codes, scale=scales, name=label, **optional)
            plain = {} if record.block_scales is not None else {"scale": "scale"}
            return _share(result, weight_id, data="data", **plain, **dict.fromkeys(optional, "offset"))
        if record.group:
            raise InputError(f"{label}: weights in groups need the target iOS18, not {self.target}")
        result = mb.constexpr_affine_dequantize(
            quantized_data=codes,
            zero_point=np.zeros(len(codes), np.int8) if zeros is None else zeros.reshape(-1),
            scale=scales.reshape(-1),
            axis=0,
            name=label,
        )
        return _share(result, weight_id, quantized_data="data", scale="scale")

    def _tables(self, label: str, record: LutLinear, shape: tuple[int, ...]) -> Any:
        """A lookup table per group of output channels: indices (O, I, …), tables (O / rows, 1, …, 2^bits, 1)."""
        dtype = {4: types.np_uint4_dtype, 6: types.np_uint6_dtype, 8: np.uint8}[record.bits]
        indices = record.codes.numpy().reshape(shape).view(dtype)
        tables = record.tables.numpy().reshape(len(record.tables), *(1,) * (len(shape) - 1), -1, 1)
        result = mb.constexpr_lut_to_dense(indices=indices, lut=tables, name=label)
        return _share(result, label, indices="indices", lut="lut")


def _array(part: torch.Tensor, bits: int, rank: int) -> np.ndarray:
    """A part of a record (O, G) as MIL takes it, (O, G, 1, …); its memory stays the file's that it is mapped from."""
    values = part.numpy().reshape(*part.shape, *(1,) * (rank - 2))
    if bits != 4:
        return values
    return values.view(types.np_int4_dtype if part.dtype == torch.int8 else types.np_uint4_dtype)


def _share(result: Any, weight_id: str, **inputs: str) -> Any:
    """Name the blobs of an op's inputs, so that functions share them: input → suffix."""
    for name, suffix in inputs.items():
        result.op.inputs[name].op.weight_id = f"{weight_id}_{suffix}"
    return result


@dataclass(frozen=True)
class _Parameter:
    """A parameter of a block before it is written as a constant; a view of it only changes the shape.

    Attributes:
        factor: what the graph multiplies the stored value by; of a record, its scales.
        rows: (first, one beyond the last) of the outputs that the graph takes; all where None.
    """

    name: str
    value: Stored
    shape: tuple[int, ...]
    factor: float = 1.0
    rows: tuple[int, int] | None = None

    @property
    def suffix(self) -> str:
        """What tells parts of one parameter apart."""
        return "" if self.rows is None else f".{self.rows[0]}"

    def graph_value(self) -> Stored:
        """The stored value times the factor, rounded to fp16 once more where the factor is no power of two."""
        span = slice(*(self.rows or (None,)))
        if isinstance(self.value, QuantizedLinear):
            record = self.value.each(lambda part: part[span])
            scales = record.scales if self.factor == 1 else (record.scales.float() * self.factor).half()
            return replace(record, scales=scales)
        if isinstance(self.value, LutLinear):
            assert self.rows is None, "only the head is cut, and it has no tables"
            tables = self.value.tables.float() * self.factor
            return replace(self.value, tables=tables.half())
        value = self.value[span]
        return value if self.factor == 1 else (value.float() * self.factor).half()


@dataclass
class _Walk:
    """One pass over an FX graph, emitting MIL ops."""

    lowering: Lowering
    block: str
    values: dict[str, Any]
    parameters: dict[str, _Parameter]

    def run(self, graph: torch.fx.Graph) -> list[Any]:
        for node in graph.nodes:
            if node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                return [self.values[output.name] for output in node.args[0]]
        raise AssertionError("the graph has no output")

    def _call(self, node: torch.fx.Node) -> None:
        target = str(node.target)
        source = node.args[0]
        if target in VIEWS and isinstance(source, torch.fx.Node) and source.name in self.parameters:
            parameter = self.parameters[source.name]
            self.parameters[node.name] = replace(parameter, shape=tuple(node.meta["val"].shape))
            return
        if target in NARROWS and isinstance(source, torch.fx.Node) and source.name in self.parameters:
            parameter = self.parameters[source.name]
            arguments: Any = node.args[1:]
            axis, first, length = arguments
            assert axis == 0 and parameter.rows is None, "a parameter is cut along its outputs, once"
            size = tuple(node.meta["val"].shape)
            self.parameters[node.name] = replace(parameter, rows=(first, first + length), shape=size)
            return
        if _only_feeds_products(node):
            return
        if target not in ROWS:
            raise InputError(
                f"{self.block}: {target} has no row in the lowering table (pdconvert/lowering/aten.py); it comes from "
                f"{_line(node)}. Add a row, or rewrite the block without it"
            )
        name = _identifier(f"{self.block}.{_scope(node)}.{node.name}")
        if target == "aten.matmul.default":
            (x, flip_x), (y, flip_y) = (_transposed(argument) for argument in node.args)
            self.values[node.name] = ROWS[target](name, self._value(x), self._value(y), flip_x, flip_y)
            return
        values = [self._value(argument) for argument in node.args]
        self.values[node.name] = ROWS[target](name, *values, **node.kwargs)

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, torch.fx.Node):
            if argument.name not in self.values:
                constant = self.lowering._constant(self.block, self.parameters[argument.name])
                self.values[argument.name] = constant
            return self.values[argument.name]
        if isinstance(argument, list | tuple):
            return [self._value(part) for part in argument]
        return argument


def _only_feeds_products(node: torch.fx.Node) -> bool:
    """A swap of the last two axes that matmul can do itself."""
    if str(node.target) != "aten.transpose.int":
        return False
    rank = node.meta["val"].dim()
    swaps_last = {axis % rank for axis in node.args[1:]} == {rank - 1, rank - 2}
    return (
        swaps_last
        and bool(node.users)
        and all(str(user.target) == "aten.matmul.default" for user in node.users)
    )


def _transposed(argument: Any) -> tuple[Any, bool]:
    if isinstance(argument, torch.fx.Node) and _only_feeds_products(argument):
        return argument.args[0], True
    return argument, False


def _gather_cache(values: Sequence[Any], name: str) -> Any:
    """Caches (1, heads, D, S) of all layers as one (1, L·heads, D, S)."""
    return (
        mb.identity(x=values[0], name=name)
        if len(values) == 1
        else mb.concat(values=list(values), axis=1, name=name)
    )


def _past(
    block: Block, index: int, shape: FunctionShape, inputs: dict[str, Any], held: dict[str, Any]
) -> list[Any]:
    """Keys and values (1, heads, D, C) of a layer's past, from the inputs or from what the states held before."""
    heads, dim, label = block.spec.kv_heads, block.spec.head_dim, _identifier(block.name)
    if not held:
        return [
            slice_axis(f"{label}_{name}", inputs[name], 1, index * heads, heads)
            for name in ("past_k", "past_v")
        ]
    past = []
    for name, state in held.items():
        end = [index + 1, heads * dim, 1, shape.past]
        layer = mb.slice_by_index(x=state, begin=[index, 0, 0, 0], end=end, name=f"{label}_{name}")
        past.append(mb.reshape(x=layer, shape=[1, heads, dim, shape.past], name=f"{label}_past_{name[0]}"))
    return past


def _write_states(inputs: dict[str, Any], held: dict[str, Any], new: Sequence[Any]) -> None:
    """Put the new keys and values (1, L·heads, D, S) into the columns that `write` (1, 1, S, N) names.

    A product with one-hot rows places them and is exact; the rest of a column keeps what it held. No bound is
    known at run time only, which the Neural Engine's compiler would refuse.
    """
    written = mb.reduce_sum(x=inputs["write"], axes=[2], keep_dims=True, name="written")
    kept = mb.sub(x=np.float16(1), y=written, name="kept")
    for (name, state), value in zip(held.items(), new, strict=True):
        placed = mb.matmul(x=value, y=inputs["write"], name=f"{name}_placed")
        placed = mb.reshape(x=placed, shape=state.shape, name=f"{name}_new")
        rest = mb.mul(x=state, y=kept, name=f"{name}_rest")
        mb.coreml_update_state(
            state=inputs[name], value=mb.add(x=rest, y=placed, name=f"{name}_after"), name=f"{name}_update"
        )


def _scope(node: torch.fx.Node) -> str:
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return stack[-1][0].removeprefix("block").lstrip(".") if stack else ""


def _line(node: torch.fx.Node) -> str:
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    return " → ".join(lines[-2:]) if lines else "an unknown line"


def _identifier(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", text).strip("_")
