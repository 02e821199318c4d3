"""Two builds side by side: what was changed in the recipe, and what that changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from pdconvert.ledger import CHECKPOINT
from pdconvert.report import compare_plots, view
from pdconvert.report.load import BuildReport, decibel, real, worst
from pdconvert.report.page import environment
from pdconvert.sizes import size_text

SAME = "="
SECTIONS = (
    ("figures", "Figures"),
    ("recipe", "Recipe"),
    ("quality", "Quality"),
    ("checks", "Checks"),
    ("samples", "Generations"),
)


@dataclass(frozen=True)
class Row:
    """One thing in both builds, in words; `change` says what B has more.

    Attributes:
        better: "a", "b", or "" where neither is.
    """

    what: str
    a: str
    b: str
    change: str = ""
    better: str = ""


@dataclass(frozen=True)
class Comparison:
    """Two builds.

    Attributes:
        figures: verdict, sizes, quality, cost.
        recipe: fields of the resolved recipes that differ, by their dotted path.
        checks: checks that either has.
        samples: continuations of both pairs, where both have the prompt.
    """

    figures: list[Row]
    recipe: list[Row]
    checks: list[Row]
    samples: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Plain data, the fields of `compare --json`."""
        return {
            "figures": [asdict(row) for row in self.figures],
            "recipe": [asdict(row) for row in self.recipe],
            "checks": [asdict(row) for row in self.checks],
        }


def compare(a: BuildReport, b: BuildReport) -> Comparison:
    """Set two builds side by side."""
    return Comparison(_figures(a, b), _recipe(a, b), _checks(a, b), _samples(a, b))


def _figures(a: BuildReport, b: BuildReport) -> list[Row]:
    verdicts = ["pass" if build.passed else "fail" for build in (a, b)]
    better = "" if a.passed == b.passed else "ab"[b.passed]
    rows = [Row("name", a.name, b.name), Row("verdict", verdicts[0], verdicts[1], better=better)]
    sizes = [build.section("sizes") for build in (a, b)]
    if all(sizes):
        for what, key in (("package", "package_bytes"), ("decode folder", "decode_bytes")):
            rows.append(_numbers(what, [size[key] for size in sizes], _size))
    bits = [build.manifest["quantization"]["bits_per_weight"] for build in (a, b)]
    rows.append(_numbers("bits per weight", bits, "{:.2f}".format))
    caches = [build.caches("package in fp16", CHECKPOINT) for build in (a, b)]
    for tensor in ("k", "v") if all(caches) else ():
        pooled = [_pooled(found, tensor) for found in caches]
        rows.append(
            _numbers(f"{tensor.upper()} against the checkpoint", pooled, decibel, more_is_better=True)
        )
    for what, name, scale, form in (
        ("KLD, mean, nats", "pair: KLD, mean", 1, "{:.5f}"),
        ("top-1, %", "pair: top-1", 100, "{:.1f}"),
        ("greedy tokens equal, %", "pair: greedy tokens", 100, "{:.1f}"),
    ):
        values = [scale * check.value for build in (a, b) if (check := build.check(name))]
        if len(values) == 2:
            rows.append(_numbers(what, values, form.format, more_is_better=scale == 100))
    costs = [build.section("cost") for build in (a, b)]
    rows.append(_numbers("seconds", [cost["seconds"] for cost in costs], "{:.0f}".format))
    rows.append(_numbers("peak memory, GB", [cost["peak_bytes"] / 1e9 for cost in costs], "{:.2f}".format))
    return rows


def _size(value: float) -> str:
    return size_text(int(value))


def _pooled(rows: list[dict[str, Any]], tensor: str) -> float:
    return worst([real(row["pooled_db"]) for row in rows if row["tensor"] == tensor])


def _numbers(
    what: str, values: Sequence[float], text: Callable[[float], str], *, more_is_better: bool = False
) -> Row:
    """Two numbers, their difference, and which is better; equal where they are shown alike."""
    a, b = values
    change = b - a
    if text(a) == text(b):
        return Row(what, text(a), text(b), SAME)
    if not math.isfinite(change):
        return Row(what, text(a), text(b), better="a" if math.isnan(b) else "b")
    shown = f"{'+' if change > 0 else '−'}{text(abs(change))}"
    return Row(what, text(a), text(b), shown, "ab"[(change > 0) == more_is_better])


def _recipe(a: BuildReport, b: BuildReport) -> list[Row]:
    """Every scalar of the recipes that one has and the other has not, or has otherwise."""
    left, right = (flat(build.manifest["recipe"]) for build in (a, b))
    return [
        Row(key, left.get(key, "–"), right.get(key, "–"))
        for key in dict.fromkeys([*left, *right])
        if left.get(key) != right.get(key)
    ]


def flat(value: Any, path: str = "") -> dict[str, str]:
    """A nested value as dotted path → text. Passes go by their name, other lists by place."""
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [
            next(iter(item.items())) if path == "passes" and isinstance(item, Mapping) else (str(index), item)
            for index, item in enumerate(value)
        ]
        if path == "passes":
            items = [(item, "yes") if isinstance(item, str) else (key, item) for key, item in items]
    else:
        return {path: "–" if value is None else str(value)}
    if not items:
        return {path: "yes" if path.startswith("passes.") else "–"}
    found: dict[str, str] = {}
    for key, item in items:
        found |= flat(item, f"{path}.{key}" if path else key)
    return found


def _checks(a: BuildReport, b: BuildReport) -> list[Row]:
    """Checks by name, the block or count in brackets left out."""
    left, right = ({_plain_name(check.name): check for check in build.checks} for build in (a, b))
    rows = []
    for name in dict.fromkeys([*left, *right]):
        found = [check for check in (left.get(name), right.get(name)) if check]
        text = partial(view.measured, metric=found[0].metric)
        if len(found) == 2:
            lower = found[0].ceiling or found[0].metric == "kld_nats"
            rows.append(_numbers(name, [check.value for check in found], text, more_is_better=not lower))
        else:
            shown = text(found[0].value)
            rows.append(Row(name, shown, "–") if name in left else Row(name, "–", shown))
    return rows


def _plain_name(name: str) -> str:
    return name.partition(" (")[0]


def _samples(a: BuildReport, b: BuildReport) -> list[dict[str, Any]]:
    """Per prompt of both the source's text, and each pair's, cut where it leaves the source's."""
    others = {sample["prompt"]: sample for sample in b.rows("samples")}
    return [
        {
            "prompt": sample["prompt"],
            "source": sample["common"] + sample["source"],
            "a": sample,
            "b": others[sample["prompt"]],
        }
        for sample in a.rows("samples")
        if sample["prompt"] in others
    ]


def compare_page(a: BuildReport, b: BuildReport) -> str:
    """The page, complete in itself."""
    found = compare(a, b)
    return environment().get_template("compare.html").render(
        sections=[item for item in SECTIONS if found.samples or item[0] != "samples"],
        a=a,
        b=b,
        found=found,
        plots=compare_plots.draw(a, b),
    )  # fmt: skip
