"""Where a graph ran: what an executor can say of it, before anybody names the Neural Engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

UNITS = {"ne": "the Neural Engine", "gpu": "the GPU", "cpu": "the CPU"}


def describe(executor: str, placements: Sequence[Mapping[str, float]] | None) -> str:
    """A sentence on where the package ran.

    Args:
        executor: kind of the executor.
        placements: per function, the share of Core ML's estimated cost by unit; None where there is no plan.
    """
    if executor == "mil":
        return "the package was interpreted on the CPU; these times say nothing of a Neural Engine"
    known = [placement for placement in placements or () if placement]
    if not known:
        return "Core ML gives no plan for this package, so it is not known where it ran"
    shares = {unit: min(placement.get(unit, 0.0) for placement in known) for unit in UNITS}
    most = {unit: max(placement.get(unit, 0.0) for placement in known) for unit in UNITS}
    parts = [
        f"{_range(shares[unit], most[unit])} on {name}" for unit, name in UNITS.items() if most[unit] > 0
    ]
    return f"Core ML's plan, by estimated cost: {', '.join(parts)}"


def _range(least: float, most: float) -> str:
    low, high = f"{100 * least:.0f}", f"{100 * most:.0f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def placement_of(session: Any) -> dict[str, float]:
    """The share of estimated cost by unit of an open function; {} where nothing is known."""
    parts = getattr(session, "sessions", (session,))  # a model in parts is a chain of sessions
    found = [part.placement() for part in parts if hasattr(part, "placement")]
    if len(found) != len(parts) or not all(found):
        return {}
    return {unit: sum(one.get(unit, 0.0) for one in found) / len(found) for unit in UNITS}
