"""Repeated timings of one action."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """Seconds of several runs of the same thing."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def least(self) -> float:
        return min(self.seconds)

    @property
    def most(self) -> float:
        return max(self.seconds)

    def to_json(self) -> dict[str, float | int]:
        """Median and spread."""
        return {
            "median_s": self.median,
            "min_s": self.least,
            "max_s": self.most,
            "runs": len(self.seconds),
        }


def repeat(action: Callable[[], object], runs: int, warm_up: int = 1) -> Sample:
    """Time an action that returns when its work is done.

    Args:
        warm_up: runs before those that count: compilation, page faults, clocks.
    """
    for _ in range(warm_up):
        action()
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return Sample(tuple(seconds))


def columns(rows: Sequence[dict[str, float]]) -> dict[str, Sample]:
    """One sample per key of rows with equal keys."""
    return {key: Sample(tuple(row[key] for row in rows)) for key in rows[0]}
