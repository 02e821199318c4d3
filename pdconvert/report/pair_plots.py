"""Plots of the pair on held-out text, each an SVG element, or "" without data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pdconvert.report.load import BuildReport, reals
from pdconvert.report.svg import COLOURS, drawing, new_plot


def positions(build: BuildReport) -> str:
    """KLD and top-1 of the pair and of MLX alone against the position of the token."""
    data = build.section("positions")
    if not data:
        return ""
    gates = build.manifest["recipe"]["gates"]
    first = data["first"]
    with drawing("positions"):
        plot, (top, bottom) = new_plot(390, "KL divergence and top-1 by position", rows=2, sharex=True)
        for name, label, colour, style in (
            ("pair", "pair (package, then MLX)", "a", "-"),
            ("mlx_alone", "MLX alone", "b", "--"),
        ):
            kld = finite(data[name]["kld"])
            places = [first + index for index in range(len(kld))]
            if name == "pair":
                kld_dots(plot, top, places, kld, colour, "")
            top.plot(places, smooth(kld), color=COLOURS[colour], ls=style, label=f"{label}, mean of 16")
            shares = [100 * equal / data["windows"] for equal in data[name]["equal"]]
            bottom.plot(places, smooth(shares), color=COLOURS[colour], ls=style)
        _gate(top, gates["kld"], "gate (mean)")
        _gate(bottom, 100 * gates["top1"], "gate (mean)")
        top.set_ylabel("KLD, nats")
        top.set_ylim(bottom=0)
        bottom.set_ylabel("same best token, %")
        bottom.set_ylim(top=102)
        bottom.set_xlabel("position of the token")
        handles, labels = top.get_legend_handles_labels()
        plot.figure.legend(handles, labels, loc="outside upper left")
        return plot.svg()


def finite(values: Sequence[float | str]) -> list[float]:
    """Numbers, NaN for what is not finite."""
    return [value if math.isfinite(value) else math.nan for value in reals(values)]


def kld_dots(
    plot: Any, axis: Any, places: Sequence[int], kld: Sequence[float], colour: str, side: str
) -> None:
    """A dot with a tooltip for the KLD at each position, as far as it is finite."""
    held = [(place, value) for place, value in zip(places, kld, strict=True) if not math.isnan(value)]
    if held:
        look = {"s": 6, "color": COLOURS[colour], "alpha": 0.45, "linewidths": 0}
        dots = axis.scatter([place for place, _ in held], [value for _, value in held], **look)
        plot.tip(dots, *(f"{side}position {place}: KLD {value:.5f} nats" for place, value in held))


def _gate(axis: Any, value: float, text: str) -> None:
    axis.axhline(value, color=COLOURS["bad"], lw=1, ls="--")
    axis.annotate(
        text,
        (0.01, value),
        (0, 2),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="left",
        fontsize=8.5,
        color=COLOURS["bad"],
    )


def smooth(values: Sequence[float], width: int = 16) -> list[float]:
    """Means over the neighbourhood of each value."""
    half = width // 2
    return [
        math.fsum(values[max(0, i - half) : i + half]) / len(values[max(0, i - half) : i + half])
        for i in range(len(values))
    ]
