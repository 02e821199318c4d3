"""Plots of where quality goes: by stage, projection and layer. Each gives an SVG element, or "" without data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pdconvert.ledger import CHECKPOINT, STORED
from pdconvert.report.load import BuildReport, decibel, real, reals, worst
from pdconvert.report.svg import COLOURS, HEAT, HEAT_CLASSES, MARGIN, ROW, drawing, new_plot

FP16_MAX = 65504.0
EQUAL_DB = 150.0
"""Where bit-equal, whose SQNR is infinite, stands on an axis."""

EXACT_DB = 60.0
"""What loses less is rounding of an exact rewrite."""


def waterfall(build: BuildReport) -> str:
    """SQNR against the checkpoint, stage after stage: each bar reaches from the level before to its own."""
    stages = quality_stages(build)
    with drawing("waterfall"):
        plot, (axis,) = new_plot(ROW * len(stages) + MARGIN, "SQNR against the checkpoint, stage by stage")
        level = EQUAL_DB
        for row, (name, value, detail) in enumerate(stages):
            shown = 0.0 if math.isnan(value) else on_axis(value)
            lossy = shown < min(level, EXACT_DB)
            colour = "bad" if math.isnan(value) else "a" if lossy else "muted"
            bar = axis.barh(row, level - shown, left=shown, height=0.62, color=COLOURS[colour])[0]
            plot.tip(bar, f"{name}: {decibel(value)} against the checkpoint\n{detail}")
            axis.plot([shown, shown], [row - 0.38, row + 0.38], color=COLOURS["ink"], lw=1.2)
            left = shown > 28
            place = {"ha": "right" if left else "left", "va": "center", "fontsize": 9}
            edge = min(shown, level) - 3 if left else max(shown, level) + 3
            axis.text(edge, row, decibel(value), **place)
            level = shown
        axis.set_yticks(range(len(stages)), [name for name, _, _ in stages])
        axis.set_ylim(len(stages) - 0.4, -0.6)
        axis.set_xlim(0, EQUAL_DB + 4)
        axis.set_xlabel("SQNR against the checkpoint, dB")
        axis.grid(axis="y", visible=False)
        axis.tick_params(axis="y", length=0)
        return plot.svg()


def on_axis(value: float) -> float:
    """An SQNR as far as the axes reach; NaN stays."""
    return value if math.isnan(value) else min(max(value, 0.0), EQUAL_DB)


def quality_stages(build: BuildReport) -> list[tuple[str, float, str]]:
    """Name, SQNR in dB against the checkpoint and its explanation: the passes, then the whole model."""
    stages = [
        (
            row["step"],
            row["original_db"],
            f"worst block; against the step before {decibel(row['previous_db'])} ({row['block']})",
        )
        for row in build.ledger.table()
    ]
    for what in ("stored weights", "package in fp32", "package in fp16"):
        found = build.caches(what, CHECKPOINT)
        if found:
            tensors = ", ".join(f"{row['tensor'].upper()} {decibel(real(row['pooled_db']))}" for row in found)
            stages.append((what, worst([real(row["pooled_db"]) for row in found]), f"whole model: {tensors}"))
    return stages


def heat_map(build: BuildReport, key: str, title: str) -> str:
    """Blocks × projections, SQNR in dB: the lower, the stronger the colour."""
    rows = build.rows("projections")
    blocks = list(dict.fromkeys(row["block"] for row in rows))
    names = list(dict.fromkeys(row["name"] for row in rows))
    values = {(row["block"], row["name"]): real(row[key]) for row in rows}
    table = [[values.get((block, name), math.nan) for name in names] for block in blocks]
    lowest, highest = heat_span(build)
    return heat(table, blocks, names, title, lambda value: (value - lowest) / (highest - lowest), decibel)


def heat_span(build: BuildReport) -> tuple[float, float]:
    """The lowest and highest SQNR of both heat maps, which share their colours."""
    values = [real(row[key]) for row in build.rows("projections") for key in ("isolated_db", "cumulative_db")]
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    return min(finite), max(max(finite), min(finite) + 1.0)


def heat(
    table: Sequence[Sequence[float]],
    blocks: Sequence[str],
    names: Sequence[str],
    title: str,
    share: Any,
    text: Any,
) -> str:
    """Cells with their numbers; `share` gives 0 for the worst and 1 for the best, `text` the tooltip's value."""
    from matplotlib.colors import ListedColormap

    with drawing(title):
        plot, (axis,) = new_plot(ROW * len(blocks) + MARGIN, title)
        classes = [[_heat_class(share(value)) for value in row] for row in table]
        colours = ListedColormap([COLOURS[name] for name in HEAT])
        edges = {"edgecolors": COLOURS["panel"], "linewidth": 1.0}
        mesh = axis.pcolormesh(classes, cmap=colours, vmin=-0.5, vmax=HEAT_CLASSES - 0.5, **edges)
        tips = [
            f"{block}, {name}: {text(value)}"
            for block, row in zip(blocks, table, strict=True)
            for name, value in zip(names, row, strict=True)
        ]
        plot.tip(mesh, *tips)
        for y, row in enumerate(table):
            for x, value in enumerate(row):
                strong = classes[y][x] < 2
                axis.text(
                    x + 0.5,
                    y + 0.5,
                    "–" if math.isnan(value) else "=" if math.isinf(value) else f"{value:.0f}",
                    ha="center",
                    va="center",
                    fontsize=8.5,
                    color=COLOURS["heat-ink" if strong else "ink"],
                )
        axis.set_yticks(
            [y + 0.5 for y in range(len(blocks))], [name.removeprefix("layers.") for name in blocks]
        )
        short = [name.removesuffix("_proj") for name in names]
        axis.set_xticks([x + 0.5 for x in range(len(names))], short)
        axis.tick_params(length=0, labeltop=True, labelbottom=False)
        axis.xaxis.set_label_position("top")
        axis.set_xlabel(title)
        axis.set_ylabel("layer")
        axis.invert_yaxis()
        axis.grid(visible=False)
        axis.spines[:].set_visible(False)
        return plot.svg()


def _heat_class(share: float) -> int:
    if math.isnan(share):
        return 0
    return int(min(max(share, 0.0), 1.0) * (HEAT_CLASSES - 1) + 0.5)


def caches(build: BuildReport) -> str:
    """SQNR of K and of V over the layers: what quantization cost, and what fp16."""
    kinds = (
        ("package in fp16", CHECKPOINT, "c", "both: package in fp16 against the checkpoint"),
        ("stored weights", CHECKPOINT, "a", "quantization: stored weights against the checkpoint"),
        ("package in fp16", STORED, "b", "fp16: package against its own weights"),
    )
    found = [(build.caches(what, against), colour, label) for what, against, colour, label in kinds]
    if not any(rows for rows, _, _ in found):
        return ""
    with drawing("caches"):
        plot, axes = new_plot(390, "SQNR of K and V by layer", rows=2, sharex=True)
        for axis, tensor in zip(axes, ("k", "v"), strict=True):
            for rows, colour, label in found:
                for row in rows:
                    if row["tensor"] == tensor:
                        layer_line(
                            plot, axis, reals(row["layers_db"]), colour, label, f"{tensor.upper()}, layer"
                        )
            axis.set_ylabel(f"{tensor.upper()}: SQNR, dB")
            axis.set_ylim(bottom=0)
        axes[1].set_xlabel("layer")
        whole_numbers(axes[1])
        handles, labels = axes[0].get_legend_handles_labels()
        plot.figure.legend(handles, labels, loc="outside upper left")
        return plot.svg()


def layer_line(plot: Any, axis: Any, values: Sequence[float], colour: str, label: str, what: str) -> None:
    """A line over the layers with a tooltip at each; what is not finite is marked at the bottom in red."""
    shown = [on_axis(value) for value in values]
    broad = {"lw": 5, "alpha": 0.35} if label.startswith("both") else {}
    axis.plot(range(len(values)), shown, color=COLOURS[colour], label=label, **broad)
    finite = [index for index, value in enumerate(values) if not math.isnan(value)]
    broken = [index for index, value in enumerate(values) if math.isnan(value)]
    if finite:
        dots = axis.scatter(finite, [shown[i] for i in finite], s=11, color=COLOURS[colour])
        plot.tip(dots, *(f"{what} {i}: {decibel(values[i])}\n{label}" for i in finite))
    if broken:
        marks = axis.scatter(broken, [2] * len(broken), s=22, marker="s", color=COLOURS["bad"], clip_on=False)
        plot.tip(marks, *(f"{what} {i}: not finite\n{label}" for i in broken))


def whole_numbers(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def headroom(build: BuildReport) -> str:
    """The largest magnitude of every part of every block in fp32, with the end of fp16 drawn in."""
    rows = build.rows("headroom")
    if not rows:
        return ""
    blocks = list(dict.fromkeys(row["block"] for row in rows))
    colours = {"residual stream": "a", "norm": "b", "attention": "c", "mlp": "d"}
    with drawing("headroom"):
        plot, (axis,) = new_plot(300, "Largest magnitudes by layer, and the end of fp16")
        for part, colour in colours.items():
            mine = [row for row in rows if row["part"] == part]
            places = [blocks.index(row["block"]) for row in mine]
            values = [real(row["peak"]) for row in mine]
            peaks = [max(value, 1e-3) if math.isfinite(value) else 10 * FP16_MAX for value in values]
            axis.plot(places, peaks, color=COLOURS[colour], label=part)
            for beyond in (False, True):
                chosen = [i for i, peak in enumerate(peaks) if (not peak <= FP16_MAX) == beyond]
                if chosen:
                    dots = axis.scatter(
                        [places[i] for i in chosen],
                        [peaks[i] for i in chosen],
                        s=26 if beyond else 11,
                        color=COLOURS["bad" if beyond else colour],
                        zorder=3,
                    )
                    plot.tip(dots, *(_peak_text(mine[i]) for i in chosen))
        axis.axhline(FP16_MAX, color=COLOURS["bad"], lw=1.2, ls="--")
        axis.text(
            0.99,
            FP16_MAX * 1.25,
            "fp16 ends at 65,504",
            transform=axis.get_yaxis_transform(),
            color=COLOURS["bad"],
            ha="right",
            va="bottom",
            fontsize=9,
        )
        axis.set_yscale("log")
        axis.minorticks_off()
        axis.set_ylim(top=max(axis.get_ylim()[1], FP16_MAX * 12))
        axis.set_ylabel("largest magnitude")
        axis.set_xticks(*_layer_ticks(blocks))
        axis.set_xlabel("layer")
        plot.figure.legend(loc="outside upper left", ncols=4, columnspacing=1.2, handlelength=1.4)
        return plot.svg()


def _layer_ticks(blocks: Sequence[str]) -> tuple[list[int], list[str]]:
    """About eight ticks with the names of blocks, a layer by its number alone."""
    stride = max(1, -(-len(blocks) // 8))
    places = list(range(0, len(blocks), stride))
    return places, [blocks[place].removeprefix("layers.") for place in places]


def _peak_text(row: dict[str, Any]) -> str:
    peak = real(row["peak"])
    share = f"{peak / FP16_MAX:.2%} of fp16" if peak <= FP16_MAX else "beyond fp16"
    return f"{row['block']}, {row['part']}: {peak:,.5g} ({share})\n{row['op_type']} {row['op']}"
