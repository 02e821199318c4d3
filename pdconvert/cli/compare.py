"""`pdconvert compare`: two builds on one page."""

from pathlib import Path

import click

from pdconvert.cli.params import UserPath, echo_json, examples, json_option, table


@click.command(
    "compare",
    short_help="Compare two builds on one page.",
    epilog=examples(
        "pdconvert compare build/smollm2-135m build/raw --out compare.html",
    ),
)
@click.argument("build_a", type=UserPath())
@click.argument("build_b", type=UserPath())
@click.option(
    "--out", type=UserPath(), metavar="FILE", help="Write the page, too; an older one there is replaced."
)
@json_option
def command(build_a: Path, build_b: Path, out: Path | None, as_json: bool) -> None:
    """Compare BUILD_A with BUILD_B: recipe, sizes, SQNR, KLD, generations.

    Prints a table; with --out also a page in the style of the report, one file that opens from disk.
    """
    from pdconvert.report.compare import compare, compare_page
    from pdconvert.report.load import BuildReport, readable

    a, b = BuildReport.read(build_a), BuildReport.read(build_b)
    with readable(build_a, build_b):
        found = compare(a, b)
        page = compare_page(a, b) if out is not None else ""
    if out is not None:
        out.write_text(page, encoding="utf-8")
    if as_json:
        echo_json({"path": str(out) if out else None, **found.to_json()})
        return
    click.echo(
        table([(row.what, row.a, row.b, row.change) for row in found.figures], ("", "A", "B", "B − A"))
    )
    if found.recipe:
        click.echo("\n" + table([(row.what, row.a, row.b) for row in found.recipe], ("recipe", "A", "B")))
    if out is not None:
        click.echo(f"\n{out}")
