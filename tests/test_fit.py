"""The alarm when quantization fits its calibration text: the loss on it beside that on held-out text."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from refusals import W4, base, checkpoint

from pdconvert.cli.app import main
from pdconvert.errors import InputError
from pdconvert.fit import WINDOWS, Fit, read_calibration_windows, windows_of_calibration
from pdconvert.pipeline import build
from pdconvert.recipe import load_recipe
from pdconvert.report.load import BuildReport
from pdconvert.report.page import report_page
from pdconvert.report.summary import summary

__all__ = ["base", "checkpoint"]


def test_the_alarm_needs_a_ratio_and_a_loss_that_counts() -> None:
    """QUANT: 16k tokens, KLD 0.109 on the calibration text and 0.213 on fresh text."""
    fitted = Fit(0.109, 0.003, 0.213, 0.005)
    assert fitted.ratio == pytest.approx(1.954, abs=1e-3)
    assert fitted.alarm is not None and "KLD 0.109 on the calibration text, 0.213 on held-out" in fitted.alarm
    assert replace(fitted, held_out=0.13).alarm is None
    assert replace(fitted, calibration=0.001, held_out=0.004).alarm is None, (
        "eight bits lose nothing that counts"
    )
    assert replace(fitted, calibration=0.0).alarm is not None


def test_the_error_is_one_of_windows() -> None:
    found = Fit.of(torch.tensor([[1.0] * 9, [3.0] * 9]), torch.tensor([[4.0] * 9, [4.0] * 9]))
    assert found == Fit(2.0, pytest.approx(1.0), 4.0, 0.0)


def test_windows_begin_where_sequences_do() -> None:
    long = [list(range(start, start + 30)) for start in (0, 100, 200, 300)]
    assert windows_of_calibration(long, 2, 20) == [list(range(20)), list(range(200, 220))]
    short = [[1, 2, 3], [4, 5], [6, 7, 8], [9]]
    assert windows_of_calibration(short, 3, 4) == [[1, 2, 3, 4], [6, 7, 8, 9]], (
        "joined until they are long enough"
    )


@pytest.fixture
def built(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A W4 build, rounded by little text that the model wrote."""
    monkeypatch.setenv("PDCONVERT_CACHE", str(tmp_path / "cache"))
    overrides = (
        *W4,
        "probe.eval_windows=2",
        "passes.quantize_weights.rounding=gptq",
        "calibration.tokens=600",
        "calibration.length=40",
    )
    build(load_recipe("tiny", source=str(checkpoint), overrides=overrides), tmp_path / "build")
    return tmp_path / "build"


def test_a_calibrated_build_says_how_well_it_fits(built: Path, tmp_path: Path) -> None:
    manifest = json.loads((built / "manifest.json").read_text())
    used = manifest["quantization"]["calibration"]
    assert (used["sequences"], used["lengths"], used["tokens"]) == (15, {"40": 15}, 600)
    assert used["text"] == "written by the model"
    report = BuildReport.read(built)
    assert report.section("fit") == used["fit"]
    assert 0 < used["fit"]["calibration_kld"] < 1 and used["fit"]["calibration_error"] > 0
    check = report.check("MLX alone, calibration text: KLD, mean")
    assert check is not None and check.value == pytest.approx(used["fit"]["calibration_kld"], rel=1e-4)
    windows = read_calibration_windows(built)
    assert WINDOWS.as_posix() in manifest["files"]
    assert [len(ids) for ids in windows] == [256, 256]

    shown = CliRunner().invoke(main, ["eval", str(built), "--windows", "2", "--json"], catch_exceptions=False)
    fit = json.loads(shown.stdout)["fit"]
    assert fit["calibration_kld"] == pytest.approx(used["fit"]["calibration_kld"], rel=0.02)

    (built / WINDOWS).write_text('{"schema": "1.1"}')
    with pytest.raises(InputError, match="calibration.json is damaged"):
        read_calibration_windows(built)


def test_the_alarm_is_seen(built: Path) -> None:
    report = BuildReport.read(built)
    said = Fit(0.1, 0, 0.2, 0).to_json()
    loud = replace(report, report={**report.report, "fit": said})
    text = " ".join(summary(Path("out"), loud).split())
    assert f"note: {said['alarm']}" in text and max(map(len, summary(Path("out"), loud).splitlines())) <= 80
    assert said["alarm"] in report_page(loud)
    assert "note:" not in summary(Path("out"), report)
