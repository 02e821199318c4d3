"""The form of a function that is ready to run: steps over slots."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdconvert.executors.mil.op_types import op_place
from pdconvert.executors.mil.ops import OpRow
from pdconvert.executors.mil.values import ValueInfo
from pdconvert.executors.mil.weights import Static


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
        return op_place(self.op_type, self.outputs, self.position, self.function)


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
        params: its constant parameters.
        detaches: slots whose values get memory of their own before the step writes into what they share.
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
    params: Mapping[str, Any] = field(default_factory=dict)
    detaches: tuple[int, ...] = ()

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
