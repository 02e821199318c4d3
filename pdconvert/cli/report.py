"""`pdconvert report`: write the report page of a build again."""

from pathlib import Path

import click

from pdconvert.cli.params import UserPath, echo_json, examples, json_option


@click.command(
    "report",
    short_help="Write the report page of a build again.",
    epilog=examples(
        "pdconvert report build/smollm2-135m",
    ),
)
@click.argument("build", type=UserPath())
@json_option
def command(build: Path, as_json: bool) -> None:
    """Write report/index.html of BUILD from its report.json: one file that opens from disk.

    Every build writes it at its end; this is for builds of an older version. It reads two JSON files and runs nothing.
    """
    from pdconvert.report.load import readable
    from pdconvert.report.page import write_page

    with readable(build):
        path = write_page(build)
    if as_json:
        echo_json({"path": str(path), "size_bytes": path.stat().st_size})
    else:
        click.echo(path)
