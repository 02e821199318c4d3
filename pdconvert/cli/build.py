"""`pdconvert build`: compile a recipe, verify what was written, report."""

import sys
from pathlib import Path
from typing import Literal

import click
from click.shell_completion import CompletionItem

from pdconvert import api
from pdconvert.cli.params import UserPath, echo_json, echo_verdict, examples, json_option
from pdconvert.progress import Progress


def _recipe_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The shipped recipes, and what the shell finds among the files."""
    from pdconvert.cli.listing import recipes

    names = [row["name"] for row in recipes() if row["name"].startswith(incomplete)]
    return [*map(CompletionItem, names), CompletionItem(incomplete, type="file")]


@click.command(
    "build",
    short_help="Compile a recipe and verify the result.",
    epilog=examples(
        "pdconvert build smollm2-135m",
        "pdconvert build my-recipe.yaml --source ~/models/mine --out build/mine",
        "pdconvert build smollm2-135m --set prefill.kv.rope=raw --out build/raw",
    ),
)
@click.argument("recipe", shell_complete=_recipe_names)
@click.option("--source", metavar="SRC", help="A folder, a .gguf file, a hub id, or package:NAME.")
@click.option("--out", type=UserPath(), metavar="DIR", help="Where to write. [default: build/<recipe name>]")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change one scalar of the recipe, e.g. prefill.kv.rope=raw. Repeatable.",
)
@click.option("--force", is_flag=True, help="Replace an earlier build in the output folder.")
@click.option("--no-cache", is_flag=True, help="Neither reuse nor keep work of other builds.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Where calibrated quantization computes.",
)
@click.option("--dry-run", is_flag=True, help="Print the resolved recipe and stop.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    recipe: str,
    source: str | None,
    out: Path | None,
    overrides: tuple[str, ...],
    force: bool,
    no_cache: bool,
    device: Literal["cpu", "cuda"],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Compile RECIPE (a file, or the name of a shipped recipe) and verify the result.

    The exit code is 1 when a check failed: the files are kept, their verdict is `fail`.
    """
    from pdconvert.recipe import load_recipe

    resolved = load_recipe(recipe, source=source, overrides=overrides)
    if dry_run:
        _print_recipe(resolved.resolved(), as_json)
        return
    progress = Progress() if sys.stderr else Progress.silent()  # stderr may be closed
    result = api.build(resolved, out, force=force, use_cache=not no_cache, progress=progress, device=device)
    if as_json:
        echo_json({"path": str(result.path), "verdict": result.verdict, "summary": result.summary})
    else:
        click.echo(result.summary)
        echo_verdict(result.verdict, f"{result.verdict}: {result.path}")
    if result.verdict != "pass":
        ctx.exit(1)


def _print_recipe(recipe: dict, as_json: bool) -> None:
    import yaml

    if as_json:
        echo_json(recipe)
    else:
        click.echo(yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True), nl=False)
