"""Turn a function's protobuf into a plan: steps over slots.

Every run-time value gets a slot. Constants become `Static` values; an op with constant inputs only is
folded into one.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pdconvert.collection import uncollected
from pdconvert.errors import InputError
from pdconvert.executors.mil.fuse import Parts, fuse
from pdconvert.executors.mil.liveness import Liveness
from pdconvert.executors.mil.op_types import UNKNOWN
from pdconvert.executors.mil.ops import OPS, REFUSED, STATE_OPS, OpRow
from pdconvert.executors.mil.ops.row import LIST_INPUTS
from pdconvert.executors.mil.package import Package
from pdconvert.executors.mil.plan import OpInfo, Plan, Step
from pdconvert.executors.mil.values import FileValue, ValueInfo, read_value, reading, value_info
from pdconvert.executors.mil.weights import Folded, Leaf, Static, held_bytes

_STATE_INPUT = {"read_state": "input", "write_state": "input", "coreml_update_state": "state"}
_STATE_DATA = {"write_state": "data", "coreml_update_state": "value"}


class PlanBuilder:
    """Reads one function, once, and builds its plans: op by op, and with steps that stand for several ops."""

    def __init__(self, package: Package, function: str, fp16: bool) -> None:
        """Read the function.

        Args:
            package: the package.
            function: name of the function.
            fp16: whether fp16-typed results are rounded.

        Raises:
            InputError: an op that cannot be run, or a program that does not hold together.
        """
        self._package = package
        self._function = function
        self._fp16 = fp16
        self._named: dict[str, int | Static] = {}
        self._infos: dict[int, ValueInfo] = {}
        self._static_slots: dict[int, int] = {}
        self._statics: dict[int, Static] = {}
        self._states: set[str] = set()
        self._steps: list[Step] = []
        self._inputs: dict[str, int] = {}
        self._outputs: dict[str, int] = {}
        with uncollected():
            self._read()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all constants of the plan op by op, materialised."""
        return sum(held_bytes(static.info) for static in self._statics.values())

    def build(self, *, fused: bool = False) -> Plan:
        """A plan of the function.

        Args:
            fused: whether steps may stand for several ops (`fuse.py`); fp32 only.
        """
        steps, infos, statics = (
            [replace(step) for step in self._steps],
            dict(self._infos),
            dict(self._statics),
        )
        if fused:
            steps = fuse(Parts(steps, infos, statics, set(self._outputs.values())))
        Liveness(steps, infos, self._inputs, self._outputs, set(statics)).apply()
        return Plan(steps, len(infos), statics, self._inputs, self._outputs)

    def _read(self) -> None:
        info = self._package.function(self._function)
        block = self._package.block(self._function)
        for name, value in info.inputs.items():
            self._inputs[name] = self._new_slot(value)
            self._named[name] = self._inputs[name]
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
            with reading(self._package.path, where):
                self._add(op, where)
        self._outputs = {name: self._slot(self._named[name]) for name in block.outputs}

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
        twice = [name for name in where.outputs if name in self._named]
        if twice:
            raise InputError(f"gives {twice[0]!r}, which something before it gives too")
        if op.type == "const":
            self._named[op.outputs[0].name] = self._leaf(op.attributes["val"])
            return
        if op.type in STATE_OPS:
            self._add_state(op, where)
            return
        row = OPS.get(op.type)
        if row is None:
            reason = REFUSED.get(op.type, UNKNOWN)
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
        fn = self._bound(row, params) if not dynamic else partial(row.fn, **params)
        rounds = tuple(self._fp16 and t.dtype == "fp16" and not row.copies for t in where.types)
        if not dynamic and not _has_slot(args):
            self._fold(where, fn, args, params, rounds)
            return
        while args and args[-1] is None:
            args.pop()
        slots = tuple(
            [self._slot(v) for v in a] if isinstance(a, list) else _maybe(self._slot, a) for a in args
        )
        into = partial(row.into, **params) if row.into is not None else fn
        self._append(
            Step(where, "op", fn, slots, tuple(dynamic), (), rounds, row=row, into=into, params=params)
        )

    def _bound(self, row: OpRow, params: Mapping[str, Any]) -> Callable[..., Any]:
        """Return the op's function with its constant parameters worked in."""
        if row.bind is None:
            return partial(row.fn, **params) if params else row.fn
        try:
            return row.bind(**params)
        except (TypeError, ValueError) as error:
            raise InputError(f"its parameters do not fit together: {error}") from error

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
        node = f"{self._package.path}: {where}"
        keys = [[v.key for v in a] if isinstance(a, list) else None if a is None else a.key for a in args]
        made = hashlib.sha256(repr((where.op_type, sorted(params.items()), keys, rounds)).encode()).digest()
        for index, name in enumerate(where.outputs):
            key = ("op", made, index)  # of one size however deep constants are made of others
            self._named[name] = Folded(where.types[index], fn, args, index, node, rounds[index], key)

    def _add_state(self, op: Any, where: OpInfo) -> None:
        name = _STATE_INPUT[op.type]
        state = op.inputs[name].arguments[0].name if name in op.inputs else ""
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
