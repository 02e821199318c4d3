"""A check: one measured value against one gate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NEAR_TIE = 0.05
"""Positions whose two best reference logits are closer than this do not count as different."""


@dataclass(frozen=True)
class Check:
    """A line of the verdict.

    Attributes:
        name: what was compared, such as "package fp16: k".
        metric: the quantity with its unit, such as "sqnr_db".
        value: as measured; NaN never passes.
        floor: the least value that passes, or the largest where `ceiling`; None where nothing is asked.
        ceiling: whether `floor` is an upper limit.
        hint: where it went wrong and what to try, shown when the check fails.
    """

    name: str
    metric: str
    value: float
    floor: float | None
    ceiling: bool = False
    hint: str = ""

    @property
    def passed(self) -> bool:
        if math.isnan(self.value):
            return False
        if self.floor is None:
            return True
        return self.value <= self.floor if self.ceiling else self.value >= self.floor

    def to_json(self) -> dict[str, Any]:
        """Plain data; an SQNR of equal tensors, which is infinite, is written as the text "inf"."""
        value: float | str = self.value if math.isfinite(self.value) else str(self.value)
        line = {
            "name": self.name,
            "metric": self.metric,
            "value": value,
            "floor": self.floor,
            "passed": self.passed,
        }
        return {
            **line,
            "limit": "max" if self.ceiling else "min",
            **({"hint": self.hint} if self.hint else {}),
        }

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Check:
        """The reverse of `to_json`."""
        ceiling = line.get("limit") == "max"
        return cls(
            line["name"], line["metric"], float(line["value"]), line["floor"], ceiling, line.get("hint", "")
        )


def verdict(checks: list[Check]) -> str:
    """ "pass" if every check passed and there is at least one, else "fail"."""
    return "pass" if checks and all(check.passed for check in checks) else "fail"
