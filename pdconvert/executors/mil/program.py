"""A plan with its compiled steps and the constants that stay in its registers from run to run."""

from typing import Any

from pdconvert.executors.mil.calls import Call, compile_step
from pdconvert.executors.mil.plan import Plan, Step
from pdconvert.executors.mil.weights import WeightCache

Entry = tuple[Step, Call | None, list[int], tuple[int, ...]]
"""A step, its closure (None for reads and writes of states), constants to load, slots to free."""


class Program:
    """A plan, ready to run.

    Attributes:
        plan: the plan.
        entries: its steps, compiled.
    """

    def __init__(self, plan: Plan, cache: WeightCache) -> None:
        """Compile; constants come from the cache when a run first needs them."""
        self.plan = plan
        self.entries: list[Entry] = [
            (step, compile_step(step) if step.kind == "op" else None, list(step.loads), step.frees)
            for step in plan.steps
        ]
        self._cache = cache
        self._base: list[Any] = [None] * plan.slots

    def registers(self) -> list[Any]:
        """Return fresh registers that hold the constants that the cache keeps."""
        return self._base.copy()

    def load(self, loads: list[int], registers: list[Any]) -> None:
        """Put constants into their registers; those that the cache keeps are there from the next run on."""
        for slot in loads:
            if registers[slot] is None:
                registers[slot], kept = self._cache.get(self.plan.statics[slot])
                if kept:
                    self._base[slot] = registers[slot]

    def drop(self, loads: list[int], registers: list[Any]) -> None:
        """Free the constants that the cache does not keep; never look at the others again."""
        for slot in loads:
            registers[slot] = self._base[slot]
        loads[:] = [slot for slot in loads if self._base[slot] is None]
