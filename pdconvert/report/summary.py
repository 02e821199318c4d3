"""The closing table of a build, at most 80 columns wide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdconvert.checks import Check
from pdconvert.ledger import Ledger

if TYPE_CHECKING:
    from pdconvert.emit.manifest import Cost

WIDTH = 80


def number(value: float, metric: str) -> str:
    """A measured value with its unit."""
    if metric == "sqnr_db":
        return "equal" if value == math.inf else f"{value:.1f} dB"
    return f"{100 * value:.1f} %" if metric == "share_equal" else f"{value:.5f}"


def summary(folder: Path, checks: Sequence[Check], ledger: Ledger, cost: Cost) -> str:
    """Ledger, checks, sizes and cost as text."""
    lines = [f"{'step':<24}{'worst block':<16}{'vs step before':>16}{'vs original':>16}"]
    for row in ledger.table():
        before, original = number(row["previous_db"], "sqnr_db"), number(row["original_db"], "sqnr_db")
        lines.append(f"{row['step']:<24}{row['block']:<16}{before:>16}{original:>16}")
    lines += ["", f"{'check':<50}{'value':>11}{'gate':>12}"]
    for check in _shortened(checks[len(ledger.names()) :]):
        gate = (
            ""
            if check.floor is None
            else f"{'≤' if check.ceiling else '≥'} {number(check.floor, check.metric)}"
        )
        mark = "" if check.passed else "  FAIL"
        lines.append(f"{check.name[:49]:<50}{number(check.value, check.metric):>11}{gate:>12}{mark}")
    for check in checks:
        if not check.passed:
            lines += ["", f"failed: {check.name}: {number(check.value, check.metric)}", f"  {check.hint}"]
    sizes = ", ".join(f"{name} {_megabytes(folder / name)}" for name in ("prefill.mlpackage", "decode"))
    lines += ["", f"{sizes}; {cost.seconds:.0f} s, peak {cost.peak_bytes / 1e9:.2f} GB"]
    return "\n".join(lines)


def _shortened(checks: Sequence[Check]) -> list[Check]:
    """Of the outputs of one function in one arithmetic, the one nearest to its gate or beyond it."""
    nearest: dict[str, Check] = {}
    for check in checks:
        function = check.name.partition(": ")[0]
        key = function if ", " in function else check.name
        best = nearest.get(key)
        if best is None or math.isnan(check.value) or check.value < best.value:
            nearest[key] = check
    return list(nearest.values())


def _megabytes(folder: Path) -> str:
    return f"{sum(path.stat().st_size for path in folder.rglob('*') if path.is_file()) / 1e6:.1f} MB"
