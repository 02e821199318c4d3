"""What looks around without building: inspect, list, doctor; what is not imported; shared parameters."""

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pdconvert.cli import doctor, listing, main
from pdconvert.cli.params import UserPath, table
from pdconvert.sizes import size_text

ROOT = Path(__file__).parents[1]


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, args)


def write_package(folder: Path) -> Path:
    """Write the smallest package there is: one function that gives back its input."""
    from pdconvert.executors.mil.proto import model_pb2

    model = model_pb2().Model(specificationVersion=9)
    function = model.mlProgram.functions["main"]
    function.opset = "CoreML8"
    x = function.inputs.add(name="x")
    x.type.tensorType.dataType = 10
    x.type.tensorType.dimensions.add().constant.size = 4
    function.block_specializations["CoreML8"].outputs.append("x")
    package = folder / "small.mlpackage"
    (package / "Data").mkdir(parents=True)
    (package / "Data" / "model.mlmodel").write_bytes(model.SerializeToString())
    manifest = {"rootModelIdentifier": "A", "itemInfoEntries": {"A": {"path": "model.mlmodel"}}}
    (package / "Manifest.json").write_text(json.dumps(manifest))
    return package


def test_inspect(tmp_path: Path) -> None:
    package = write_package(tmp_path)
    result = invoke("inspect", str(package))
    assert result.exit_code == 0
    assert "function main (CoreML8), 0 B of weights" in result.stdout
    assert re.search(r"input +x +fp16 +\(4\)", result.stdout)
    assert json.loads(invoke("inspect", str(package), "--json").stdout)["functions"]["main"]["ops"] == {}


def test_list_names_what_there_is() -> None:
    from passes import PASSES
    from pdconvert.recipe import shipped_recipes

    found = json.loads(invoke("list", "--json").stdout)
    assert [row["name"] for row in found["passes"]] == [item.name for item in PASSES]
    assert [row["name"] for row in found["recipes"]] == list(shipped_recipes())
    assert "llama" in [row["name"] for row in found["families"]]
    assert [row["name"] for row in found["executors"]] == ["mil", "coreml", "mlx"]
    text = invoke("list").stdout
    for rows in found.values():
        for row in rows:
            assert row["name"] in text


def test_list_shows_an_empty_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "passes", lambda: [])
    assert "passes: none" in invoke("list").stdout


PROBE = """
import sys
from click.testing import CliRunner
from pdconvert.cli import main
result = CliRunner().invoke(main, sys.argv[1:])
heavy = {"torch", "transformers", "coremltools", "mlx", "onnxruntime"} & sys.modules.keys()
print(result.exit_code, sorted(heavy))
"""


@pytest.mark.parametrize(
    "command", ["--help", "--version", "list", "inspect", "build --help", "report", "compare"]
)
def test_what_starts_without_torch(command: str, tmp_path: Path) -> None:
    committed = str(ROOT / "test_vectors" / "rotated")
    args = {
        "inspect": ["inspect", str(write_package(tmp_path))],
        "report": ["report", shutil.copytree(committed, tmp_path / "copy")],
        "compare": ["compare", committed, committed, "--out", str(tmp_path / "page.html")],
    }.get(command, command.split())
    done = subprocess.run([sys.executable, "-c", PROBE, *args], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0 []\n", "")


def test_doctor_agrees_with_the_pins() -> None:
    pins = dict(
        line.partition(";")[0].strip().split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    assert {name: pins[name] for name in doctor.TESTED} == doctor.TESTED


def test_doctor_sees_missing_and_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "gguf":
            raise PackageNotFoundError(name)
        return {"torch": "2.13.0+cpu", "numpy": "1.0"}.get(name, doctor.TESTED[name])

    def broken() -> doctor.Finding:
        raise ImportError("libmlx.so: cannot open\nshared object file")

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor, "_mlx_product", broken)
    result = invoke("doctor", "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["verdict"]) == (1, "fail")
    checks = {check["name"]: check for check in found["checks"]}
    assert checks["gguf"]["status"] == "fail"
    assert checks["gguf"]["detail"] == "pip install gguf==0.19.0"
    assert (checks["numpy"]["status"], checks["numpy"]["detail"]) == ("warn", "tested with 2.4.6")
    assert checks["torch"]["status"] == "ok"
    assert checks["mlx product"]["status"] == "fail"
    assert checks["mlx product"]["detail"] == "libmlx.so: cannot open shared object file"
    assert checks["saving packages"]["status"] == "ok"


def test_doctor_on_this_machine() -> None:
    result = invoke("doctor")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "fail" not in result.stdout


@pytest.mark.parametrize(
    ("text", "path"),
    [("~", Path.home()), ("~/x", Path.home() / "x"), ("~x", Path("~x")), ("a/~/x", Path("a/~/x"))],
)
def test_only_a_leading_tilde_is_the_home_folder(text: str, path: Path) -> None:
    assert UserPath().convert(text, None, None) == path


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1234567, "1.23 MB"),
        (10**10, "10 GB"),
        (10**16, "1e+04 TB"),
    ],
)
def test_size_text(size: int, text: str) -> None:
    assert size_text(size) == text


def test_table_aligns_numbers_right() -> None:
    assert table([("a", 1), ("bb", None)], ("x", "count")).splitlines() == [
        "x   count",
        "--  -----",
        "a       1",
        "bb      -",
    ]
