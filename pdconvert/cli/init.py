"""`pdconvert init`: write a recipe for a checkpoint, or say why it cannot be converted."""

from __future__ import annotations

from pathlib import Path

import click

from pdconvert.cli.params import UserPath, echo_json, examples, json_option


@click.command(
    "init",
    short_help="Write a recipe for a checkpoint.",
    epilog=examples("pdconvert init ~/models/mine --out mine.yaml"),
)
@click.argument("src")
@click.option(
    "--out", type=UserPath(), metavar="FILE", help="Where to write; `-` prints. [default: <its name>.yaml]"
)
@click.option("--force", is_flag=True, help="Replace a file.")
@json_option
def command(src: str, out: Path | None, force: bool, as_json: bool) -> None:
    """Look at SRC and write a commented recipe for it, or say in one line why it cannot be converted.

    SRC is a folder, a .gguf file, a hub id, or package:NAME. No weight is read.
    """
    from pdconvert.starter import starter, write_starter

    found = starter(src, Path.cwd())
    if out == Path("-"):
        click.echo(found.text, nl=False)
        return
    path = out or Path(f"{found.name}.yaml")
    write_starter(found, path, force=force)
    if as_json:
        echo_json({"path": str(path), "name": found.name, "about": found.about, "checked": found.checked})
        return
    click.echo(found.about)
    if not found.checked:
        click.echo("its weights are not in the cache: they are checked when `build` has downloaded them")
    click.echo(f"wrote {path}; next: pdconvert plan {path}, pdconvert build {path}")
