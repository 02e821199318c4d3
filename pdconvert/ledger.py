"""The SQNR ledger: what every pass did to every block, and its gate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pdconvert.checks import Check

STORED, CHECKPOINT = "its own weights in fp32", "the checkpoint in fp32"
"""What a package's K and V are compared with."""

ADVICE = {
    "family": "the family's block differs from Hugging Face's; report it as a bug with the checkpoint's config",
    "learn_scales": "lower quantize_weights.learning_rate, or leave learning_steps out",
    "quantize_weights": "use a finer scheme, or `scheme: none` to see what the weights cost",
}
DEFAULT_ADVICE = "take the pass out of the recipe, or report it as a bug with the checkpoint's config"


@dataclass(frozen=True)
class Step:
    """One line of the ledger: what a pass did to one block.

    Attributes:
        original_db, previous_db: the worst output's SQNR against the original block and the previous step;
            inf where bit-equal.
    """

    block: str
    step: str
    original_db: float
    previous_db: float
    floor_db: float
    seconds: float

    @property
    def passed(self) -> bool:
        return self.previous_db >= self.floor_db and not math.isnan(self.original_db)


@dataclass(frozen=True)
class Ledger:
    """Steps of all blocks, in the order in which they ran."""

    steps: list[Step]

    def names(self) -> list[str]:
        """Steps by name, in order of their first appearance."""
        return list(dict.fromkeys(step.step for step in self.steps))

    def worst(self, name: str) -> Step:
        """The block in which a step did worst against the step before it and its floor; NaN is worst of all."""
        steps = [step for step in self.steps if step.step == name]
        broken = [step for step in steps if math.isnan(step.previous_db) or math.isnan(step.original_db)]
        return broken[0] if broken else min(steps, key=lambda step: step.previous_db - step.floor_db)

    def gates(self, adapted_db: float) -> list[Check]:
        """One check per step: its worst block against its floor, exact steps also against `adapted_db`."""
        checks = []
        for name in self.names():
            step = self.worst(name)
            floor = (
                step.floor_db
                if name in ("quantize_weights", "learn_scales")
                else max(step.floor_db, adapted_db)
            )
            hint = f"block {step.block}, pass {name}: {ADVICE.get(name, DEFAULT_ADVICE)}"
            value = math.nan if math.isnan(step.original_db) else step.previous_db
            checks.append(
                Check(f"pass {name}, worst block ({step.block})", "sqnr_db", value, floor, hint=hint)
            )
        return checks

    def table(self) -> list[dict[str, Any]]:
        """Per step the worst block's SQNR against the step before and the original, in dB."""
        rows = []
        for name in self.names():
            step = self.worst(name)
            originals = [other.original_db for other in self.steps if other.step == name]
            original = math.nan if any(map(math.isnan, originals)) else min(originals)
            rows.append(
                {"step": name, "block": step.block, "previous_db": step.previous_db, "original_db": original}
            )
        return rows
