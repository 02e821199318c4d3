"""The command line: what each command calls and prints, exit codes, and what is not imported."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pdconvert import __version__
from pdconvert.cli import doctor, listing, main
from pdconvert.cli.params import UserPath, size_text, table
from pdconvert.errors import CheckFailed, InputError
from pdconvert.progress import Progress

ROOT = Path(__file__).parents[1]


def invoke(*args: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, args, input=stdin)


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    """Put a module in place of a real one, so that a test of the command line runs nothing heavy."""
    module = ModuleType(name)
    for key, value in functions.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


class Recorder:
    """A function that remembers how it was called."""

    def __init__(self, result: Any = None, error: BaseException | None = None) -> None:
        self.result, self.error = result, error
        self.args: tuple = ()
        self.kwargs: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.args, self.kwargs = args, kwargs
        if self.error is not None:
            raise self.error
        return self.result


@pytest.fixture(autouse=True)
def quiet_logging() -> Any:
    """`--debug` sets levels for the process: put them back."""
    names = ["pdconvert", "coremltools", "torch", "transformers"]
    levels = {name: logging.getLogger(name).level for name in names}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recorder:
    """The pipeline's `build`, replaced; the working directory is a temporary one."""
    monkeypatch.chdir(tmp_path)
    recorder = Recorder(SimpleNamespace(path=Path("build/tiny"), verdict="pass", summary="the ledger"))
    fake_module(monkeypatch, "pdconvert.pipeline", build=recorder)
    return recorder


def test_build_passes_the_recipe_on(build: Recorder) -> None:
    result = invoke("build", "tiny", "--set", "prefill.kv.rope=raw", "--force", "--no-cache")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "the ledger\npass: build/tiny\n"
    recipe, out = build.args
    assert (recipe.name, recipe.prefill.kv.rope, out) == ("tiny", "raw", Path("build/tiny"))
    assert build.kwargs["force"] is True
    assert build.kwargs["use_cache"] is False
    assert isinstance(build.kwargs["progress"], Progress)


def test_build_json_is_one_object(build: Recorder) -> None:
    result = invoke("build", "tiny", "--out", "some where", "--json")
    assert json.loads(result.stdout) == {"path": "build/tiny", "verdict": "pass", "summary": "the ledger"}
    assert build.args[1] == Path("some where")


def test_a_failed_gate_is_exit_1(build: Recorder) -> None:
    build.result.verdict = "fail"
    result = invoke("build", "tiny")
    assert result.exit_code == 1
    assert result.stdout.endswith("fail: build/tiny\n")


def test_build_refuses_its_output_before_the_work(build: Recorder, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    result = invoke("build", "tiny", "--out", ".", "--force")
    assert result.exit_code == 2
    assert result.stderr == (
        "error: . holds files that pdconvert did not write (notes.txt); choose another --out\n"
    )
    assert build.args == ()


def test_dry_run_prints_a_recipe_that_loads_again(build: Recorder, tmp_path: Path) -> None:
    result = invoke("build", "tiny", "--set", "prefill.kv.rope=raw", "--dry-run")
    assert result.exit_code == 0
    (tmp_path / "again.yaml").write_text(result.stdout)
    again = invoke("build", "again.yaml", "--dry-run")
    assert again.stdout == result.stdout
    assert "rope: raw" in result.stdout
    assert json.loads(invoke("build", "tiny", "--dry-run", "--json").stdout)["name"] == "tiny"
    assert build.args == ()


@pytest.mark.parametrize(
    ("error", "code", "stderr"),
    [
        (InputError("no such file: x; check the path"), 2, "error: no such file: x; check the path\n"),
        (CheckFailed("SQNR 3 dB of layers.0"), 1, "error: SQNR 3 dB of layers.0\n"),
        (OSError(28, "No space left on device", "a/b"), 2, "error: No space left on device: a/b\n"),
        (PermissionError(13, "Permission denied", "a"), 2, "error: Permission denied: a\n"),
        (
            ZeroDivisionError("one\n  two"),
            70,
            "internal error: ZeroDivisionError: one two "
            "(run it again as `pdconvert --debug ...` for the traceback)\n",
        ),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (SystemExit(143), 143, ""),
    ],
)
def test_errors_are_one_line_with_an_exit_code(
    build: Recorder, error: BaseException, code: int, stderr: str
) -> None:
    build.error = error
    result = invoke("build", "tiny")
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", stderr)


def test_notes_of_an_error_are_its_second_line(build: Recorder) -> None:
    build.error = CheckFailed("SQNR 3 dB")
    build.error.add_note("in pass safe_rms_norm of layers.0")
    build.error.add_note("try method: row_max")
    stderr = "error: SQNR 3 dB\n  in pass safe_rms_norm of layers.0; try method: row_max\n"
    assert invoke("build", "tiny").stderr == stderr


def test_debug_adds_the_traceback(build: Recorder) -> None:
    build.error = ValueError("x")
    result = invoke("--debug", "build", "tiny")
    assert result.exit_code == 70
    assert result.stderr.startswith("Traceback (most recent call last):\n")
    assert result.stderr.endswith("ValueError: x\ninternal error: ValueError: x\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nope"], "No such command 'nope'. See `pdconvert --help`."),
        (["--nope"], "No such option '--nope'. See `pdconvert --help`."),
        (["build"], "Missing argument 'RECIPE'. See `pdconvert build --help`."),
        (["run", "x"], "Missing option '--prompt'. See `pdconvert run --help`."),
        (["verify", ""], "Invalid value for 'BUILD': the path is empty See `pdconvert verify --help`."),
    ],
)
def test_usage_errors_are_one_line(args: list[str], message: str) -> None:
    result = CliRunner().invoke(main, args, prog_name="pdconvert")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: {message}\n"


def test_without_a_command_it_shows_help() -> None:
    result = invoke()
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Commands:" in result.stderr


def test_an_unknown_recipe_is_bad_input(build: Recorder) -> None:
    result = invoke("build", "tinny")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: tinny: no such recipe")
    assert len(result.stderr.splitlines()) == 1


RUN_DEFAULTS = {
    "max_tokens": 128,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "seed": 0,
    "chat": False,
    "executor": "auto",
    "mode": "fp32",
    "compute_units": "cpu_and_ne",
}


def test_run_streams_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_build(build: Path, prompt: str, *, on_text: Any, **options: Any) -> None:
        assert (build, prompt, options) == (Path("b"), "2 + 2", RUN_DEFAULTS)
        for piece in (" =", "", " 4 かな"):
            on_text(piece)

    fake_module(monkeypatch, "pdconvert.runtime.run", run_build=run_build)
    result = invoke("run", "b", "--prompt", "2 + 2")
    assert (result.exit_code, result.stdout, result.stderr) == (0, " = 4 かな\n", "")


def test_run_json_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"text": "4", "token_ids": [4], "stop_reason": "eos", "timings": {"decode": float("nan")}}
    recorder = Recorder(SimpleNamespace(to_json=lambda: answer))
    fake_module(monkeypatch, "pdconvert.runtime.run", run_build=recorder)
    options = (
        "--max-tokens 3 --temperature 1 --top-p 0.5 --top-k 7 --seed 9 --chat --executor mil --mode fp16"
    )
    result = invoke("run", "b", "--prompt", "-", "--json", *options.split(), stdin="from stdin")
    assert json.loads(result.stdout) == {**answer, "timings": {"decode": None}}
    assert recorder.args[1] == "from stdin"
    assert recorder.kwargs == {
        "max_tokens": 3,
        "temperature": 1.0,
        "top_p": 0.5,
        "top_k": 7,
        "seed": 9,
        "chat": True,
        "executor": "mil",
        "mode": "fp16",
        "compute_units": "cpu_and_ne",
        "on_text": None,
    }


@pytest.mark.parametrize(
    "option", ["--max-tokens=0", "--temperature=-1", "--top-p=0", "--top-p=1.1", "--top-k=-1", "--mode=fp8"]
)
def test_run_refuses_values_out_of_range(option: str) -> None:
    result = invoke("run", "b", "--prompt", "x", option)
    assert result.exit_code == 2
    assert option.split("=")[0] in result.stderr


def report(passed: bool) -> dict[str, Any]:
    checks = [
        {"name": "prefill_128 k", "metric": "sqnr_db", "value": 48.123456, "floor": 40.0, "passed": passed},
        {"name": "tokens", "metric": "equal", "value": 16, "floor": None, "passed": True},
    ]
    return {"verdict": "pass" if passed else "fail", "checks": checks}


@pytest.mark.parametrize(("passed", "code", "word"), [(True, 0, "pass"), (False, 1, "FAIL")])
def test_verify(monkeypatch: pytest.MonkeyPatch, passed: bool, code: int, word: str) -> None:
    recorder = Recorder(report(passed))
    fake_module(monkeypatch, "pdconvert.verify", verify_build=recorder)
    result = invoke("verify", "b", "--executor", "mil")
    assert result.exit_code == code
    assert re.search(rf"prefill_128 k +sqnr_db +48.12 +40 +{word}\n", result.stdout)
    assert (recorder.args, recorder.kwargs) == ((Path("b"),), {"executor": "mil"})
    result = invoke("verify", "b", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (code, report(passed))


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


@pytest.mark.parametrize("command", ["--help", "--version", "list", "inspect", "build --help"])
def test_what_starts_without_torch(command: str, tmp_path: Path) -> None:
    args = ["inspect", str(write_package(tmp_path))] if command == "inspect" else command.split()
    done = subprocess.run([sys.executable, "-c", PROBE, *args], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0 []\n", "")


def test_help_and_version() -> None:
    text = invoke("--help").stdout
    commands = re.findall(r"^  (\w+)  +[A-Z]", text.split("Commands:")[1], re.MULTILINE)
    assert commands == ["build", "run", "verify", "inspect", "list", "doctor"]
    assert invoke("--version").stdout == f"pdconvert, version {__version__}\n"
    for command in commands:
        assert "--json" in invoke(command, "--help").stdout, command


def start(*args: str, **options: Any) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *args],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


SLOW_RUN = """
import sys, time
from types import ModuleType
from pdconvert.cli import main
module = ModuleType("pdconvert.runtime.run")
def run_build(*args, on_text, **options):
    on_text("ready\\n")
    sys.stdout.flush()
    time.sleep(60)
module.run_build = run_build
sys.modules["pdconvert.runtime.run"] = module
main(["run", "b", "--prompt", "x"], prog_name="pdconvert")
"""


@pytest.mark.parametrize(
    ("sent", "code", "stderr"), [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "")]
)
def test_signals(sent: signal.Signals, code: int, stderr: str) -> None:
    child = start("-c", SLOW_RUN)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(sent)
    _, error = child.communicate(timeout=10)
    assert (child.returncode, error) == (code, stderr)


def test_a_reader_that_goes_away() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    child = subprocess.run(
        [sys.executable, "-m", "pdconvert", "list"],
        cwd=ROOT,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert (child.returncode, child.stderr) == (141, "")


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


class Terminal:
    """A stream that says it is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def test_progress_is_silent_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    with progress.stage("compile"):
        assert list(progress.bar(range(3), "layers")) == [0, 1, 2]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("no_color", "escapes"), [("", True), ("1", False)])
def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch, no_color: str, escapes: bool) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress = Progress(stream)  # type: ignore[arg-type]
    with progress.stage("compile"):
        for _ in progress.bar(range(2), "layers", unit="layer"):
            time.sleep(0.12)
    assert "compile ..." in stream.text
    assert re.search(r"compile: 0\.\d s", stream.text)
    assert "layers" in stream.text
    assert ("\x1b[2m" in stream.text) is escapes
