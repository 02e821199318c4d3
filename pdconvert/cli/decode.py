"""`pdconvert decode`: go on with the prompt of a hand-off file."""

from pathlib import Path
from typing import Any

import click

from pdconvert.cli.generation import print_piece, print_result, sampling_options
from pdconvert.cli.params import UserPath, examples, json_option


@click.command(
    "decode",
    short_help="Go on with the prompt of a hand-off file.",
    epilog=examples(
        "pdconvert decode build/smollm2-135m --kv kv.pdkv --max-tokens 32",
    ),
)
@click.argument("build", type=UserPath())
@click.option(
    "--kv",
    type=UserPath(),
    required=True,
    metavar="FILE",
    help="The hand-off file, from `pdconvert prefill` with the same build.",
)
@sampling_options
@json_option
def command(build: Path, kv: Path, as_json: bool, **options: Any) -> None:
    """Decode with the MLX weights in BUILD, from the K and V that `pdconvert prefill` wrote."""
    from pdconvert.runtime.split_run import decode_build

    print_result(decode_build(build, kv, **options, on_text=None if as_json else print_piece), as_json)
