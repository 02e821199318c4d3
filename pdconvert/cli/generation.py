"""Options that the commands share which prefill a prompt, go on with one, or both."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pdconvert.cli.params import UserPath, echo_json
from pdconvert.errors import InputError

if TYPE_CHECKING:
    from pdconvert.runtime.run import RunResult

Command = TypeVar("Command", bound=Callable[..., Any])
DEFAULT_CACHE_MB = 4000
BYTES_PER_MB = 10**6


def prompt_options(command: Command) -> Command:
    """`--prompt` and `--chat`."""
    return _with(
        command,
        click.option("--prompt", required=True, metavar="TEXT", help="The prompt; `-` reads it from stdin."),
        click.option("--chat", is_flag=True, help="Apply the model's chat template to the prompt."),
    )


def sampling_options(command: Command) -> Command:
    """How many tokens, and how each is chosen."""
    return _with(
        command,
        click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True),
        click.option(
            "--temperature",
            type=click.FloatRange(min=0),
            default=0.0,
            show_default=True,
            help="0 is greedy.",
        ),
        click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True),
        click.option(
            "--top-k",
            type=click.IntRange(min=0),
            default=0,
            show_default=True,
            help="0 keeps all tokens.",
        ),
        click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True),
    )


def package_options(command: Command) -> Command:
    """What runs the package, and where it keeps prefilled blocks."""
    return _with(
        command,
        click.option(
            "--executor",
            type=click.Choice(["auto", "mil", "coreml"]),
            default="auto",
            show_default=True,
            help="What runs the package: Core ML (macOS only), or the MIL executor.",
        ),
        click.option(
            "--mode",
            type=click.Choice(["fp32", "fp16"]),
            default="fp32",
            show_default=True,
            help="Arithmetic of the MIL executor.",
        ),
        click.option(
            "--compute-units",
            type=click.Choice(["all", "cpu_and_ne", "cpu_and_gpu", "cpu_only"]),
            default="cpu_and_ne",
            show_default=True,
            help="Where Core ML may run the package.",
        ),
        click.option(
            "--prefix-cache",
            type=UserPath(),
            metavar="DIR",
            help="Keep prefilled blocks in this folder, and use those that it has.",
        ),
        click.option(
            "--prefix-cache-mb",
            type=click.IntRange(min=1),
            default=DEFAULT_CACHE_MB,
            show_default=True,
            help="What the folder may take; the least recently used blocks go first.",
        ),
    )


def read_prompt(prompt: str) -> str:
    """The prompt itself, or standard input for `-`.

    Raises:
        InputError: standard input is closed, or not UTF-8.
    """
    if prompt != "-":
        return prompt
    if sys.stdin is None:
        raise InputError("--prompt -: stdin is closed; give the prompt itself")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"--prompt -: stdin is not UTF-8 text (byte {error.start}); give it as UTF-8"
        ) from error


def cache_arguments(prefix_cache: Path | None, prefix_cache_mb: int) -> dict[str, Any]:
    """The prefix cache's options as the runtime takes them."""
    return {"prefix_cache": prefix_cache, "prefix_cache_bytes": prefix_cache_mb * BYTES_PER_MB}


def print_piece(piece: str) -> None:
    """Show a piece of the text as it comes."""
    click.echo(piece, nl=False)


def print_result(result: RunResult, as_json: bool) -> None:
    """End the text, or print the result as JSON; say so where a text ends because its context is full."""
    if as_json:
        echo_json(result.to_json())
        return
    click.echo()
    if result.stop_reason == "context":
        click.echo("stopped: the decoding functions of this build hold no more tokens", err=True)


def _with(command: Command, *options: Callable[[Command], Command]) -> Command:
    for option in reversed(options):
        command = option(command)
    return command
