"""A neutral, read-only view of a package's functions: ops with their named inputs, values with their makers.

Nothing is run here: an op type or element type that the executor does not have is shown as it stands. Only an
op type that MIL itself does not know is refused. Constants are values, not ops; `constexpr_*` ops are ops whose
result is constant. Weights are read only where `Value.array` is called.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from pdconvert.collection import uncollected
from pdconvert.errors import InputError
from pdconvert.executors.mil import dtypes
from pdconvert.executors.mil.interface import read_features
from pdconvert.executors.mil.op_types import check_known, op_place
from pdconvert.executors.mil.package import Package
from pdconvert.executors.mil.values import RUN_TIME, FileValue, described, read_value, reading

SYSTEMS = {6: "iOS15", 7: "iOS16", 8: "iOS17", 9: "iOS18"}
"""Oldest system that opens a package, by specification version (iOS 16 stands for macOS 13, and so on)."""

_STATE_SOURCES = ("read_state", "coreml_update_state")


@dataclass(eq=False)
class Value:
    """A tensor of a function: an input, a state, a constant, or the output of an op.

    Attributes:
        name: as in the program; empty for a constant that is written into an op's argument.
        shape: sizes; -1 where a size is known only when the program runs.
        dtype: element type, e.g. `fp16`; `list` and the like for what is not a tensor.
        maker: the op that computes it; None for inputs, states and constants.
        held: a constant's content, None for everything else. Tensors in a weight file are not read.
        is_state: whether it is a state itself (not what is read from it).
        users: the ops that take it, in order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    maker: "Op | None" = None
    held: FileValue | np.ndarray | str | list[str] | None = None
    is_state: bool = False
    users: "list[Op]" = field(default_factory=list)

    @property
    def is_constant(self) -> bool:
        """Whether it is known before the program runs: a constant, or made of constants alone."""
        return self.held is not None or (self.maker is not None and self.maker.is_constant)

    @property
    def is_float(self) -> bool:
        """Whether it is fp16 or fp32, as activations are; shapes and indices are integers."""
        return self.dtype in ("fp16", "fp32")

    @property
    def elements(self) -> int:
        """Number of elements; run-time sizes count as one."""
        return int(np.prod([size for size in self.shape if size != RUN_TIME], dtype=np.int64))

    @property
    def size_bytes(self) -> int:
        """Bytes of the dense tensor."""
        mil = dtypes.BY_NAME.get(self.dtype)
        return (self.elements * (mil.bits if mil else 0) + 7) // 8

    def array(self) -> np.ndarray | None:
        """The elements of a plain constant; None for computed values, strings and lists."""
        if isinstance(self.held, FileValue):
            return self.held.array()
        return self.held if isinstance(self.held, np.ndarray) else None

    def python(self) -> Any:
        """A plain constant as a Python value: number, bool, string or list; None for anything else."""
        array = self.array()
        return self.held if array is None else array.tolist()

    def records(self) -> dict[tuple[str, int], int]:
        """Size in bytes of each record of a weight file that a constant is made of, by (file, offset)."""
        if isinstance(self.held, FileValue):
            return {(self.held.blob.path.name, self.held.offset): self.held.size_bytes}
        found: dict[tuple[str, int], int] = {}
        edge, seen = [self], {id(self)}
        while edge:
            maker = edge.pop().maker
            if maker is None or not maker.is_constant:
                continue
            for value in maker.values():
                if isinstance(value.held, FileValue):
                    found |= value.records()
                elif id(value) not in seen:
                    seen.add(id(value))
                    edge.append(value)
        return found


@dataclass(eq=False)
class Op:
    """An operation.

    Attributes:
        type: MIL op type.
        inputs: values by parameter name; parameters written as attributes are among them.
        outputs: what it computes.
        scope: names of the ops in whose blocks it stands (`cond`, `while_loop`), outermost first.
    """

    type: str
    inputs: dict[str, tuple[Value, ...]]
    outputs: tuple[Value, ...] = ()
    scope: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of its first output; the op type where it has none."""
        return self.outputs[0].name if self.outputs else self.type

    @property
    def out(self) -> Value:
        """Its first output."""
        return self.outputs[0]

    @cached_property
    def is_constant(self) -> bool:
        """Whether its result is known before the program runs."""
        values = list(self.values())
        return bool(values) and all(value.is_constant for value in values)

    def values(self) -> Iterator[Value]:
        """All input values."""
        for group in self.inputs.values():
            yield from group

    def computed(self) -> list[Value]:
        """Input values that are known only when the program runs."""
        return [value for value in self.values() if not value.is_constant]

    def input(self, name: str) -> Value | None:
        """The value of a parameter, None where it is left out."""
        group = self.inputs.get(name)
        return group[0] if group else None

    def param(self, name: str, default: Any = None) -> Any:
        """A constant parameter as a Python value; `default` where it is left out or computed."""
        value = self.input(name)
        if value is None or value.held is None:
            return default
        return value.python()

    def axis(self, default: int = -1) -> int:
        """Its constant `axis`, counted from the front of its first output."""
        axis = self.param("axis", default)
        return axis % max(len(self.out.shape), 1)


@dataclass(eq=False)
class FunctionView:
    """One function.

    Attributes:
        name: as in the program.
        opset: e.g. `CoreML8`.
        inputs: tensors by name.
        states: states by name.
        outputs: tensors by name.
        ops: every op but constants, those of inner blocks after the op that holds them.
        flexible: inputs of several shapes: name → `range` or `enumerated`.
    """

    name: str
    opset: str
    inputs: dict[str, Value]
    states: dict[str, Value]
    outputs: dict[str, Value] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    flexible: dict[str, str] = field(default_factory=dict)

    @cached_property
    def computed_ops(self) -> list[Op]:
        """Ops whose result is known only when the program runs."""
        return [op for op in self.ops if not op.is_constant]

    def of_type(self, *types: str) -> list[Op]:
        """Computed ops of the given types."""
        return [op for op in self.computed_ops if op.type in types]

    def is_output(self, value: Value) -> bool:
        """Whether a value is an output of the function."""
        return any(value is output for output in self.outputs.values())


@dataclass(eq=False)
class PackageView:
    """A package.

    Attributes:
        package: the opened package.
        functions: all functions, sorted by name.
        system: oldest system that opens it, e.g. `iOS18`.
        weight_files: size in bytes of each weight file that a function names, by name.
    """

    package: Package
    functions: list[FunctionView]
    system: str
    weight_files: dict[str, int]

    @property
    def written_by(self) -> str:
        """The coremltools version that its metadata names; empty where there is none."""
        defined = self.package.spec.description.metadata.userDefined
        return defined.get("com.github.apple.coremltools.version", "")


def view_package(package: Package) -> PackageView:
    """Read all functions of a package.

    Raises:
        InputError: the program does not hold together, has an op that MIL does not know, or a weight file is
            missing.
    """
    with uncollected():
        functions = [_Reader(package, name).read() for name in package.function_names]
    files = {blob.path.name: blob.size_bytes for blob in package.blobs.values()}
    return PackageView(package, functions, SYSTEMS[package.spec.specificationVersion], files)


class _Reader:
    """Reads one function."""

    def __init__(self, package: Package, name: str) -> None:
        self._package = package
        self._name = name
        self._named: dict[str, Value] = {}
        self._ops: list[Op] = []

    def read(self) -> FunctionView:
        proto = self._package.spec.mlProgram.functions[self._name]
        block = self._package.block(self._name)
        inputs: dict[str, Value] = {}
        states: dict[str, Value] = {}
        for item in proto.inputs:
            info = described(item.type)
            value = Value(item.name, info.shape, info.dtype, is_state=info.state)
            (states if info.state else inputs)[item.name] = value
            self._named[item.name] = value
        self._block(block, ())
        outputs = {
            name: self._value(name, f"{self._package.path}: an output of function {self._name}")
            for name in block.outputs
        }
        features = read_features(self._package.spec.description, self._name)
        flexible = {name: feature.flexible for name, feature in features.items() if feature.flexible}
        return FunctionView(self._name, proto.opset, inputs, states, outputs, self._ops, flexible)

    def _block(self, block: Any, scope: tuple[str, ...]) -> None:
        for position, proto in enumerate(block.operations):
            check_known(self._package.path, self._name, position, proto)
            where = op_place(proto.type, [output.name for output in proto.outputs], position, self._name)
            with reading(self._package.path, where):
                op = self._operation(proto, scope)
            if op is None:
                continue
            for inner in proto.blocks:
                for item in inner.inputs:  # a loop's variables: computed, by the op that loops
                    info = described(item.type)
                    self._named[item.name] = Value(item.name, info.shape, info.dtype, maker=op)
                self._block(inner, (*scope, op.name))

    def _operation(self, proto: Any, scope: tuple[str, ...]) -> Op | None:
        """Read an op, or a plain constant, which is none."""
        if proto.type == "const":
            self._constant(proto)
            return None
        op = Op(proto.type, self._inputs(proto), scope=scope)
        op.outputs = tuple(self._output(output, op) for output in proto.outputs)
        for value in op.values():
            value.users.append(op)
        self._ops.append(op)
        return op

    def _constant(self, proto: Any) -> None:
        name, info = proto.outputs[0].name, described(proto.outputs[0].type)
        held = read_value(proto.attributes["val"], self._package.blobs)
        self._named[name] = Value(name, info.shape, info.dtype, held=held)

    def _output(self, proto: Any, op: Op) -> Value:
        info = described(proto.type)
        self._named[proto.name] = Value(proto.name, info.shape, info.dtype, maker=op)
        return self._named[proto.name]

    def _inputs(self, proto: Any) -> dict[str, tuple[Value, ...]]:
        inputs = {
            name: tuple(
                self._literal(binding.value)
                if binding.WhichOneof("binding") == "value"
                else self._value(binding.name, "an input")
                for binding in argument.arguments
            )
            for name, argument in proto.inputs.items()
        }
        attributes = {
            name: (self._literal(value),) for name, value in proto.attributes.items() if name != "name"
        }
        return inputs | attributes

    def _literal(self, proto: Any) -> Value:
        info = described(proto.type)
        return Value("", info.shape, info.dtype, held=read_value(proto, self._package.blobs))

    def _value(self, name: str, where: str) -> Value:
        if name not in self._named:
            raise InputError(f"{where} is {name!r}, which nothing before it computes")
        return self._named[name]


def walk_back(value: Value, through: frozenset[str], depth: int) -> Iterator[Op]:
    """The ops that make a value, nearest first, as far as each is of a type in `through`.

    The first op that is not in `through` is yielded too. `depth` limits the number of steps.
    """
    seen: set[int] = set()
    edge = [value]
    for _ in range(depth):
        following: list[Value] = []
        for item in edge:
            op = item.maker
            if op is None or id(op) in seen:
                continue
            seen.add(id(op))
            yield op
            if op.type in through:
                following += op.computed()
        edge = following


def reads_state(value: Value) -> bool:
    """Whether a value is the content of a state."""
    return value.maker is not None and value.maker.type in _STATE_SOURCES
