"""`pdconvert bench`: how long a build takes on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pdconvert.cli.params import UserPath, echo_json, examples, json_option, table

if TYPE_CHECKING:
    from pdconvert.bench.run import Bench
    from pdconvert.bench.timing import Sample


@click.command(
    "bench",
    short_help="Time prefill, first token and decoding.",
    epilog=examples("pdconvert bench build/smollm2-135m --json"),
)
@click.argument("build", type=UserPath())
@click.option(
    "--length",
    "lengths",
    type=click.IntRange(min=1),
    multiple=True,
    help="Prefill that many tokens. Repeatable. [default: what the functions take]",
)
@click.option("--runs", type=click.IntRange(min=1), default=5, show_default=True)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Decoded tokens that are timed.",
)
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
    lengths: tuple[int, ...],
    runs: int,
    steps: int,
    executor: str,
    mode: str,
    compute_units: str,
    as_json: bool,
) -> None:
    """Time BUILD on this machine: prefill by length, the first token in its parts, decoding.

    Every time is compared with what this machine can do at best. The exit code is 1 where one is above it: the
    measurement is wrong then, and nothing is shown.
    """
    from pdconvert.bench.run import bench

    found = bench(
        build,
        lengths=lengths,
        runs=runs,
        steps=steps,
        executor=executor,
        mode=mode,
        compute_units=compute_units,
    )
    if as_json:
        echo_json(found.to_json())
    else:
        click.echo(_text(found))


def _text(found: Bench) -> str:
    package, decode = found.executors["prefill"], found.executors["decode"]
    products = ", ".join(
        f"{rate / 1e9:,.0f} GFLOP/s by {name}" for name, rate in found.machine.products.items()
    )
    reads = max(found.machine.reads.items())[1]
    prefill = [
        (f"{line.tokens} tokens", *_times(line.time), f"{line.tokens / line.time.median:,.0f} tokens/s")
        for line in found.prefill
    ]
    first = [
        (name.removesuffix("_s").replace("_", " "), *_times(sample), "")
        for name, sample in found.first_token.items()
    ]
    steps = [("one token", *_times(found.decode), f"{1 / found.decode.median:,.1f} tokens/s")]
    header = ("median", "min", "max", "")
    return "\n".join(
        [
            f"{found.build}: prefill by {package['executor']}, decode by mlx on the {decode['device']}",
            found.where,
            f"this machine: {products}; reads {reads / 1e9:,.1f} GB/s",
            "",
            table(prefill, ("prefill", *header)),
            "",
            table(first, (f"first token after {found.prompt_tokens}", *header)),
            "",
            table(steps, ("decode", *header)),
        ]
    )


def _times(sample: Sample) -> tuple[str, str, str]:
    return _milliseconds(sample.median), _milliseconds(sample.least), _milliseconds(sample.most)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
