"""The pages: templates filled with what a build reports."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdconvert import __version__
from pdconvert.checks import NEAR_TIE, Check
from pdconvert.errors import InputError
from pdconvert.report import pair_plots, quality_plots, size_plots, view
from pdconvert.report.load import BuildReport, decibel
from pdconvert.sizes import size_text

if TYPE_CHECKING:
    from jinja2 import Environment

PAGE = Path("report") / "index.html"
"""Where the page lies in a build."""

SECTIONS = (
    ("quality", "Where quality goes"),
    ("checks", "Checks"),
    ("projections", "Projections"),
    ("pair", "Pair"),
    ("samples", "Samples"),
    ("bits", "Bits and bytes"),
    ("lint", "Lint"),
    ("functions", "Functions"),
    ("passes", "Passes"),
    ("cost", "Time and memory"),
    ("reproduce", "Reproduce"),
)


def write_page(build: Path) -> Path:
    """Write `report/index.html` of a build from its report.json and manifest.json.

    Raises:
        InputError: as `BuildReport.read`, or the folder of the page leads out of the build.
    """
    page = report_page(BuildReport.read(build))
    path = build / PAGE
    if not path.parent.resolve().is_relative_to(build.resolve()):
        raise InputError(f"{path.parent} leads out of the build; build again")
    path.unlink(missing_ok=True)  # a link is replaced, not followed
    path.write_text(page, encoding="utf-8")
    return path


def report_page(build: BuildReport) -> str:
    """The page of one build, complete in itself."""
    weights = [{**row, "facts": weight_facts(row)} for row in view.weights_data(build)]
    samples = build.rows("samples")
    return environment().get_template("report.html").render(
        sections=[item for item in SECTIONS if samples or item[0] != "samples"],
        build=build,
        manifest=build.manifest,
        source=build.manifest["source"],
        verdict="pass" if build.passed else "fail",
        scheme=scheme(build),
        reason=view.reason(build),
        cause=view.cause(build),
        tiles=view.tiles(build),
        checks=sorted(build.checks, key=lambda check: check.passed),
        hand_off=view.hand_off(build),
        fit=build.section("fit"),
        samples=samples,
        near_tie=NEAR_TIE,
        parts=view.parts(build),
        lint=build.section("lint"),
        functions=view.functions(build),
        steps=build.ledger.steps,
        cost=build.section("cost"),
        recipe=view.recipe_yaml(build),
        weights=weights,
        worst_weight=view.worst_weight(build),
        matrices=script_json([matrix(row) for row in weights]),
        plots=draw(build),
        distributions=size_plots.distributions(build),
    )  # fmt: skip


def draw(build: BuildReport) -> dict[str, str]:
    """All plots of a build by name; an empty text where it has no data for one."""
    heat = partial(quality_plots.heat_map, build) if build.rows("projections") else lambda *_: ""
    return {
        "waterfall": quality_plots.waterfall(build),
        "caches": quality_plots.caches(build),
        "headroom": quality_plots.headroom(build),
        "isolated": heat("isolated_db", "each projection alone, dB"),
        "cumulative": heat("cumulative_db", "in the chain, dB"),
        "positions": pair_plots.positions(build),
        "sizes": size_plots.sizes(build),
        "stages": size_plots.stages(build),
    }


def scheme(build: BuildReport) -> str:
    """The weights in words: "w8a16 weights" or "fp16 weights"."""
    if not build.manifest["quantization"]["quantized"]:
        return "fp16 weights"
    options = [
        item["quantize_weights"] for item in build.manifest["recipe"]["passes"] if "quantize_weights" in item
    ]
    return f"{options[0]['scheme']} weights"


def weight_facts(row: dict[str, Any]) -> str:
    """A matrix in one line."""
    rows, columns = row["shape"]
    part = "" if row["sampled_rows"] == rows else f", every {-(-rows // row['sampled_rows'])}th row"
    quality = f", SQNR alone {row['isolated']}, in the chain {row['cumulative']}" if row["isolated"] else ""
    return (
        f"{rows:,} × {columns:,}, {row['bits']} bits, largest weight {row['peak'] / row['std']:.1f} standard "
        f"deviations{quality}{part}"
    )


def matrix(row: dict[str, Any]) -> dict[str, Any]:
    """What the script needs of a matrix: bars in % of the fullest bin."""
    bars: dict[str, Any] = {
        name: [round(100 * count / (max(row[name]) or 1), 1) for count in row[name]]
        for name in ("weights", "codes")
        if name in row
    }
    return {**bars, "facts": row["facts"], "grid": size_plots.grid_of(row)}


def script_json(content: Any) -> str:
    """JSON for a script element: no text in it can end the element."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c")


def room_text(check: Check) -> str:
    """A check's room above its gate, in %."""
    room = view.room(check)
    return "" if check.floor is None or not math.isfinite(room) else f"{100 * room:.0f}"


def bits_text(bits: float, size_bytes: int) -> str:
    """Bits per weight; a dash where the half holds nothing of the part."""
    return f"{bits:.2f}" if size_bytes and math.isfinite(bits) else "–"


def environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("pdconvert.report")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= {
        "version": __version__,
        "style": loader.get_source(environment, "style.css")[0],
        "script": loader.get_source(environment, "page.js")[0],
        "decibel": decibel,
        "measured": view.measured,
        "gate_text": view.gate_text,
        "reason": view.reason,
        "room": view.room,
        "room_text": room_text,
        "bits_text": bits_text,
        "size_text": size_text,
    }
    return environment
