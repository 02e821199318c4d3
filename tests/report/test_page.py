"""The page of one build: what stands where, that it is complete in itself, and odd content in it."""

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from pages import Element, parse

from pdconvert.cli import main
from pdconvert.errors import InputError
from pdconvert.pipeline import build
from pdconvert.recipe import load_recipe
from pdconvert.report.load import BuildReport
from pdconvert.report.page import PAGE, report_page, write_page
from pdconvert.schema import SCHEMA

PLOTS = 9
LARGEST_BYTES = 3_000_000


def page_of(folder: Path) -> Element:
    return parse((folder / PAGE).read_text(encoding="utf-8"))


def change(folder: Path, name: str, edit) -> None:
    """Edit one JSON file of a build."""
    path = folder / name
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def rendered(folder: Path) -> Element:
    return parse(report_page(BuildReport.read(folder)))


def test_a_build_writes_its_page_and_lists_it(passing: Path) -> None:
    assert "report/index.html" in json.loads((passing / "manifest.json").read_text())["files"]
    assert (passing / PAGE).stat().st_size < LARGEST_BYTES
    again = report_page(BuildReport.read(passing))
    assert again == (passing / PAGE).read_text(encoding="utf-8"), (
        "the page depends on more than the build's files"
    )


def test_the_verdict_comes_first_with_its_reason(passing: Path) -> None:
    page = page_of(passing)
    body = page.one("body")
    assert body.children[0].tag == "header"
    header = body.children[0]
    assert header.one(class_="badge").text == "PASS"
    assert "gates are met. Nearest to its gate:" in header.one(class_="reason").text
    assert header.all(class_="cause") == []
    assert {tile.children[0].text for tile in header.all(class_="tile")} >= {
        "prefill package",
        "worst layer",
        "KLD of the pair",
    }


def test_a_failed_build_points_at_the_cause_before_anything_else(failing: Path) -> None:
    header = page_of(failing).one("header")
    assert header.one(class_="badge").text == "FAIL"
    assert "prefill_128, mil fp16: k worst layer" in header.one(class_="reason").text
    cause = header.one(class_="cause")
    facts = dict(zip([x.text for x in cause.all("dt")], [x.text for x in cause.all("dd")], strict=True))
    assert facts["block"] == "layers.0"
    assert facts["op"] == "mul layers_0_input_layernorm_mul"
    assert facts["made by"] == "the model's own form: no pass has replaced it"
    assert re.match(r"overflows fp16 in \d+ values?: fp16 ends at 65,504", facts["what happens"])
    remedy = cause.one(class_="remedy")
    assert "Use the pass safe_rms_norm" in remedy.text
    assert [code.text for code in remedy.all("code")] == ["passes", "- safe_rms_norm"]


def test_failed_checks_stand_on_top_of_their_table(failing: Path) -> None:
    rows = page_of(failing).one("table", id="checks-table").one("tbody").all("tr")
    failed = ["fail" in row.attributes.get("class", "") for row in rows]
    assert any(failed) and failed == sorted(failed, reverse=True)


def test_a_failed_pass_names_block_and_pass(copied: Path) -> None:
    def fail_a_pass(report: dict) -> None:
        check = report["checks"][1]
        check["value"], check["passed"], report["verdict"] = 12.0, False, "fail"
        for step in report["steps"]:
            if (step["step"], step["block"]) == ("linear_to_conv2d", "layers.1"):
                step["previous_db"] = 12.0

    change(copied, "report/report.json", fail_a_pass)
    cause = rendered(copied).one(class_="cause")
    facts = dict(zip([x.text for x in cause.all("dt")], [x.text for x in cause.all("dd")], strict=True))
    assert facts == {"block": "layers.1", "pass": "linear_to_conv2d", "gate": "≥ 80.0 dB"}
    assert "Take the pass out of the recipe" in cause.one(class_="remedy").text


@pytest.mark.parametrize("which", ["passing", "failing"])
def test_every_section_is_there_and_reachable(which: str, request: pytest.FixtureRequest) -> None:
    page = page_of(request.getfixturevalue(which))
    targets = [link.attributes["href"] for link in page.one("nav").all("a")]
    ids = [element.attributes["id"] for element in page.all() if "id" in element.attributes]
    assert len(targets) == 11
    assert all(target.removeprefix("#") in ids for target in targets)
    assert len(ids) == len(set(ids)), "an id stands twice"
    assert all(title.text for title in page.all("h2"))


def test_nothing_is_fetched(passing: Path) -> None:
    page = page_of(passing)
    addresses = [
        value
        for element in page.all()
        for name, value in element.attributes.items()
        if name in ("href", "src", "srcset", "xlink:href")
    ]
    assert all(address.startswith(("#", "data:,")) for address in addresses), addresses
    text = (passing / PAGE).read_text(encoding="utf-8")
    assert re.findall(r"@import|url\((?!#)|fetch\(|XMLHttpRequest|<img|<iframe", text) == []


def test_plots_are_svg_with_axes_units_and_tooltips(passing: Path) -> None:
    page = page_of(passing)
    plots = page.all("svg", class_="plot")
    assert len(plots) == PLOTS
    for plot in plots:
        assert plot.attributes["role"] == "img" and plot.attributes["aria-label"]
        assert len(plot.all("text")) > 4, plot.attributes["aria-label"]
        assert len(plot.all("title")) >= 2, plot.attributes["aria-label"]
    words = " ".join(text.text for plot in plots for text in plot.all("text"))
    for unit in ("dB", "nats", "MB", "seconds", "%", "largest magnitude", "layer", "position of the token"):
        assert unit in words, unit


def test_plots_follow_the_theme(passing: Path) -> None:
    text = (passing / PAGE).read_text(encoding="utf-8")
    assert "var(--ink)" in text and "prefers-color-scheme: dark" in text
    assert not re.search(r"#fe[0-9a-f]{2}01", text), "a stand-in colour was left"
    used = set(re.findall(r"var\(--([\w-]+)\)", text))
    light, dark = (
        set(re.findall(r"--([\w-]+):", part)) for part in text.split("prefers-color-scheme: dark")[:2]
    )
    assert used <= light and used <= dark


def test_the_chooser_has_every_matrix_and_its_bars(passing: Path) -> None:
    page = page_of(passing)
    matrices = json.loads(page.one("script", id="matrices").pieces[0])
    options = page.one("select", id="matrix").all("option")
    assert len(matrices) == len(options) == 2 * 7
    assert len([option for option in options if "selected" in option.attributes]) == 1
    bars = {element.attributes["data-name"] for element in page.all() if "data-name" in element.attributes}
    wanted = {f"{kind}-{index}" for kind in ("weights", "codes") for index in range(len(matrices[0][kind]))}
    assert bars == wanted
    assert all(max(matrix[kind]) == 100 for matrix in matrices for kind in ("weights", "codes"))


def test_samples_mark_the_first_difference(copied: Path) -> None:
    def differ(report: dict) -> None:
        report["samples"][0] |= {
            "common": " the same",
            "source": " then Paris",
            "pair": " then Rome",
            "first_difference": 3,
            "margin": 0.5,
        }

    change(copied, "report/report.json", differ)
    sample = rendered(copied).all(class_="sample")[0]
    assert [mark.text for mark in sample.all("mark")] == ["then Paris", "then Rome"]
    assert "They part at token 4, where the source's best token leads by 0.500 in logits." in sample.text


def test_what_a_model_says_cannot_become_markup(copied: Path) -> None:
    hostile = "</script><script>alert(1)</script><b>&amp;"

    def write(report: dict) -> None:
        report["samples"][0]["prompt"] = hostile
        report["name"] = hostile
        report["weights"][0]["name"] = hostile
        report["checks"][0]["name"] = hostile

    change(copied, "report/report.json", write)
    change(copied, "manifest.json", lambda manifest: manifest["source"].update(label=hostile))
    page = rendered(copied)
    assert len(page.all("script")) == 2
    assert page.one("h1").text == hostile
    assert json.loads(page.one("script", id="matrices").pieces[0])


def test_values_that_are_not_finite_are_shown(copied: Path) -> None:
    def break_it(report: dict) -> None:
        for row in report["caches"]:
            row["pooled_db"] = "nan"
            row["layers_db"] = ["nan"] * len(row["layers_db"])
        for row in report["projections"]:
            row["isolated_db"], row["cumulative_db"] = "inf", "nan"
        for row in report["headroom"]:
            row["peak"] = "inf"
        for row in report["caches"][:2]:
            row["layers_db"] = [-80.0] * len(row["layers_db"])
        report["positions"]["pair"]["kld"][:3] = ["nan", "inf", 2.0]

    change(copied, "report/report.json", break_it)
    page = rendered(copied)
    assert len(page.all("svg", class_="plot")) == PLOTS
    tips = " ".join(title.text for plot in page.all("svg", class_="plot") for title in plot.all("title"))
    assert "not finite" in tips and "beyond fp16" in tips


def test_random_weights_have_no_distributions_to_compare(tmp_path: Path) -> None:
    build(load_recipe("tiny", overrides=["passes.quantize_weights.scheme=none"]), tmp_path / "out")
    page = page_of(tmp_path / "out")
    assert "the weights are random, whose distributions mean nothing" in page.text
    assert "Sample generations" not in page.text
    assert "fp16 weights" in page.one(class_="lead").text
    assert "codes" not in json.loads(page.one("script", id="matrices").pieces[0])[0]


def test_the_report_of_an_older_version_has_what_it_can(copied: Path) -> None:
    new = ("fault", "caches", "projections", "headroom", "positions", "weights", "samples", "sizes", "lint")
    change(copied, "report/report.json", lambda report: [report.pop(key) for key in new])
    change(copied, "report/report.json", lambda report: report["cost"].pop("stages"))
    page = rendered(copied)
    assert page.one(class_="badge").text == "PASS"
    assert len(page.all("svg", class_="plot")) == 1
    assert "written by an older version" in page.text


REFUSALS = [
    ("report/report.json", None, r"report\.json is missing; build again with --force"),
    ("report/report.json", "{", r"report\.json: not JSON \(.*\); build again with --force"),
    (
        "report/report.json",
        '{"schema": "9.0"}',
        rf"schema 9\.0 is newer than {SCHEMA}; use a newer pdconvert",
    ),
    ("report/report.json", '{"schema": "1.1"}', r"report\.json: 'name' is missing or of another form"),
    ("report/report.json", "[]", r"no schema version; it was not written by pdconvert"),
    ("manifest.json", None, r"is not a build: it has no manifest\.json"),
]


@pytest.mark.parametrize(("name", "content", "message"), REFUSALS)
def test_a_damaged_build_is_refused_in_one_line(
    copied: Path, name: str, content: str | None, message: str
) -> None:
    path = copied / name
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(InputError, match=message):
        BuildReport.read(copied)
    result = CliRunner().invoke(main, ["report", str(copied)])
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1


def test_the_command_writes_the_page_again(copied: Path) -> None:
    original = (copied / PAGE).read_text(encoding="utf-8")
    (copied / PAGE).unlink()
    result = CliRunner().invoke(main, ["report", str(copied), "--json"])
    path = copied / PAGE
    assert json.loads(result.stdout) == {"path": str(path), "size_bytes": path.stat().st_size}
    assert path.read_text(encoding="utf-8") == original


def test_a_page_written_later_does_not_keep_a_build_from_being_replaced(copied: Path) -> None:
    from pdconvert.process import foreign_files

    change(copied, "manifest.json", lambda manifest: manifest["files"].remove("report/index.html"))
    assert foreign_files(copied) == []


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("report/report.json", lambda report: report.update(caches=[{"what": "x"}])),
        ("report/report.json", lambda report: report.update(projections="none")),
        ("report/report.json", lambda report: report["sizes"].pop("package_bytes")),
        ("report/report.json", lambda report: report["samples"][0].pop("common")),
        ("report/report.json", lambda report: report["headroom"][0].update(peak="high")),
        ("manifest.json", lambda manifest: manifest.pop("source")),
        ("manifest.json", lambda manifest: manifest["recipe"].pop("gates")),
    ],
)
def test_sections_of_another_form_are_refused_in_one_line(copied: Path, name: str, edit) -> None:
    change(copied, name, edit)
    for command in (
        ["report", str(copied)],
        ["compare", str(copied), str(copied), "--out", str(copied / "c.html")],
    ):
        result = CliRunner().invoke(main, command)
        assert result.exit_code in (0, 2), result.stderr
        assert len(result.stderr.splitlines()) == (1 if result.exit_code else 0), result.stderr
    assert CliRunner().invoke(main, ["report", str(copied)]).exit_code == 2


def test_a_link_in_the_place_of_the_page_is_replaced_and_not_followed(passing: Path, tmp_path: Path) -> None:
    copied, victim = shutil.copytree(passing, tmp_path / "build"), tmp_path / "victim"
    victim.write_text("precious")
    (copied / "report" / "index.html").unlink()
    (copied / "report" / "index.html").symlink_to(victim)
    write_page(copied)
    assert (
        victim.read_text() == "precious" and "<html" in (copied / "report" / "index.html").read_text()[:200]
    )
    (copied / "report").rename(tmp_path / "report")
    (copied / "report").symlink_to(tmp_path / "report")
    with pytest.raises(InputError, match="leads out of the build"):
        write_page(copied)
