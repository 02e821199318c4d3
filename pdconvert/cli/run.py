"""`pdconvert run`: prompt in, text out, through a build's package and decode weights."""

import sys
from pathlib import Path

import click

from pdconvert.cli.params import UserPath, echo_json, json_option


@click.command("run", short_help="Continue a prompt with the pair of a build.")
@click.argument("build", type=UserPath())
@click.option("--prompt", required=True, metavar="TEXT", help="The prompt; `-` reads it from stdin.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option(
    "--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy."
)
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True)
@click.option("--top-k", type=click.IntRange(min=0), default=0, show_default=True, help="0 keeps all tokens.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--chat", is_flag=True, help="Apply the model's chat template to the prompt.")
@click.option(
    "--executor",
    type=click.Choice(["auto", "mil", "coreml"]),
    default="auto",
    show_default=True,
    help="What runs the package: Core ML (macOS only), or the MIL executor.",
)
@click.option(
    "--mode",
    type=click.Choice(["fp32", "fp16"]),
    default="fp32",
    show_default=True,
    help="Arithmetic of the MIL executor.",
)
@click.option(
    "--compute-units",
    type=click.Choice(["all", "cpu_and_ne", "cpu_and_gpu", "cpu_only"]),
    default="cpu_and_ne",
    show_default=True,
    help="Where Core ML may run the package.",
)
@json_option
def command(
    build: Path,
    prompt: str,
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int,
    chat: bool,
    executor: str,
    mode: str,
    compute_units: str,
    as_json: bool,
) -> None:
    """Continue a prompt with the pair in BUILD: prefill with the package, decode with MLX."""
    if prompt == "-":
        prompt = sys.stdin.read()

    from pdconvert.runtime.run import run_build

    result = run_build(
        build,
        prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        chat=chat,
        executor=executor,
        mode=mode,
        compute_units=compute_units,
        on_text=None if as_json else _print_piece,
    )
    if as_json:
        echo_json(result.to_json())
    else:
        click.echo()


def _print_piece(piece: str) -> None:
    click.echo(piece, nl=False)
