"""`pdconvert lint`: what in a package is known to keep it from the Neural Engine, or to slow it there."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pdconvert.cli.params import UserPath, echo_json, json_option

if TYPE_CHECKING:
    from pdconvert.lint.report import Finding, Place, Report


@click.command("lint", short_help="Check a package against Neural Engine rules.")
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

    chosen = ", ".join((*report.targets.chips, *report.targets.systems))
    parts = [f"{report.path} for {chosen}"]
    parts += [_finding_text(finding, report) for finding in report.findings]
    counts = ", ".join(f"{count} {severity}" for severity, count in report.counts().items() if count)
    verdict = "pass" if report.passed else "fail"
    return "\n\n".join([*parts, f"{verdict}: {counts or 'nothing found'}\n{NOTE}"])


def _finding_text(finding: "Finding", report: "Report") -> str:
    where = f"function {finding.function}" if finding.function else "package"
    times = f", {finding.count} times" if finding.count > 1 else ""
    lines = [
        f"{finding.severity}  {finding.rule}  {where}: {finding.found}{times}",
        f"  {finding.title}.",
        f"  at: {', '.join(map(_place_text, finding.places[:3]))}{', ...' if finding.count > 3 else ''}",
        f"  mend: {finding.mend}",
        f"  source: {finding.source}",
    ]
    if finding.chips != report.targets.chips:
        lines.insert(2, f"  chips: {', '.join(finding.chips)}")
    if finding.systems != report.targets.systems:
        lines.insert(2, f"  systems: {', '.join(finding.systems)}")
    return "\n".join(lines)


def _place_text(place: "Place") -> str:
    if place.shape is None:
        return place.name
    sizes = ", ".join("?" if size < 0 else str(size) for size in place.shape)
    return f"{place.name} {place.dtype} ({sizes})"
