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
@click.option(
    "--width",
    type=click.IntRange(min=4),
    help="Tokens of a window, half of it prefilled in chunks; 512 where the package reaches that far.",
)
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
    build: Path,
    text_file: Path | None,
    windows: int,
    width: int | None,
    source: str | None,
    executor: str,
    as_json: bool,
) -> None:
    """Score BUILD against the checkpoint that it was made from, on text, through the files that it ships.

    Of each window the first half goes through the package, and MLX scores the second half; errors are standard errors
    over windows. The hand-off is what the pair loses against MLX alone.
    Example: pdconvert eval build/smollm2-135m --windows 8
    """
    from pdconvert.evaluate import evaluate

    progress = Progress()
    result = evaluate(
        build,
        source=source,
        text_file=text_file,
        windows=windows,
        width=width,
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
            _with_error(row := result[name], "kld_mean", "kld_error", 1, 4),
            f"{row['kld_p99']:.3f}",
            f"{row['kld_max']:.2f}",
            _with_error(row, "top1", "top1_error", 100, 1),
            _with_error(row, "top5", "top5_error", 100, 1),
            _with_error(row, "perplexity", "perplexity_error", 1, 2),
            _with_error(row, "perplexity_ratio", "perplexity_ratio_error", 1, 3),
        )
        for name, label in ROWS.items()
    ]
    head = ("", "KLD, nats", "p99", "max", "top-1, %", "top-5, %", "perplexity", "× source")
    source, hand_off = result["source"], result["hand_off"]
    caches = ", ".join(
        f"{side.upper()} {hand_off[f'{side}_db']:.1f} dB (layer {hand_off[f'{side}_worst_layer']}: "
        f"{hand_off[f'{side}_worst_db']:.1f})"
        for side in ("k", "v")
    )
    return "\n".join(
        [
            table(lines, head),
            f"source: perplexity {_with_error(source, 'perplexity', 'perplexity_error', 1, 2)}",
            f"hand-off: KLD {hand_off['kld']:+.5f} ± {hand_off['kld_error']:.5f}; package against MLX: {caches}",
            *_fit_lines(result["fit"]),
            f"{result['pair']['tokens']} positions in {result['windows']} windows of {result['width']}; "
            f"{result['bits_per_weight']:.2f} bits per weight",
        ]
    )


def _with_error(row: dict[str, Any], value: str, error: str, scale: float, digits: int) -> str:
    return f"{scale * row[value]:.{digits}f} ± {scale * row[error]:.{digits}f}"


def _fit_lines(fit: dict[str, Any] | None) -> list[str]:
    """The loss on calibration text, where the build has some."""
    if fit is None:
        return []
    said = f"calibration text: KLD {fit['calibration_kld']:.4f} ± {fit['calibration_error']:.4f}, MLX alone"
    return [said, *([f"note: {fit['alarm']}"] if fit["alarm"] else [])]
