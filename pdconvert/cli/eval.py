"""`pdconvert eval`: how close a build's text comes to its source's."""

from pathlib import Path
from typing import Any

import click

from pdconvert.cli.params import UserPath, echo_json, examples, json_option, table
from pdconvert.progress import Progress

ROWS = {"pair": "package, then MLX", "mlx": "MLX alone"}


@click.command(
    "eval",
    short_help="Perplexity and KL divergence of a build against its source.",
    epilog=examples("pdconvert eval build/smollm2-135m --text held-out.txt"),
)
@click.argument("build", type=UserPath())
@click.option("--text", "text_file", type=UserPath(), metavar="FILE", help="Text to score on, in UTF-8.")
@click.option("--windows", type=click.IntRange(min=1), default=24, show_default=True, help="Windows of text.")
@click.option("--source", metavar="SRC", help="Where the checkpoint is, if not where the recipe says.")
@click.option(
    "--executor",
    type=click.Choice(["auto", "mil", "coreml"]),
    default="auto",
    show_default=True,
    help="What runs the package: Core ML (macOS only), or the MIL executor.",
)
@json_option
def command(
    build: Path, text_file: Path | None, windows: int, source: str | None, executor: str, as_json: bool
) -> None:
    """Score BUILD against the checkpoint that it was made from, on text, through the files that it ships.

    Each window is 512 tokens, or as many as the package's functions reach: the first half goes through the package,
    MLX scores the second half. Example: pdconvert eval build/smollm2-135m --windows 8
    """
    from pdconvert.evaluate import evaluate

    progress = Progress()
    result = evaluate(
        build,
        source=source,
        text_file=text_file,
        windows=windows,
        executor=executor,
        track=lambda items: progress.bar(items, "eval", total=windows, unit="window"),
    )
    if as_json:
        echo_json(result)
    else:
        click.echo(_table(result))


def _table(result: dict[str, Any]) -> str:
    lines = [
        (
            label,
            f"{(row := result[name])['kld_mean']:.4f} ± {row['kld_error']:.4f}",
            f"{row['kld_p99']:.3f}",
            f"{row['kld_max']:.2f}",
            f"{100 * row['top1']:.1f} %",
            f"{100 * row['top5']:.1f} %",
            f"{row['perplexity_ratio']:.3f} ± {row['perplexity_error']:.3f}",
        )
        for name, label in ROWS.items()
    ]
    head = ("", "KLD", "p99", "max", "top-1", "top-5", "perplexity ×")
    return "\n".join(
        [
            table(lines, head),
            f"{result['pair']['tokens']} positions in {result['windows']} windows of {result['width']}; source: "
            f"perplexity {result['source']['perplexity']:.2f}; {result['bits_per_weight']:.2f} bits per weight",
        ]
    )
