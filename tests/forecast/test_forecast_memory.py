"""Predicted peak memory against builds in processes of their own: this one has other tests' memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pdconvert

ROOT = Path(__file__).parents[2]


def size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "recipe",
    [
        "tiny",
        pytest.param("smollm2-135m", marks=pytest.mark.real_model),
        pytest.param("smollm2-135m-fp16", marks=pytest.mark.real_model),
    ],
)
def test_plan_of_a_whole_build(recipe, tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pdconvert", "build", recipe, "--out", str(tmp_path / "b"), "--no-cache"]
    subprocess.run(command, env=env, check=True, capture_output=True)
    found, cost = pdconvert.plan(recipe), json.loads((tmp_path / "b/manifest.json").read_text())["cost"]
    assert abs(found.memory.peak / cost["peak_bytes"] - 1) < 0.2
    assert abs(found.sizes.package / size_bytes(tmp_path / "b/prefill.mlpackage") - 1) < 0.02
    assert abs(found.sizes.decode / size_bytes(tmp_path / "b/decode") - 1) < 0.02


def test_memory_grows_with_what_it_is_made_of(tmp_path):
    tiny = pdconvert.plan("tiny").memory
    wide = pdconvert.plan("tiny", overrides=["source.random.config.vocab_size=500000"]).memory
    deep = pdconvert.plan("tiny", overrides=["source.random.config.num_hidden_layers=200"]).memory
    assert wide.peak_in == "head" and wide.stages["head"] > tiny.stages["head"] + 3 * 4 * 64 * 499_000
    assert deep.stages["replay"] > tiny.stages["replay"] + 4 * 190 * 30_000


def test_the_peak_is_that_of_the_process_itself():
    """Not of the one that started it: `ru_maxrss` counts that where it is larger."""
    code = "from pdconvert.progress import peak_bytes; print(peak_bytes())"
    small, large = (
        int(
            subprocess.run([sys.executable, "-c", started], capture_output=True, check=True, text=True).stdout
        )
        for started in (
            code,
            "import subprocess, sys; held = bytearray(10**9); held[::4096] = b'x' * len(held[::4096]);"
            f"print(subprocess.run([sys.executable, '-c', {code!r}], capture_output=True, text=True).stdout)",
        )
    )
    assert large < 1.2 * small
