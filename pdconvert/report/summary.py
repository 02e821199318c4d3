"""The end of a build on the terminal: ledger, checks, and what to know and do next, at most 80 columns wide."""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path

from pdconvert.checks import Check
from pdconvert.report import view
from pdconvert.report.load import BuildReport, decibel
from pdconvert.report.page import PAGE

WIDTH = 80
LABEL = 15
PLACEHOLDER = "BUILD"
SHORT_PATH = 34
"""A longer path would break the commands' lines; it stands on a line of its own at the end."""


def summary(out: Path, build: BuildReport) -> str:
    """Everything about a build as text.

    Args:
        out: where the build lies in the end.
    """
    return "\n".join(
        [
            *_ledger(build),
            "",
            *_checks(build),
            *_failures(build),
            *_alarm(build),
            "",
            *_facts(build),
            *_notes(build),
            *_next(out, build),
        ]
    )


def _ledger(build: BuildReport) -> list[str]:
    lines = [f"{'step':<24}{'worst block':<16}{'vs step before':>16}{'vs original':>16}"]
    for row in build.ledger.table():
        before, original = decibel(row["previous_db"]), decibel(row["original_db"])
        lines.append(f"{row['step']:<24}{row['block']:<16}{before:>16}{original:>16}")
    return lines


def _checks(build: BuildReport) -> list[str]:
    lines = [f"{'check':<44}{'value':>14}{'gate':>16}"]
    for check in _shortened(build.checks[len(build.ledger.names()) :]):
        mark = "" if check.passed else " FAIL"
        value = view.measured(check.value, check.metric)
        lines.append(f"{check.name[:43]:<44}{value:>14}{view.gate_text(check):>16}{mark}".rstrip())
    return lines


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


def _failures(build: BuildReport) -> list[str]:
    """Failed checks, those with the same cause together, and the cause."""
    causes: dict[str, list[str]] = {}
    for check in build.checks:
        if not check.passed:
            text = f"failed: {check.name}: {view.measured(check.value, check.metric)}"
            causes.setdefault(check.hint, []).append(text)
    lines = []
    for hint, failed in causes.items():
        lines += ["", *failed, *textwrap.wrap(hint, WIDTH, initial_indent="  ", subsequent_indent="  ")]
    return lines


def _alarm(build: BuildReport) -> list[str]:
    """What is not a failure, and to be known all the same."""
    said = build.section("fit").get("alarm")
    return ["", *textwrap.wrap(f"note: {said}", WIDTH, subsequent_indent="  ")] if said else []


def _facts(build: BuildReport) -> list[str]:
    """The summary proper: one line each, as far as the build has the figure."""
    sizes, cost, worst = build.section("sizes"), build.section("cost"), view.worst_block(build)
    kld, top1 = build.check("pair: KLD, mean"), build.check("pair: top-1")
    facts = [("verdict", "PASS" if build.passed else "FAIL")]
    if build.passed:
        facts.append(("nearest gate", view.nearest_gate(build)))
    facts.append(("sizes", ", ".join(f"{name} {size}" for name, size in view.halves(sizes))))
    if worst is not None:
        facts.append(("worst block", f"{worst.value}: {worst.note}"))
    if kld and top1:
        facts.append(("KLD, top-1", f"{kld.value:.5f} nats, {100 * top1.value:.1f} % of the pair"))
    if build.rows("samples"):
        facts.append(("answer", _answer(build)))
    facts.append(("cost", f"{cost['seconds']:.0f} s, peak {cost['peak_bytes'] / 1e9:.2f} GB"))
    return [
        f"{label:<{LABEL}}{textwrap.shorten(text, WIDTH - LABEL, placeholder=' …')}" for label, text in facts
    ]


def _notes(build: BuildReport) -> list[str]:
    """What the build decided by itself, and what it did in the place of what the recipe asks for."""
    lines = []
    for note in build.manifest["source"]["notes"]:
        lines += textwrap.wrap(
            note, WIDTH, initial_indent=f"{'note':<{LABEL}}", subsequent_indent=" " * LABEL
        )
    return lines


def _answer(build: BuildReport) -> str:
    """The pair's continuation of the first prompt, on one line."""
    sample = build.rows("samples")[0]
    return f"{sample['prompt']} |{' '.join((sample['common'] + sample['pair']).split())}"


def _next(out: Path, build: BuildReport) -> list[str]:
    """What one does with a build like this."""
    path = shlex.quote(str(out))
    where = path if len(path) <= SHORT_PATH else PLACEHOLDER
    commands = [f"open {where}/{PAGE.as_posix()}"]
    if build.passed:
        commands += [
            f'pdconvert run {where} --prompt "The capital of France is"',
            f"pdconvert verify {where}",
        ]
    else:
        commands += [f"pdconvert compare GOOD_BUILD {where}"]
    return ["", f"next{', where BUILD is the folder below' if where == PLACEHOLDER else ''}:"] + [
        f"  {command}" for command in commands
    ]
