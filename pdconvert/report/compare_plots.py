"""Plots of two builds: A and B in one picture, each an SVG element, or "" where one of them has no data."""

from __future__ import annotations

import math

from pdconvert.ledger import CHECKPOINT
from pdconvert.report import pair_plots, quality_plots
from pdconvert.report.load import BuildReport, decibel, real, reals
from pdconvert.report.svg import COLOURS, MARGIN, ROW, drawing, new_plot

SIDES = (("A", "a"), ("B", "b"))


def draw(a: BuildReport, b: BuildReport) -> dict[str, str]:
    """All plots by name."""
    return {
        "stages": stages(a, b),
        "caches": caches(a, b),
        "projections": projections(a, b),
        "positions": positions(a, b),
    }


def stages(a: BuildReport, b: BuildReport) -> str:
    """SQNR against the checkpoint at each stage of either build, one dot for each."""
    found = [
        {name: (value, detail) for name, value, detail in quality_plots.quality_stages(x)} for x in (a, b)
    ]
    names = list(dict.fromkeys([*found[0], *found[1]]))
    with drawing("compare-stages"):
        plot, (axis,) = new_plot(ROW * len(names) + MARGIN + 16, "SQNR by stage of both builds")
        for (side, colour), stages_ in zip(SIDES, found, strict=True):
            rows = [row for row, name in enumerate(names) if name in stages_]
            values = [stages_[names[row]][0] for row in rows]
            shown = [0.0 if math.isnan(value) else quality_plots.on_axis(value) for value in values]
            marks = axis.scatter(shown, rows, s=34 if side == "A" else 16, color=COLOURS[colour], label=side)
            plot.tip(
                marks,
                *(
                    f"{side}: {names[row]}, {decibel(value)}\n{stages_[names[row]][1]}"
                    for row, value in zip(rows, values, strict=True)
                ),
            )
        axis.set_yticks(range(len(names)), names)
        axis.set_ylim(len(names) - 0.4, -0.6)
        axis.set_xlim(-3, quality_plots.EQUAL_DB + 4)
        axis.set_xlabel("SQNR against the checkpoint, dB")
        axis.tick_params(axis="y", length=0)
        plot.figure.legend(loc="outside upper left", ncols=2)
        return plot.svg()


def caches(a: BuildReport, b: BuildReport) -> str:
    """K and V of both packages in fp16 against their checkpoint, by layer."""
    found = [build.caches("package in fp16", CHECKPOINT) for build in (a, b)]
    if not all(found):
        return ""
    with drawing("compare-caches"):
        plot, axes = new_plot(390, "SQNR of K and V by layer, both builds", rows=2, sharex=True)
        for axis, tensor in zip(axes, ("k", "v"), strict=True):
            for (side, colour), rows in zip(SIDES, found, strict=True):
                for row in rows:
                    if row["tensor"] == tensor:
                        quality_plots.layer_line(
                            plot, axis, reals(row["layers_db"]), colour, side, f"{tensor.upper()}, layer"
                        )
            axis.set_ylabel(f"{tensor.upper()}: SQNR, dB")
            axis.set_ylim(bottom=0)
        axes[1].set_xlabel("layer")
        quality_plots.whole_numbers(axes[1])
        handles, labels = axes[0].get_legend_handles_labels()
        plot.figure.legend(handles, labels, loc="outside upper left", ncols=2)
        return plot.svg()


def projections(a: BuildReport, b: BuildReport) -> str:
    """B − A of every projection that both have, alone."""
    sides = [
        {(row["block"], row["name"]): real(row["isolated_db"]) for row in x.rows("projections")}
        for x in (a, b)
    ]
    common = [key for key in sides[0] if key in sides[1]]
    if not common:
        return ""
    blocks, names = (
        list(dict.fromkeys(key[0] for key in common)),
        list(dict.fromkeys(key[1] for key in common)),
    )
    table = [
        [sides[1].get((block, name), math.nan) - sides[0].get((block, name), math.nan) for name in names]
        for block in blocks
    ]
    finite = [abs(value) for row in table for value in row if math.isfinite(value)]
    largest = max([1.0, *finite])
    title = "B − A, each projection alone, dB"
    return quality_plots.heat(table, blocks, names, title, lambda value: 1 + value / largest, decibel)


def positions(a: BuildReport, b: BuildReport) -> str:
    """KLD and top-1 of both pairs by position."""
    found = [build.section("positions") for build in (a, b)]
    if not all(found):
        return ""
    with drawing("compare-positions"):
        plot, (top, bottom) = new_plot(390, "KL divergence and top-1 of both pairs", rows=2, sharex=True)
        for (side, colour), data in zip(SIDES, found, strict=True):
            kld = pair_plots.finite(data["pair"]["kld"])
            places = [data["first"] + index for index in range(len(kld))]
            pair_plots.kld_dots(plot, top, places, kld, colour, f"{side}, ")
            top.plot(places, pair_plots.smooth(kld), color=COLOURS[colour], label=f"{side}, mean of 16")
            shares = [100 * equal / data["windows"] for equal in data["pair"]["equal"]]
            bottom.plot(places, pair_plots.smooth(shares), color=COLOURS[colour])
        top.set_ylabel("KLD, nats")
        top.set_ylim(bottom=0)
        bottom.set_ylabel("same best token, %")
        bottom.set_ylim(top=102)
        bottom.set_xlabel("position of the token")
        handles, labels = top.get_legend_handles_labels()
        plot.figure.legend(handles, labels, loc="outside upper left", ncols=2)
        return plot.svg()
