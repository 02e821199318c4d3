"""report.json against docs/contracts.md: every key is described, and values are what is said of them."""

import json
import math
import re
from pathlib import Path

import pytest

DOC = (Path(__file__).parents[2] / "docs" / "contracts.md").read_text(encoding="utf-8")
LEDGER = DOC.partition("## The ledger")[2].partition("\n## ")[0]


@pytest.fixture(params=["passing", "failing"])
def report(request: pytest.FixtureRequest) -> dict:
    return json.loads((request.getfixturevalue(request.param) / "report" / "report.json").read_text())


def described() -> dict[str, str]:
    """Field → its line, several fields of one line apart."""
    rows = re.findall(r"^\| (`.+?) \| (.+) \|$", LEDGER, re.MULTILINE)
    return {name: text for names, text in rows for name in re.findall(r"`(\w+)`", names)}


def keys_of(value: object) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {key for item in value.values() for key in keys_of(item)}
    return {key for item in value for key in keys_of(item)} if isinstance(value, list) else set()


def test_every_field_is_described(report: dict) -> None:
    assert set(report) == set(described())
    for name, value in report.items():
        if name == "lint":  # as in `lint --json`
            value = dict.fromkeys(value)
        named = set(re.findall(r"`(\w+)`", described()[name])) | {"block", "name"}
        assert keys_of(value) <= named, name


def test_it_is_strict_json_with_lists_of_numbers_on_one_line(passing: Path) -> None:
    text = (passing / "report" / "report.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert re.search(r'"weights": \[[\d, ]+\]', text)


def test_figures_of_sections_agree_with_the_checks(report: dict) -> None:
    checks = {check["name"]: float(check["value"]) for check in report["checks"]}
    for row in report["caches"]:
        if row["what"] != "stored weights" and row["against"].startswith("its own"):
            mode = row["what"].removeprefix("package in ")
            pooled = checks[f"{row['function']}, mil {mode}: {row['tensor']} pooled"]
            assert float(row["pooled_db"]) == pytest.approx(pooled, rel=1e-4, nan_ok=True)
    positions = report["positions"]
    for name, check in (("pair", "pair: "), ("mlx_alone", "MLX alone: ")):
        kld, equal = positions[name]["kld"], positions[name]["equal"]
        assert math.fsum(map(float, kld)) / len(kld) == pytest.approx(checks[check + "KLD, mean"], rel=1e-3)
        share = sum(equal) / len(equal) / positions["windows"]
        assert share == pytest.approx(checks[check + "top-1"])
    assert report["cost"]["stages"][-1]["name"] == "verify the shipped files"


def test_sizes_are_those_of_the_files(passing: Path) -> None:
    sizes = json.loads((passing / "report" / "report.json").read_text())["sizes"]
    weights = (passing / "prefill.mlpackage/Data/com.apple.CoreML/weights/weight.bin").stat().st_size
    stored = sum(part["package_bytes"] for part in sizes["parts"])
    assert 0.9 * weights < stored <= weights
    index = json.loads((passing / "decode" / "model.safetensors.index.json").read_text())
    assert sum(part["decode_bytes"] for part in sizes["parts"]) == index["metadata"]["total_size"]


def test_every_projection_of_every_layer_is_measured(report: dict) -> None:
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert [(row["block"], row["name"]) for row in report["projections"]] == [
        (f"layers.{layer}", name) for layer in range(2) for name in names
    ]
    assert all(20 < row["isolated_db"] < 60 for row in report["projections"])
    first = report["projections"][0]
    assert first["cumulative_db"] <= first["isolated_db"] + 3
