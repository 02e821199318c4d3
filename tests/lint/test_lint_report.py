"""Targets, grouping, the command line."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from lint_programs import Example, conv, lint, mb, of, save

from pdconvert.cli import main
from pdconvert.errors import InputError
from pdconvert.lint.report import NOTE, SHOWN, lint_path
from pdconvert.lint.rules import RULES
from pdconvert.lint.targets import CHIP_NAMES, CHIPS, read_targets

PLAIN = Example(lambda i: mb.relu(x=i["x"]))
WIDE = Example(lambda i: conv(i["x"], 17000), {"x": (1, 8, 1, 32)})
LONG = Example(lambda i: conv(i["x"]), {"x": (1, 8, 1, 17024)})
SLICED = Example(lambda i: mb.slice_by_index(x=i["x"], begin=[0, 0, 0, 8], end=[1, 64, 1, 40]))


@pytest.mark.parametrize(
    ("example", "rule", "chips"),
    [
        (WIDE, "axis-limit", ("a14", "a15", "m1")),
        (LONG, "axis-limit", ("a14", "a15", "m1", "m2", "m3")),
        (SLICED, "slice-saturation", ("a14", "m1", "m2")),
    ],
    ids=["channels", "positions", "slice"],
)
def test_a_finding_names_the_chips_that_it_concerns(
    tmp_path: Path, example: Example, rule: str, chips
) -> None:
    report = lint(example, tmp_path)
    assert {finding.chips for finding in of(report, rule)} == {chips}
    assert not report.passed


@pytest.mark.parametrize(("target", "passes"), [("m1", False), ("a17", True), ("M4", True), ("iOS18", False)])
def test_a_target_narrows_what_is_checked(tmp_path: Path, target: str, passes: bool) -> None:
    report = lint(SLICED, tmp_path, [target])
    assert report.passed == passes
    assert all(set(finding.chips) <= set(report.targets.chips) for finding in report.findings)


def test_targets() -> None:
    assert read_targets([], "iOS17") == read_targets(["iOS17", "iOS18"], "iOS16")
    assert read_targets(["m1", "A16", "ios16"], "iOS18").chips == ("a16", "m1")
    assert read_targets(["m1", "ios16"], "iOS18").systems == ("iOS16",)
    assert read_targets([], "iOS15").chips == CHIP_NAMES
    with pytest.raises(InputError, match=r"no target 'a19'; did you mean a1\d\? \(known: a14, .*iOS18\)"):
        read_targets(["a19"], "iOS18")


def test_every_fact_on_a_chip_has_a_source() -> None:
    for chip in CHIPS:
        facts = [value for value in vars(chip).values() if hasattr(value, "source")]
        assert len(facts) == 6
        assert all(len(fact.source) > 20 for fact in facts), chip.name
        assert chip.axis_limit.value <= chip.channel_limit.value


def test_equal_findings_are_one(tmp_path: Path) -> None:
    def body(inputs):
        x = inputs["x"]
        for number in range(8):
            x = mb.pow(x=x, y=np.float16(2), name=f"power_{number}")
        return mb.pow(x=x, y=np.float16(3), name="last")

    path = save(tmp_path / "x.mlpackage", {"a": Example(body), "b": Example(body)})
    found = of(lint_path(path), "pow")
    assert [(f.function, f.found, f.count) for f in found] == [
        (name, f"pow with exponent {exponent}", count)
        for name in "ab"
        for exponent, count in ((2.0, 8), (3.0, 1))
    ]
    assert [place.name for place in found[0].places] == [f"power_{number}" for number in range(SHOWN)]
    assert (found[0].places[0].op, found[0].places[0].shape) == ("pow", (1, 64, 1, 64))


def test_json(tmp_path: Path) -> None:
    path = SLICED.save(tmp_path / "x.mlpackage")
    result = CliRunner().invoke(main, ["lint", str(path), "--target", "m2", "--json"])
    answer = json.loads(result.stdout)
    assert result.exit_code == 1
    assert (answer["verdict"], answer["chips"], answer["systems"]) == ("fail", ["m2"], ["iOS18"])
    assert answer["counts"] == {"fatal": 0, "silent": 1, "perf": 0, "info": 0}
    (finding,) = answer["findings"]
    assert finding.pop("title") and finding.pop("source") and finding.pop("mend")
    assert finding == {
        "rule": "slice-saturation",
        "severity": "silent",
        "package": "x.mlpackage",
        "function": "main",
        "found": "slice_by_index of the last axis from 8",
        "chips": ["m2"],
        "systems": ["iOS18"],
        "count": 1,
        "places": [
            {
                "name": finding["places"][0]["name"],
                "op": "slice_by_index",
                "shape": [1, 64, 1, 32],
                "dtype": "fp16",
            }
        ],
    }


def test_text(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["lint", str(SLICED.save(tmp_path / "x.mlpackage"))])
    assert result.exit_code == 1
    rule = next(rule for rule in RULES if rule.id == "slice-saturation")
    lines = result.stdout.splitlines()
    assert lines[2] == f"silent  slice-saturation: {rule.title}"
    found = "main: slice_by_index of the last axis from 8 (only a14, m1, m2): "
    assert lines[3].startswith(f"  - {found}") and lines[3].endswith(" fp16 (1, 64, 1, 32)")
    assert lines[4:6] == [f"  mend: {rule.mend}", f"  source: {rule.source}"]
    assert lines[-2:] == ["fail: 1 silent", NOTE]
    clean = CliRunner().invoke(main, ["lint", str(PLAIN.save(tmp_path / "y.mlpackage"))])
    assert (clean.exit_code, clean.stdout.splitlines()[-2]) == (0, "pass: nothing found")
    assert "will run" not in clean.stdout.replace(NOTE, "")


def test_a_build_of_several_packages(tmp_path: Path) -> None:
    names = ["prefill/part_1_of_2.mlpackage", "prefill/part_2_of_2.mlpackage"]
    for name, example in zip(names, (PLAIN, SLICED), strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        example.save(tmp_path / name)
    manifest = {"schema": "1.0", "prefill": {"parts": [{"package": name} for name in names]}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    report = lint_path(tmp_path)
    assert report.packages == [tmp_path / name for name in names]
    assert [(f.rule, f.package) for f in report.findings] == [("slice-saturation", "part_2_of_2.mlpackage")]
    text = CliRunner().invoke(main, ["lint", str(tmp_path)]).stdout
    assert "\n  - part_2_of_2.mlpackage: main: slice_by_index" in text


@pytest.mark.parametrize("name", [None, 3, "../x.mlpackage", "/tmp/x.mlpackage"])
def test_a_manifest_that_names_no_package_of_the_build(tmp_path: Path, name) -> None:
    build = tmp_path / "build"
    build.mkdir()
    (build / "manifest.json").write_text(json.dumps({"schema": "1.0", "prefill": {"package": name}}))
    with pytest.raises(InputError, match=f"prefill names the package {name!r}, not one inside the build"):
        lint_path(build)


def test_bad_input(tmp_path: Path) -> None:
    (tmp_path / "model.mlmodelc").mkdir()
    broken = PLAIN.save(tmp_path / "x.mlpackage")
    model = broken / "Data" / "com.apple.CoreML" / "model.mlmodel"
    lost = conv_package(tmp_path / "lost.mlpackage")
    shutil.rmtree(lost / "Data" / "com.apple.CoreML" / "weights")
    model.write_bytes(model.read_bytes()[:-20])
    messages = {
        "none": "no such package",
        "": "is neither a build (no manifest.json) nor an .mlpackage (no Manifest.json)",
        "model.mlmodelc": "is compiled for one device",
        "x.mlpackage": "damaged",
        "lost.mlpackage": "the weight file is missing",
    }
    for name, message in messages.items():
        result = CliRunner().invoke(main, ["lint", str(tmp_path / name)])
        assert (result.exit_code, result.stdout) == (2, ""), name
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1
    result = CliRunner().invoke(main, ["lint", str(tmp_path / "x.mlpackage"), "--target", "m6"])
    assert result.exit_code == 2


def conv_package(path: Path) -> Path:
    return Example(lambda i: conv(i["x"])).save(path)


def test_it_starts_without_torch_or_coremltools(tmp_path: Path) -> None:
    path = conv_package(tmp_path / "x.mlpackage")
    code = (
        "import sys\n"
        "from pdconvert.cli import main\n"
        f"main(['lint', {str(path)!r}], standalone_mode=False)\n"
        "print([name for name in ('torch', 'coremltools', 'transformers', 'mlx') if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
