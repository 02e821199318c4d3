"""`pdconvert prefill`: a prompt through a build's package, its K and V into a hand-off file."""

from pathlib import Path
from typing import Any

import click

from pdconvert.cli.generation import cache_arguments, package_options, prompt_options, read_prompt
from pdconvert.cli.params import UserPath, echo_json, examples, json_option
from pdconvert.sizes import size_text


@click.command(
    "prefill",
    short_help="Prefill a prompt into a hand-off file.",
    epilog=examples(
        'pdconvert prefill build/smollm2-135m --prompt "Once upon" --out kv.pdkv',
    ),
)
@click.argument("build", type=UserPath())
@prompt_options
@click.option(
    "--out",
    type=UserPath(),
    required=True,
    metavar="FILE",
    help="The hand-off file; an older one there is replaced.",
)
@click.option(
    "--layout",
    type=click.Choice(["native", "graph", "pd"]),
    default="native",
    show_default=True,
    help="Layout of K and V in the file; pdconvert reads them all.",
)
@package_options
@json_option
def command(
    build: Path,
    prompt: str,
    out: Path,
    prefix_cache: Path | None,
    prefix_cache_mb: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Prefill a prompt with the package in BUILD and write K and V into a file for `pdconvert decode`."""
    text = read_prompt(prompt)

    from pdconvert.runtime.split_run import prefill_build

    result = prefill_build(build, text, out, **options, **cache_arguments(prefix_cache, prefix_cache_mb))
    if as_json:
        echo_json(result.to_json())
    else:
        header = result.header
        click.echo(
            f"{result.path}: K and V of {header.tokens} of {header.prompt_tokens} prompt tokens, "
            f"{size_text(result.size_bytes)}"
        )
