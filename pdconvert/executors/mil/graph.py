"""Turn a function's protobuf into steps that a session runs.

Every run-time value gets a slot. Constants become `Static` values; an op with constant inputs only is
folded. Liveness says when a slot is freed and where an op may write into its input:

- a value's *root* is the tensor whose memory it shares (views share it with their input);
- an op may write into an input that no later op reads through any value of the same root, unless the
  root belongs to the caller, to a constant or to a state;
- `slice_update` may write into a state's own buffer if nothing reads the old content later and the
  result goes straight back to that state. That is how a cache of 23 MB is updated without copying it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pdconvert.errors import InputError
from pdconvert.executors.mil.ops import OPS, REFUSED, STATE_OPS, OpRow
from pdconvert.executors.mil.ops.row import LIST_INPUTS
from pdconvert.executors.mil.package import Package
from pdconvert.executors.mil.values import FileValue, ValueInfo, read_value, value_info
from pdconvert.executors.mil.weights import Folded, Leaf, Static

_STATE_INPUT = {"read_state": "input", "write_state": "input", "coreml_update_state": "state"}
_STATE_DATA = {"write_state": "data", "coreml_update_state": "value"}


@dataclass(frozen=True)
class OpInfo:
    """What an op is, for traces and error messages.

    Attributes:
        function: name of the function.
        position: place among the function's operations, from 0.
        op_type: MIL op type.
        outputs: names of its outputs.
        types: their types.
        inputs: names of the run-time values it takes.
    """

    function: str
    position: int
    op_type: str
    outputs: tuple[str, ...]
    types: tuple[ValueInfo, ...]
    inputs: tuple[str, ...] = ()

    def __str__(self) -> str:
        name = f" {self.outputs[0]!r}" if self.outputs else ""
        return f"op {self.op_type}{name} (number {self.position} of function {self.function})"


@dataclass(eq=False)
class Step:
    """One op of the plan.

    Attributes:
        info: what it is.
        kind: `op`, `read` or `write` (of a state).
        fn: the op's function with its constant parameters bound.
        args: slots of its tensors; a list of slots for a list input, None for one left out.
        dynamic: parameters that are computed at run time: name and slot.
        outs: slots of its outputs.
        rounds: for each output, whether it is rounded to fp16.
        loads: slots of constants that must be there first.
        frees: slots that no later step reads.
        target: index into `args` of the tensor that the result is written into; -1 for none.
        state: name of the state it touches.
        copies_data: for `write`: whether the written value must be copied.
    """

    info: OpInfo
    kind: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    dynamic: tuple[tuple[str, int], ...]
    outs: tuple[int, ...]
    rounds: tuple[bool, ...]
    loads: list[int] = field(default_factory=list)
    frees: tuple[int, ...] = ()
    target: int = -1
    row: OpRow | None = None
    into: Callable[..., Any] = field(default=lambda: None)
    state: str = ""
    copies_data: bool = False

    def reads(self) -> list[int]:
        """Slots that it reads."""
        slots = [slot for _, slot in self.dynamic]
        for arg in self.args:
            slots += arg if isinstance(arg, list) else [] if arg is None else [arg]
        return slots


@dataclass
class Plan:
    """A function, ready to run.

    Attributes:
        steps: ops in order.
        slots: number of slots.
        statics: constants by slot.
        inputs: slot of each function input.
        outputs: slot of each function output.
    """

    steps: list[Step]
    slots: int
    statics: dict[int, Static]
    inputs: dict[str, int]
    outputs: dict[str, int]


class PlanBuilder:
    """Builds the `Plan` of one function."""

    def __init__(self, package: Package, function: str, fp16: bool) -> None:
        """Prepare; `fp16` says whether fp16-typed results are rounded."""
        self._package = package
        self._function = function
        self._fp16 = fp16
        self._named: dict[str, int | Static] = {}
        self._infos: dict[int, ValueInfo] = {}
        self._static_slots: dict[int, int] = {}
        self._statics: dict[int, Static] = {}
        self._states: set[str] = set()
        self._steps: list[Step] = []

    def build(self) -> Plan:
        """Read the function.

        Raises:
            InputError: an op that cannot be run, or a program that does not hold together.
        """
        info = self._package.function(self._function)
        block = self._package.block(self._function)
        inputs = {}
        for name, value in info.inputs.items():
            inputs[name] = self._new_slot(value)
            self._named[name] = inputs[name]
        self._states = set(info.states)
        for position, op in enumerate(block.operations):
            where = OpInfo(
                self._function,
                position,
                op.type,
                tuple(o.name for o in op.outputs),
                tuple(_types(op, position)),
                self._computed_inputs(op),
            )
            try:
                self._add(op, where)
            except InputError as error:
                raise InputError(f"{self._package.path}: {where}: {error}") from error
        outputs = {name: self._slot(self._named[name]) for name in block.outputs}
        _Liveness(self._steps, self._infos, inputs, outputs, set(self._statics)).apply()
        return Plan(self._steps, len(self._infos), self._statics, inputs, outputs)

    def _computed_inputs(self, op: Any) -> tuple[str, ...]:
        """Names of the run-time values that an op takes, each once, in order."""
        names = [binding.name for argument in op.inputs.values() for binding in argument.arguments]
        return tuple(dict.fromkeys(name for name in names if isinstance(self._named.get(name), int)))

    def _new_slot(self, info: ValueInfo) -> int:
        slot = len(self._infos)
        self._infos[slot] = info
        return slot

    def _slot(self, value: "int | Static") -> int:
        """Return the slot of a value; a constant gets one when it is first used as a tensor."""
        if isinstance(value, int):
            return value
        slot = self._static_slots.get(id(value))
        if slot is None:
            slot = self._new_slot(value.info)
            self._static_slots[id(value)] = slot
            self._statics[slot] = value
        return slot

    def _leaf(self, proto: Any) -> Leaf:
        info = (
            value_info(proto.type)
            if proto.type.WhichOneof("type") == "tensorType"
            else ValueInfo((), "string")
        )
        held = read_value(proto, self._package.blobs)
        if isinstance(held, FileValue):
            held.blob.raw(held.offset, held.dtype, held.shape)  # a damaged file is found when it is opened
            return Leaf(info, held, ("file", str(held.blob.path), held.offset, info))
        if isinstance(held, str | list):
            return Leaf(info, held, ("text", str(held)))
        return Leaf(info, held, ("value", info, held.tobytes()))

    def _operands(self, op: Any) -> dict[str, list[int | Static]]:
        """Return each input's values: slots or constants."""
        found: dict[str, list[int | Static]] = {}
        for name, argument in op.inputs.items():
            values: list[int | Static] = []
            for binding in argument.arguments:
                if binding.WhichOneof("binding") == "value":
                    values.append(self._leaf(binding.value))
                elif binding.name in self._named:
                    values.append(self._named[binding.name])
                elif binding.name not in self._states:
                    raise InputError(
                        f"its input {name} is {binding.name!r}, which nothing before it computes"
                    )
            found[name] = values
        for name, proto in op.attributes.items():
            if name != "name":
                found[name] = [self._leaf(proto)]
        return found

    def _add(self, op: Any, where: OpInfo) -> None:
        if op.type == "const":
            self._named[op.outputs[0].name] = self._leaf(op.attributes["val"])
            return
        if op.type in STATE_OPS:
            self._add_state(op, where)
            return
        row = OPS.get(op.type)
        if row is None:
            reason = REFUSED.get(op.type, "this op type is not known up to iOS 18")
            raise InputError(f"cannot be run: {reason}")
        given = self._operands(op)
        unknown = sorted(set(given) - set(row.tensors) - set(row.params))
        if unknown:
            raise InputError(f"has an input {unknown[0]!r} that this op type does not have")
        args = [self._tensor_argument(row, index, given) for index in range(len(row.tensors))]
        params, dynamic = {}, []
        for name in row.params:
            values = given.get(name)
            if not values:
                continue
            if name in LIST_INPUTS:
                params[name] = [_python(value, name) for value in values]
            elif isinstance(values[0], int):
                dynamic.append((name, values[0]))
            else:
                params[name] = values[0].python()
        if row.bind is not None and not dynamic:
            fn = row.bind(**params)
        else:
            fn = partial(row.fn, **params) if params else row.fn
        rounds = tuple(self._fp16 and t.dtype == "fp16" and not row.copies for t in where.types)
        if not dynamic and not _has_slot(args) and not where.op_type.startswith("random_"):
            self._fold(where, fn, args, params, rounds)
            return
        slots = tuple(
            [self._slot(v) for v in a] if isinstance(a, list) else _maybe(self._slot, a) for a in args
        )
        into = partial(row.into, **params) if row.into is not None else fn
        self._append(Step(where, "op", fn, slots, tuple(dynamic), (), rounds, row=row, into=into))

    def _tensor_argument(self, row: OpRow, index: int, given: Mapping[str, list[Any]]) -> Any:
        name = row.tensors[index]
        values = given.get(name)
        if values and name in LIST_INPUTS:
            return values
        if values:
            return values[0]
        if index < len(row.tensors) - row.optional:
            raise InputError(f"has no input {name!r}")
        return None

    def _fold(self, where: OpInfo, fn: Any, args: list[Any], params: Mapping[str, Any], rounds: Any) -> None:
        node = object()
        keys = tuple(
            tuple(v.key for v in a) if isinstance(a, list) else None if a is None else a.key for a in args
        )
        for index, name in enumerate(where.outputs):
            key = ("op", where.op_type, index, repr(sorted(params.items())), keys, rounds[index])
            self._named[name] = Folded(where.types[index], fn, args, index, node, rounds[index], key)

    def _add_state(self, op: Any, where: OpInfo) -> None:
        reference = op.inputs[_STATE_INPUT[op.type]].arguments
        state = reference[0].name if reference else ""
        if state not in self._states:
            raise InputError(f"its state {state!r} is not a state of this function")
        if op.type in _STATE_DATA:
            data = self._operands(op)[_STATE_DATA[op.type]]
            written = OpInfo(where.function, where.position, op.type, where.outputs, ())
            self._append(Step(written, "write", _nothing, (self._slot(data[0]),), (), (), (), state=state))
        if op.type != "write_state":
            rounds = (False,) * len(where.types)
            self._append(Step(where, "read", _nothing, (), (), (), rounds, state=state))

    def _append(self, step: Step) -> None:
        step.outs = tuple(self._new_slot(info) for info in step.info.types)
        self._named.update(zip(step.info.outputs, step.outs, strict=False))
        step.loads = sorted({slot for slot in step.reads() if slot in self._statics})
        self._steps.append(step)


class _Liveness:
    """Sets `frees`, `target` and `copies_data` of all steps."""

    def __init__(
        self,
        steps: list[Step],
        infos: Mapping[int, ValueInfo],
        inputs: Mapping[str, int],
        outputs: Mapping[str, int],
        statics: set[int],
    ) -> None:
        self._steps = steps
        self._infos = infos
        self._statics = statics
        self._end = len(steps)
        self._last: dict[int, int] = {}
        for index, step in enumerate(steps):
            for slot in (*step.outs, *step.reads()):
                self._last[slot] = index
        for slot in outputs.values():
            self._last[slot] = self._end
        # root of a slot: ("fresh", slot) | ("kept", slot) for inputs and constants | ("state", name)
        self._root: dict[int, tuple[str, Any]] = {
            slot: ("kept", slot) for slot in (*inputs.values(), *statics)
        }
        self._joined: dict[tuple[str, Any], tuple[str, Any]] = {}
        self._live_until: dict[tuple[str, Any], int] = {}

    def apply(self) -> None:
        """Fill in the steps."""
        freed: dict[int, list[int]] = {}
        for slot, last in self._last.items():
            if last < self._end and slot not in self._statics:
                freed.setdefault(last, []).append(slot)
        for index, step in enumerate(self._steps):
            step.frees = tuple(freed.get(index, ()))
            if step.kind == "read":
                self._join(step.outs[0], ("state", step.state))
            elif step.kind == "write":
                self._write(step)
            else:
                self._op(index, step)

    def _root_of(self, slot: int) -> tuple[str, Any]:
        root = self._root.get(slot, ("fresh", slot))
        return self._joined.get(root, root)

    def _join(self, slot: int, root: tuple[str, Any]) -> None:
        self._root[slot] = root
        self._live_until[root] = max(self._live_until.get(root, -1), self._last[slot])

    def _write(self, step: Step) -> None:
        """The state takes the written tensor as its buffer, unless that belongs to something else."""
        root = self._root_of(step.args[0])
        state = ("state", step.state)
        step.copies_data = root != state and root[0] != "fresh"
        if root[0] == "fresh":
            self._joined[root] = state
            self._live_until[state] = max(self._live_until.get(state, -1), self._live_until.get(root, -1))

    def _op(self, index: int, step: Step) -> None:
        assert step.row is not None
        if step.row.into is not None:
            for place in range(min(step.row.targets, len(step.args))):
                if self._may_write(index, step, place):
                    step.target = place
                    self._join(step.outs[0], self._root_of(step.args[place]))
                    return
        first = step.args[0] if step.args else None
        for slot in step.outs:
            shared = self._root_of(first) if step.row.view and isinstance(first, int) else None
            self._join(slot, shared or ("fresh", slot))

    def _may_write(self, index: int, step: Step, place: int) -> bool:
        slot, out = step.args[place], step.outs[0]
        if (
            not isinstance(slot, int)
            or self._infos[slot] != self._infos[out]
            or not self._infos[slot].is_static
        ):
            return False
        root = self._root_of(slot)
        if root[0] == "kept" or self._live_until.get(root, -1) > index:
            return False
        others = [a for i, a in enumerate(step.args) if i != place and a is not None and a != slot]
        if any(self._root_of(other) == root for other in others):
            return False
        if root[0] == "fresh":
            return True
        return step.info.op_type == "slice_update" and self._returns_to_state(index, out, root[1])

    def _returns_to_state(self, index: int, slot: int, state: str) -> bool:
        """Whether the next step that touches `state` writes the value of `slot` to it."""
        carriers = {slot}
        for place in range(index + 1, self._end):
            step = self._steps[place]
            if step.state == state:
                return step.kind == "write" and step.args[0] in carriers
            chained = step.info.op_type == "slice_update" and step.args[0] in carriers
            if chained and self._last[step.args[0]] == place:
                carriers.add(step.outs[0])
        return False


def _types(op: Any, position: int) -> list[ValueInfo]:
    try:
        return [value_info(output.type) for output in op.outputs]
    except InputError as error:
        if op.type in REFUSED:
            return []
        raise InputError(f"op {op.type} (number {position}): {error}") from error


def _has_slot(args: list[Any]) -> bool:
    return any(isinstance(v, int) for a in args for v in (a if isinstance(a, list) else [a]))


def _maybe(function: Callable[[Any], int], value: Any) -> int | None:
    return None if value is None else function(value)


def _python(value: "int | Static", name: str) -> Any:
    if isinstance(value, int):
        raise InputError(f"its input {name!r} must be constant")
    return value.python()


def _nothing() -> None:
    """Function of steps that the session runs itself."""
