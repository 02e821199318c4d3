"""What the page says in words and tables: the verdict and its reason first."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from pdconvert.checks import Check
from pdconvert.ledger import CHECKPOINT
from pdconvert.report.load import BuildReport, decibel, real
from pdconvert.sizes import size_text

NAMED_PASS = re.compile(r"\bthe pass (\w+)")
"""How `pdconvert.forensics` names a pass that would help."""


@dataclass(frozen=True)
class Cause:
    """Why a build failed, in the order in which one looks for it.

    Attributes:
        check: the first check that failed.
        facts: name and value: block, pass, op, range, whatever is known.
        remedy: what to do.
        change: the line of the recipe that does it; empty where none does.
    """

    check: Check
    facts: tuple[tuple[str, str], ...]
    remedy: str
    change: str = ""


@dataclass(frozen=True)
class Tile:
    """A figure in the head of the page."""

    label: str
    value: str
    note: str = ""


def measured(value: float, metric: str) -> str:
    """A check's value with its unit."""
    if metric == "sqnr_db":
        return decibel(value)
    if math.isnan(value):
        return "not finite"
    return f"{100 * value:.1f} %" if metric == "share_equal" else f"{value:.5f} nats"


def gate_text(check: Check) -> str:
    """A check's gate with its direction; empty where nothing is asked."""
    if check.floor is None:
        return ""
    return f"{'≤' if check.ceiling else '≥'} {measured(check.floor, check.metric)}"


def reason(build: BuildReport) -> str:
    """One sentence: why it passed, or how many checks failed and the first of them."""
    failed = [check for check in build.checks if not check.passed]
    gated = [check for check in build.checks if check.floor is not None]
    if failed:
        first = failed[0]
        more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        return f"{first.name}: {measured(first.value, first.metric)}, the gate is {gate_text(first)}{more}."
    if not gated:
        return "Nothing was gated."
    return f"All {len(gated)} gates are met. Nearest to its gate: {nearest_gate(build)}."


def nearest_gate(build: BuildReport) -> str:
    """The check with the least room above its gate."""
    nearest = min((check for check in build.checks if check.floor is not None), key=room)
    return f"{nearest.name}, {measured(nearest.value, nearest.metric)} ({gate_text(nearest)})"


def halves(sizes: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and sizes of both halves."""
    return [
        (name, size_text(sizes[key]))
        for name, key in (("package", "package_bytes"), ("decode", "decode_bytes"))
    ]


def room(check: Check) -> float:
    """How far a check is above its gate, as a share of the gate; negative where it fails."""
    if check.floor is None or math.isinf(check.value):
        return math.inf
    distance = check.floor - check.value if check.ceiling else check.value - check.floor
    return distance / (abs(check.floor) or 1.0)


def cause(build: BuildReport) -> Cause | None:
    """Why the build failed: from the first op at fault where there is one, else from the failed check itself."""
    failed = [check for check in build.checks if not check.passed]
    if not failed:
        return None
    first, fault = failed[0], build.section("fault")
    if fault and fault["sentence"] == first.hint:
        facts = [
            ("block", fault["block"] or "–"),
            ("op", f"{fault['op_type']} {fault['name']}"),
            ("made by", _maker(fault["made_by"])),
            ("function", f"{fault['function']}, op {fault['position']}"),
            ("what happens", _what(fault)),
        ]
        return Cause(first, tuple(facts), _sentence(fault["advice"]), recipe_line(fault["advice"]))
    step = next((name for name in build.ledger.names() if first.name.startswith(f"pass {name},")), None)
    facts = [("gate", gate_text(first))]
    if step is not None:
        worst = build.ledger.worst(step)
        facts = [("block", worst.block), ("pass", step), *facts]
    where, _, advice = first.hint.rpartition("; ")
    if where and step is None:
        facts.append(("where", where))
    return Cause(first, tuple(facts), _sentence(advice if step is None else first.hint.partition(": ")[2]))


def _maker(name: str | None) -> str:
    if name is None:
        return "unknown"
    return "the model's own form: no pass has replaced it" if name == "family" else f"the pass {name}"


def _what(fault: Mapping[str, Any]) -> str:
    span = f"{real(fault['low']):.4g} … {real(fault['high']):.4g}"
    if fault["kind"] == "overflow":
        count = fault["nonfinite"]
        values = "1 value" if count == 1 else f"{count} values"
        return f"overflows fp16 in {values}: fp16 ends at 65,504, and in fp32 the range is {span}"
    return (
        f"loses {real(fault['lost_db']):.0f} dB in fp16: {fault['flushed']} values become zero; range {span}"
    )


def recipe_line(advice: str) -> str:
    """The recipe's line for the pass that a piece of advice names first; empty where it names none."""
    found = NAMED_PASS.search(advice)
    return f"- {found[1]}" if found else ""


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def tiles(build: BuildReport) -> list[Tile]:
    """The figures in the head of the page."""
    sizes, cost = build.section("sizes"), build.section("cost")
    found = []
    if sizes:
        bits = build.manifest["quantization"]["bits_per_weight"]
        found += [
            Tile("prefill package", size_text(sizes["package_bytes"]), f"{bits:.2f} bits per weight"),
            Tile("decode folder", size_text(sizes["decode_bytes"])),
        ]
    worst = worst_block(build)
    if worst:
        found.append(worst)
    kld, top1 = build.check("pair: KLD, mean"), build.check("pair: top-1")
    if kld:
        found.append(Tile("KLD of the pair", f"{kld.value:.4f}", "nats, mean"))
    if top1:
        found.append(Tile("same best token", f"{100 * top1.value:.1f} %", "of the pair, top-1"))
    if cost:
        peak = cost["peak_bytes"] / 1e9
        found.append(Tile("built in", f"{cost['seconds']:.0f} s", f"{peak:.2f} GB at the peak"))
    return found


def worst_block(build: BuildReport) -> Tile | None:
    """The layer whose K or V the package gives worst, against the checkpoint."""
    rows = build.caches("package in fp16", CHECKPOINT)
    values = [
        (real(value), index, row["tensor"]) for row in rows for index, value in enumerate(row["layers_db"])
    ]
    if not values:
        return None
    broken = [item for item in values if math.isnan(item[0])]
    value, index, tensor = broken[0] if broken else min(values)
    return Tile("worst layer", f"layer {index}", f"{tensor.upper()} {decibel(value)} against the checkpoint")


def recipe_yaml(build: BuildReport) -> str:
    """The resolved recipe as a file that builds the same again."""
    return yaml.safe_dump(build.manifest["recipe"], sort_keys=False, allow_unicode=True)


def functions(build: BuildReport) -> list[dict[str, Any]]:
    """Functions with their ports, one row each."""
    return [
        {
            "function": name,
            "direction": direction,
            "name": port["name"],
            "shape": " × ".join(map(str, port["shape"])),
            "dtype": port["dtype"],
            "axes": ", ".join(port["axes"]),
        }
        for name, function in build.manifest["prefill"]["functions"].items()
        for direction, key in (("in", "inputs"), ("state", "states"), ("out", "outputs"))
        for port in function.get(key, ())
    ]


def parts(build: BuildReport) -> list[dict[str, Any]]:
    """Weights, bytes and bits of each part of the model, in both halves."""
    rows = []
    for row in build.section("sizes").get("parts", []):
        weights = row["weights"]
        rows.append(
            {
                **row,
                **{
                    f"{half}_bits": 8 * row[f"{half}_bytes"] / weights if weights else math.nan
                    for half in ("package", "decode")
                },
            }
        )
    return rows


def hand_off(build: BuildReport) -> list[tuple[str, str, str, str]]:
    """What the hand-off costs: quantity, the pair, MLX alone, their difference."""
    rows = []
    for title, pair_name, alone_name, scale, unit in (
        ("mean KLD, nats", "pair: KLD, mean", "MLX alone: KLD, mean", 1.0, ".5f"),
        ("top-1, %", "pair: top-1", "MLX alone: top-1", 100.0, ".2f"),
    ):
        pair, alone = build.check(pair_name), build.check(alone_name)
        if pair and alone:
            a, b = scale * pair.value, scale * alone.value
            rows.append((title, f"{a:{unit}}", f"{b:{unit}}", f"{a - b:+{unit}}"))
    return rows


def weights_data(build: BuildReport) -> list[dict[str, Any]]:
    """What the chooser of layers needs, the worst projection first among the options' choice."""
    quality = {(row["block"], row["name"]): row for row in build.rows("projections")}
    rows = []
    for row in build.rows("weights"):
        found = quality.get((row["block"], row["name"]), {})
        rows.append(
            {
                **row,
                "isolated": decibel(real(found.get("isolated_db"))) if found else "",
                "cumulative": decibel(real(found.get("cumulative_db"))) if found else "",
            }
        )
    return rows


def worst_weight(build: BuildReport) -> int:
    """Index into `weights` of the matrix whose projection is worst alone; 0 where nothing is known."""
    quality = {(row["block"], row["name"]): real(row["isolated_db"]) for row in build.rows("projections")}
    values = [quality.get((row["block"], row["name"]), math.inf) for row in build.rows("weights")]
    return min(range(len(values)), key=values.__getitem__, default=0)
