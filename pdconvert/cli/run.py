"""`pdconvert run`: prompt in, text out, through a build's package and decode weights."""

from pathlib import Path
from typing import Any

import click

from pdconvert.cli.generation import (
    cache_arguments,
    package_options,
    print_piece,
    print_result,
    prompt_options,
    read_prompt,
    sampling_options,
)
from pdconvert.cli.params import UserPath, examples, json_option


@click.command(
    "run",
    short_help="Continue a prompt with the pair of a build.",
    epilog=examples(
        'pdconvert run build/smollm2-135m --prompt "The capital of France is"',
        "pdconvert run build/smollm2-135m --chat --prompt - < question.txt",
    ),
)
@click.argument("build", type=UserPath())
@prompt_options
@sampling_options
@click.option(
    "--decode",
    type=click.Choice(["mlx", "package"]),
    default="mlx",
    show_default=True,
    help="What decodes: the MLX weights, or one-token functions of the package.",
)
@package_options
@json_option
def command(
    build: Path,
    prompt: str,
    prefix_cache: Path | None,
    prefix_cache_mb: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Continue a prompt with the pair in BUILD: prefill with the package, decode with MLX."""
    text = read_prompt(prompt)

    from pdconvert.runtime.run import run_build

    result = run_build(
        build,
        text,
        **options,
        **cache_arguments(prefix_cache, prefix_cache_mb),
        on_text=None if as_json else print_piece,
    )
    print_result(result, as_json)
