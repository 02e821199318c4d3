"""Plots of bytes, seconds and weights, each an SVG element, or "" without data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdconvert.report.load import BuildReport
from pdconvert.report.svg import COLOURS, MARGIN, ROW, drawing, new_plot


def sizes(build: BuildReport) -> str:
    """Bytes of both halves by part of the model."""
    rows = build.section("sizes").get("parts", [])
    if not rows:
        return ""
    colours = dict(
        zip(("embedding", "attention", "mlp", "norms", "head"), ("b", "a", "c", "d", "muted"), strict=True)
    )
    with drawing("sizes"):
        plot, (axis,) = new_plot(150, "Bytes of both halves by part")
        for place, key in enumerate(("package_bytes", "decode_bytes")):
            left = 0.0
            for row in rows:
                size = row[key] / 1e6
                bar = axis.barh(place, size, left=left, height=0.6, color=COLOURS[colours[row["part"]]])[0]
                plot.tip(bar, f"{row['part']}: {size:.1f} MB")
                left += size
        handles = [_swatch(colours[row["part"]]) for row in rows]
        axis.set_yticks([0, 1], ["package", "decode"])
        axis.invert_yaxis()
        axis.set_xlabel("MB of weights, scales included")
        axis.grid(axis="y", visible=False)
        axis.tick_params(axis="y", length=0)
        plot.figure.legend(
            handles,
            [row["part"] for row in rows],
            loc="outside upper left",
            ncols=5,
            columnspacing=1,
            handlelength=0.9,
        )
        return plot.svg()


def _swatch(colour: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=COLOURS[colour])


def stages(build: BuildReport) -> str:
    """Seconds of the build's stages."""
    rows = build.section("cost").get("stages", [])
    if not rows:
        return ""
    with drawing("stages"):
        plot, (axis,) = new_plot(ROW * len(rows) + MARGIN, "Seconds by stage")
        bars = axis.barh([row["name"] for row in rows], [row["seconds"] for row in rows], color=COLOURS["a"])
        for bar, row in zip(bars, rows, strict=True):
            plot.tip(
                bar,
                f"{row['name']}: {row['seconds']:.1f} s, peak memory so far {row['peak_bytes'] / 1e9:.2f} GB",
            )
        axis.bar_label(bars, [f"{row['seconds']:.1f}" for row in rows], padding=3, fontsize=9)
        axis.margins(x=0.12)
        axis.invert_yaxis()
        axis.set_xlabel("seconds")
        axis.grid(axis="y", visible=False)
        axis.tick_params(axis="y", length=0)
        return plot.svg()


def grid_of(row: dict[str, Any]) -> str:
    """Which plot a matrix takes: by the bins of its codes; "fp16" without any."""
    if "codes" not in row:
        return "fp16"
    return f"{row['codes_first']}, {row['codes_per_bin']}, {len(row['codes'])}"


def distributions(build: BuildReport) -> dict[str, str]:
    """Weights and codes of a matrix, one plot for each grid of codes, at full height: each bar is set to its share."""
    firsts: dict[str, dict[str, Any]] = {}
    for row in build.rows("weights"):
        firsts.setdefault(grid_of(row), row)
    return {grid: _distribution(grid, row) for grid, row in firsts.items()}


def _distribution(grid: str, row: dict[str, Any]) -> str:
    count = 2 if "codes" in row else 1
    with drawing(f"distributions {grid}"):
        plot, axes = new_plot(40 + 130 * count, "Weights and codes of one matrix", rows=count)
        span, bins = row["weights_span"], len(row["weights"])
        step = 2 * span / bins
        _bars(plot, axes[0], [-span + step * index for index in range(bins)], step, "weights", "a")
        axes[0].set_xlabel("weight, in standard deviations")
        if "codes" in row:
            first, width = row["codes_first"] - 0.5, row["codes_per_bin"]
            _bars(plot, axes[1], [first + width * i for i in range(len(row["codes"]))], width, "codes", "c")
            axes[1].set_xlabel("code")
        return plot.svg()


def _bars(plot: Any, axis: Any, lefts: Sequence[float], width: float, name: str, colour: str) -> None:
    for index, left in enumerate(lefts):
        bar = axis.bar(left, 100, width=width * 0.9, align="edge", color=COLOURS[colour])[0]
        plot.tip(bar, f"{left:.3g} … {left + width:.3g}", name=f"{name}-{index}")
    axis.set_ylabel("% of the fullest bin")
    axis.set_ylim(0, 104)
