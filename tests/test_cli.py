"""The command line: what each command calls and prints, errors, exit codes, signals."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from pdconvert import __version__
from pdconvert.cli import main
from pdconvert.cli.app import SUBCOMMANDS
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
    "decode": "mlx",
    "prefix_cache": None,
    "prefix_cache_bytes": 4_000_000_000,
}


def test_run_streams_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_build(build: Path, prompt: str, *, on_text: Any, **options: Any) -> SimpleNamespace:
        assert (build, prompt, options) == (Path("b"), "2 + 2", RUN_DEFAULTS)
        for piece in (" =", "", " 4 かな"):
            on_text(piece)
        return SimpleNamespace(stop_reason="length")

    fake_module(monkeypatch, "pdconvert.runtime.run", run_build=run_build)
    result = invoke("run", "b", "--prompt", "2 + 2")
    assert (result.exit_code, result.stdout, result.stderr) == (0, " = 4 かな\n", "")


def test_run_json_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"text": "4", "token_ids": [4], "stop_reason": "eos", "timings": {"decode": float("nan")}}
    recorder = Recorder(SimpleNamespace(to_json=lambda: answer))
    fake_module(monkeypatch, "pdconvert.runtime.run", run_build=recorder)
    options = (
        "--max-tokens 3 --temperature 1 --top-p 0.5 --top-k 7 --seed 9 --chat --executor mil --mode fp16"
        " --decode package --prefix-cache blocks --prefix-cache-mb 5"
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
        "decode": "package",
        "prefix_cache": Path("blocks"),
        "prefix_cache_bytes": 5_000_000,
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


def test_help_and_version() -> None:
    text = invoke("--help").stdout
    commands = re.findall(r"^  (\w+)  +[A-Z]", text.split("Commands:")[1], re.MULTILINE)
    assert commands == [command.name for command in SUBCOMMANDS]
    assert {"build", "run", "verify", "inspect", "exec", "lint", "list", "doctor"} <= set(commands)
    assert invoke("--version").stdout == f"pdconvert, version {__version__}\n"
    for command in SUBCOMMANDS:
        inner = [[name] for name in command.commands] if isinstance(command, click.Group) else [[]]
        for names in inner:
            assert "--json" in invoke(str(command.name), *names, "--help").stdout, (command.name, names)


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
