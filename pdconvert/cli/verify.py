"""`pdconvert verify`: replay a build's test vectors through the files that it shipped."""

from pathlib import Path

import click

from pdconvert.cli.params import UserPath, echo_json, echo_verdict, examples, json_option, table


@click.command(
    "verify",
    short_help="Replay the test vectors of a build.",
    epilog=examples(
        "pdconvert verify build/smollm2-135m",
        "pdconvert verify build/smollm2-135m --executor coreml --json",
    ),
)
@click.argument("build", type=UserPath())
@click.option(
    "--executor",
    type=click.Choice(["auto", "mil", "coreml"]),
    default="auto",
    show_default=True,
    help="What runs the package: Core ML (macOS only), or the MIL executor.",
)
@json_option
@click.pass_context
def command(ctx: click.Context, build: Path, executor: str, as_json: bool) -> None:
    """Replay the test vectors of BUILD through its package and its decode weights.

    The exit code is 1 when a check failed.
    """
    from pdconvert.verify import verify_build

    report = verify_build(build, executor=executor)
    if as_json:
        echo_json(report)
    else:
        click.echo(_table(report["checks"]))
        echo_verdict(report["verdict"], f"{report['verdict']}: {build}")
    if report["verdict"] != "pass":
        ctx.exit(1)


def _table(checks: list[dict]) -> str:
    rows = [
        (
            check["name"],
            check["metric"],
            _number(check["value"]),
            _number(check["floor"]),
            "pass" if check["passed"] else "FAIL",
        )
        for check in checks
    ]
    return table(rows, ("check", "metric", "value", "floor", ""))


def _number(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value
