"""`pdconvert lint`: what in a package is known to keep it from the Neural Engine, or to slow it there."""

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pdconvert.cli.params import UserPath, echo_json, examples, json_option
from pdconvert.errors import printable

if TYPE_CHECKING:
    from pdconvert.lint.report import Finding, Place, Report

SHOWN = 3
"""Places named for each group of equal findings; `--json` has more."""


@click.command(
    "lint",
    short_help="Check a package against Neural Engine rules.",
    epilog=examples(
        "pdconvert lint build/smollm2-135m",
        "pdconvert lint some.mlpackage --target m2 --target iOS18",
    ),
)
@click.argument("path", type=UserPath())
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="NAME",
    help="A chip (a14 to a18, m1 to m5) or a system (iOS16 to iOS18); may be repeated. Default: all.",
)
@json_option
@click.pass_context
def command(ctx: click.Context, path: Path, targets: tuple[str, ...], as_json: bool) -> None:
    """Check PATH, a .mlpackage or a build folder, against what is known of the Neural Engine.

    The exit code is 1 when a finding is fatal or silent. No finding does not mean that anything runs on the
    Neural Engine. docs/lint.md has every rule with its source.
    """
    from pdconvert.lint.report import lint_path

    report = lint_path(path, targets)
    if as_json:
        echo_json(report.to_json())
    else:
        click.echo(_text(report))
    if not report.passed:
        ctx.exit(1)


def _text(report: "Report") -> str:
    from pdconvert.lint.report import NOTE

    parts = [f"{report.path}, checked for {', '.join((*report.targets.chips, *report.targets.systems))}"]
    for _, findings in groupby(report.findings, key=lambda finding: finding.rule):
        parts.append(_rule_text(list(findings), report))
    counts = ", ".join(f"{count} {severity}" for severity, count in report.counts().items() if count)
    verdict = "pass" if report.passed else "fail"
    return "\n\n".join([*parts, f"{verdict}: {counts or 'nothing found'}\n{NOTE}"])


def _rule_text(findings: list["Finding"], report: "Report") -> str:
    """What one rule found: the rule itself once, then a line for each group of equal findings."""
    rule = findings[0]
    lines = [f"{rule.severity}  {rule.rule}: {rule.title}"]
    lines += [f"  - {_finding_text(finding, report)}" for finding in findings]
    return "\n".join([*lines, f"  mend: {rule.mend}", f"  source: {rule.source}"])


def _finding_text(finding: "Finding", report: "Report") -> str:
    package = finding.package if len(report.packages) > 1 else ""
    where = "".join(f"{name}: " for name in (package, finding.function) if name)
    times = f", {finding.count} times" if finding.count > 1 else ""
    narrowed = [
        ", ".join(names)
        for names, every in (
            (finding.chips, report.targets.chips),
            (finding.systems, report.targets.systems),
        )
        if names != every
    ]
    only = f" (only {'; '.join(narrowed)})" if narrowed else ""
    places = ", ".join(map(_place_text, finding.places[:SHOWN]))
    more = ", ..." if finding.count > SHOWN else ""
    return f"{where}{finding.found}{times}{only}: {places}{more}"


def _place_text(place: "Place") -> str:
    if place.shape is None:
        return printable(place.name)
    sizes = ", ".join("?" if size < 0 else str(size) for size in place.shape)
    return f"{printable(place.name)} {place.dtype} ({sizes})"
