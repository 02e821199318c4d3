"""`pdconvert plan`: what a build would take and give, without its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pdconvert import api
from pdconvert.cli.params import echo_json, examples, json_option, table
from pdconvert.sizes import size_text

if TYPE_CHECKING:
    from pdconvert.forecast.plan import Forecast
    from pdconvert.forecast.roofline import Prediction


@click.command(
    "plan",
    short_help="Sizes, memory and predicted times of a build.",
    epilog=examples("pdconvert plan smollm2-135m --chip m4"),
)
@click.argument("recipe")
@click.option("--source", metavar="SRC", help="A folder, a .gguf file, a hub id, or package:NAME.")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change one scalar of the recipe, e.g. prefill.kv.rope=raw. Repeatable.",
)
@click.option(
    "--chip", "chips", multiple=True, metavar="NAME", help="Only this chip, e.g. m4-max. Repeatable."
)
@json_option
def command(
    recipe: str, source: str | None, overrides: tuple[str, ...], chips: tuple[str, ...], as_json: bool
) -> None:
    """Say what a build of RECIPE would take and give, from its config alone; no weight is read.

    Times are predictions from published figures of each chip (docs/plan.md), not measurements.
    """
    found = api.plan(recipe, source=source, overrides=overrides, chips=chips)
    if as_json:
        echo_json(found.to_json())
    else:
        click.echo(_text(found))


def _text(found: Forecast) -> str:
    spec, sizes = found.plan.spec, found.sizes
    halves = [
        (
            "prefill package",
            size_text(sizes.package),
            f"{len(found.parts)} part(s)" if len(found.parts) > 1 else "",
        ),
        (
            "decode folder",
            size_text(sizes.decode),
            f"{size_text(found.decode.weight_bytes)} read for each token",
        ),
        (
            "K and V",
            size_text(found.decode.kv_bytes),
            f"a token; {size_text(found.decode.cache_bytes(found.context))} for all {found.context:,} positions",
        ),
        ("build, peak memory", size_text(found.memory.peak), f"in {found.memory.peak_in}"),
    ]
    works = [
        (work.name, f"{work.flops / 1e9:.3g}", size_text(work.weight_bytes), size_text(work.io_bytes))
        for work in found.functions
    ]
    lengths = list(found.chips[0].prompts) if found.chips else []
    header = (
        "chip",
        *(f"prefill {length}" for length in lengths),
        "by MLX",
        "decode",
        "at full",
        "pays from",
    )
    return "\n".join(
        [
            f"{found.plan.recipe.name}: {spec.model_type}, {len(spec.layers)} layers, "
            f"{found.parameters / 1e6:,.1f} M weights, {sizes.bits_per_weight:.2f} bits in the layers",
            *(f"note: {note}" for note in found.notes),
            "",
            table(halves, ("what", "size", "")),
            "",
            table(works, ("function", "GFLOP", "weights", "other data")),
            "",
            "predictions from published figures, the best case; nothing was measured:",
            table([_chip_row(chip) for chip in found.chips], header),
            "prefill: so many tokens by the package on the Neural Engine, hand-off included;",
            "by MLX: the longest of them on the GPU instead; decode: tokens per second, with",
            "an empty and with a full cache; pays from: the shortest prompt for which the",
            "package is no slower. docs/plan.md has the figures and their sources.",
        ]
    )


def _chip_row(chip: Prediction) -> tuple[str, ...]:
    last = list(chip.prompts.values())[-1]
    return (
        chip.chip.name,
        *(_milliseconds(times["ane_s"] + times["handoff_s"]) for times in chip.prompts.values()),
        _milliseconds(last["gpu_s"]),
        *(f"{speed:,.0f}" for speed in chip.decode_tokens_per_s),
        "never" if chip.pays_from is None else str(chip.pays_from),
    )


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
