"""`pdconvert export`: a finished build for other tools."""

from pathlib import Path

import click

from pdconvert.cli.params import UserPath, echo_json, examples, json_option, table

STEPS = ("fold", "fuse")


@click.group(
    "export",
    short_help="Write a build for other tools.",
    epilog=examples("pdconvert export onnx build/smollm2-135m --out onnx"),
)
def command() -> None:
    """Write a finished build in the form of other tools."""


@command.command("onnx", short_help="QDQ ONNX models, encodings, test vectors.")
@click.argument("build", type=UserPath())
@click.option("--out", type=UserPath(), required=True, metavar="DIR", help="A new or empty folder.")
@click.option("--function", "functions", multiple=True, metavar="NAME", help="Only this one. Repeatable.")
@click.option(
    "--optimize",
    "steps",
    multiple=True,
    type=click.Choice(STEPS),
    help="Let ONNX Runtime fold constants, fuse nodes. Repeatable, in order.",
)
@json_option
@click.pass_context
def onnx(
    ctx: click.Context,
    build: Path,
    out: Path,
    functions: tuple[str, ...],
    steps: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write the package of BUILD as QDQ ONNX models with encodings and test vectors, and run them.

    The exit code is 1 when ONNX Runtime does not give what the package gives; the files are kept.
    """
    from pdconvert.export.onnx_build import export_onnx

    report = export_onnx(build, out, functions, steps)
    if as_json:
        echo_json({"path": str(out), **report})
    else:
        rows = [(check["name"], _number(check["value"]), check["floor"]) for check in report["checks"]]
        click.echo(table(rows, ("check", "SQNR dB", "floor")))
        click.echo(f"{report['verdict']}: {out}")
    if report["verdict"] != "pass":
        ctx.exit(1)


def _number(value: object) -> object:
    return f"{value:.1f}" if isinstance(value, float) else value
