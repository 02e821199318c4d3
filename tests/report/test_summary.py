"""The end of a build on the terminal."""

import json
from pathlib import Path

import pytest

from pdconvert.report.load import BuildReport
from pdconvert.report.summary import summary


@pytest.mark.parametrize("which", ["passing", "failing"])
@pytest.mark.parametrize(
    "out", ["build/x", "/a/very/long/path/that/leads/to/a/folder/somewhere/far/below/out"]
)
def test_it_fits_80_columns(which: str, out: str, request: pytest.FixtureRequest) -> None:
    text = summary(Path(out), BuildReport.read(request.getfixturevalue(which)))
    assert max(map(len, text.splitlines())) <= 80
    assert not any(line != line.rstrip() for line in text.splitlines())


def facts(text: str) -> dict[str, str]:
    rows = text.partition("\nverdict ")[2].splitlines()
    return {"verdict": rows[0].strip()} | {
        row[:15].strip(): row[15:] for row in rows[1:] if row[:1].isalpha()
    }


def test_a_passed_build_says_what_to_know_and_do(passing: Path) -> None:
    text = summary(Path("build/my build"), BuildReport.read(passing))
    found = facts(text)
    assert found["verdict"] == "PASS"
    assert found["sizes"].startswith("package ") and ", decode " in found["sizes"]
    assert found["worst block"].startswith("layer ")
    assert found["KLD, top-1"].endswith("% of the pair")
    assert found["answer"].startswith("The capital of France is |")
    assert "  pdconvert verify 'build/my build'" in text.splitlines()
    assert "  open 'build/my build'/report/index.html" in text.splitlines()


def test_a_failed_build_names_its_cause_once(failing: Path) -> None:
    text = summary(Path("out"), BuildReport.read(failing))
    said = " ".join(text.split())
    assert said.count("mul layers_0_input_layernorm_mul of block layers.0") == 1
    assert "failed: prefill_128, mil fp16: k worst layer" in text
    assert facts(text)["verdict"] == "FAIL"
    assert "pdconvert run" not in text


def test_a_build_without_the_new_sections_has_a_summary(copied: Path) -> None:
    path = copied / "report" / "report.json"
    report = json.loads(path.read_text())
    for key in ("samples", "caches", "positions"):
        report[key] = []
    path.write_text(json.dumps(report))
    assert "answer" not in facts(summary(Path("out"), BuildReport.read(copied)))
