"""Two builds side by side: differences of the recipe, figures and which is better, the page."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from pages import parse

from pdconvert.cli import main
from pdconvert.report.compare import compare, flat
from pdconvert.report.load import BuildReport


def run(*args: str):
    return CliRunner().invoke(main, ["compare", *args])


def test_a_build_compared_with_itself_differs_in_nothing(passing: Path) -> None:
    build = BuildReport.read(passing)
    found = compare(build, build)
    assert found.recipe == []
    assert {row.change for row in found.figures} == {"", "="}
    assert {row.change for row in found.checks} == {"="}
    assert {row.better for row in (*found.figures, *found.checks)} == {""}


def test_what_a_missing_pass_did(passing: Path, failing: Path) -> None:
    found = compare(BuildReport.read(passing), BuildReport.read(failing))
    recipe = {row.what: (row.a, row.b) for row in found.recipe}
    assert recipe["passes.safe_rms_norm.method"] == ("row_max", "–")
    figures = {row.what: row for row in found.figures}
    assert (figures["verdict"].a, figures["verdict"].b, figures["verdict"].better) == ("pass", "fail", "a")
    assert figures["K against the checkpoint"].better == "a"
    assert (
        figures["K against the checkpoint"].change.startswith("−")
        or figures["K against the checkpoint"].b == "not finite"
    )
    checks = {row.what: row for row in found.checks}
    assert checks["pass safe_rms_norm, worst block"].b == "–"


def test_smaller_is_better_for_sizes_and_larger_for_quality(copied: Path, passing: Path) -> None:
    path = copied / "report" / "report.json"
    report = json.loads(path.read_text())
    report["sizes"]["package_bytes"] += 5_000_000
    for row in report["caches"]:
        row["pooled_db"] += 10
    path.write_text(json.dumps(report))
    rows = {row.what: row for row in compare(BuildReport.read(passing), BuildReport.read(copied)).figures}
    assert (rows["package"].change, rows["package"].better) == ("+5 MB", "a")
    assert (rows["K against the checkpoint"].change, rows["K against the checkpoint"].better) == (
        "+10.0 dB",
        "b",
    )


def test_a_value_that_is_not_finite_is_worse(copied: Path, passing: Path) -> None:
    path = copied / "report" / "report.json"
    report = json.loads(path.read_text())
    for row in report["caches"]:
        row["pooled_db"] = "nan"
    path.write_text(json.dumps(report))
    rows = {row.what: row for row in compare(BuildReport.read(passing), BuildReport.read(copied)).figures}
    row = rows["K against the checkpoint"]
    assert (row.b, row.change, row.better) == ("not finite", "", "a")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": 1, "b": {"c": None}}, {"a": "1", "b.c": "–"}),
        (
            {"passes": ["x", {"y": {"bits": 8}}, {"z": {}}]},
            {"passes.x": "yes", "passes.y.bits": "8", "passes.z": "yes"},
        ),
        (
            {"functions": [{"tokens": 128}, {"tokens": 64}]},
            {"functions.0.tokens": "128", "functions.1.tokens": "64"},
        ),
        ({"gates": {}}, {"gates": "–"}),
    ],
)
def test_recipes_become_dotted_paths(value: dict, expected: dict[str, str]) -> None:
    assert flat(value) == expected


def test_the_page_stands_alone(passing: Path, failing: Path, tmp_path: Path) -> None:
    out = tmp_path / "compare.html"
    result = run(str(passing), str(failing), "--out", str(out))
    assert result.exit_code == 0, result.stderr
    assert str(out) in result.stdout and "passes.safe_rms_norm.method" in result.stdout
    page = parse(out.read_text(encoding="utf-8"))
    assert [badge.text for badge in page.one("header").all(class_="badge")] == ["PASS", "FAIL"]
    assert len(page.all("svg", class_="plot")) == 4
    ids = {element.attributes["id"] for element in page.all() if "id" in element.attributes}
    assert {link.attributes["href"].removeprefix("#") for link in page.one("nav").all("a")} <= ids
    links = [e.attributes["href"] for e in page.all() if "href" in e.attributes]
    assert all(link.startswith(("#", "data:,")) for link in links)


def test_builds_of_other_models_and_of_random_weights_compare(passing: Path, tmp_path: Path) -> None:
    from pdconvert.pipeline import build
    from pdconvert.recipe import load_recipe

    build(load_recipe("tiny", overrides=["source.random.config.num_hidden_layers=3"]), tmp_path / "b")
    result = run(str(passing), str(tmp_path / "b"), "--out", str(tmp_path / "c.html"), "--json")
    content = json.loads(result.stdout)
    assert content["path"] == str(tmp_path / "c.html")
    assert {row["what"] for row in content["recipe"]} >= {"source.path", "source.random.seed"}
    assert {"KLD, mean, nats"}.isdisjoint(row["what"] for row in content["figures"])


def test_a_folder_that_is_no_build_is_refused(passing: Path, tmp_path: Path) -> None:
    result = run(str(passing), str(tmp_path))
    assert result.exit_code == 2 and "is not a build" in result.stderr
