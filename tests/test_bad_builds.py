"""Damaged build folders through the real command line: what `run`, `verify` and `inspect` say.

In an expected message `{}` is the build's folder and … stands for anything.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import Change, content, gone, json_file, refusal, says, surroundings
from safetensors.numpy import load_file, save_file

from pdconvert.pipeline import build
from pdconvert.recipe import load_recipe
from pdconvert.schema import SCHEMA

__all__ = ["surroundings"]

PACKAGE = "prefill.mlpackage"
MODEL = f"{PACKAGE}/Data/com.apple.CoreML/model.mlmodel"
BLOB = f"{PACKAGE}/Data/com.apple.CoreML/weights/weight.bin"
WEIGHTS = "decode/model.safetensors"
INPUTS, EXPECTED = (f"test_vectors/prefill_128.{part}.safetensors" for part in ("inputs", "expected"))

Case = tuple[str, Change, str]
"""The commands that refuse, what is wrong, and what they say."""


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole build, not to be changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDCONVERT_CACHE", str(tmp_path_factory.mktemp("cache")))
        folder = tmp_path_factory.mktemp("intact") / "build"
        assert build(load_recipe("tiny"), folder).verdict == "pass"
    return folder


def remove(name: str) -> Change:
    return lambda folder: shutil.rmtree(folder / name)


def manifest(path: str, value: Any) -> Change:
    """Set a field of the manifest, by its dotted path."""

    def change(data: dict) -> dict:
        *outer, last = path.split(".")
        inner = data
        for name in outer:
            inner = inner[name]
        inner[last] = value
        return data

    return json_file("manifest.json", change)


def quantization(**changes: Any) -> Change:
    return json_file(
        "decode/config.json", lambda data: data | {"quantization": data["quantization"] | changes}
    )


def case(**changes: Any) -> Change:
    """Set fields of the first test vector."""
    return json_file("test_vectors/index.json", lambda data: data | {"cases": [data["cases"][0] | changes]})


def arrays(name: str, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Change:
    return lambda folder: save_file(change(load_file(folder / name)), folder / name)


ALL = "run verify inspect"
BUILDS: dict[str, Case] = {
    "no manifest": ("run verify", gone("manifest.json"), "{} is not a build: it has no manifest.json"),
    "neither build nor package": (
        "inspect",
        gone("manifest.json"),
        "{} is neither a build (no manifest.json) nor an .mlpackage (no Manifest.json)",
    ),
    "no folder": ("run verify", remove("."), "{} is not a build: it has no manifest.json"),
    "no folder to look into": ("inspect", remove("."), "{}: no such package; …"),
    "an empty manifest": (
        ALL,
        content("manifest.json", b""),
        "{}/manifest.json: not JSON (…); build it again …",
    ),
    "another manifest": (
        ALL,
        content("manifest.json", b'{"name": "web app"}'),
        "{}/manifest.json: no schema version; it was not written by pdconvert",
    ),
    "a newer schema": (
        ALL,
        manifest("schema", "2.0"),
        f"{{}}/manifest.json: schema 2.0 is newer than {SCHEMA}; use a newer pdconvert",
    ),
    "a path out of the build": (
        "run verify",
        manifest("prefill.package", "../other.mlpackage"),
        "{}/manifest.json: path '../other.mlpackage' leads out of the build folder; build again",
    ),
    "a path out of the build, to look at": (
        "inspect",
        manifest("prefill.package", "../other.mlpackage"),
        "{}/manifest.json: …'../other.mlpackage'…; build it again",
    ),
    "an absolute path": (
        "run verify",
        manifest("prefill.package", "/tmp"),
        "{}/manifest.json: path '/tmp' leads out of the build folder; build again",
    ),
    "a field of another type": (
        "run verify",
        manifest("rope.inv_freq", ["x"]),
        "{}/manifest.json: rope.inv_freq is \"['x']\", expected a list of numbers; build again",
    ),
    "another function": (
        "run verify",
        manifest(
            "prefill.functions", {"x": {"sequence_length": 8, "past_length": 0, "inputs": [], "outputs": []}}
        ),
        "{}/prefill.mlpackage: no function 'x'; it has prefill_128",
    ),
    "no package": (ALL, remove(PACKAGE), "{}/prefill.mlpackage: no such package; …"),
    "no model": (ALL, gone(MODEL), f"{{}}/{MODEL}: the model file is missing; the package is incomplete"),
    "half a model": (
        ALL,
        content(MODEL, lambda data: data[: len(data) // 2]),
        f"{{}}/{MODEL}: not a Core ML model, or damaged (…)",
    ),
    "no weight file": (ALL, gone(BLOB), "…weight.bin… is missing…"),
    "half a weight file": (
        "run verify",
        content(BLOB, lambda data: data[: len(data) // 2]),
        "…weight.bin: …",
    ),
    "no decode folder": ("run verify inspect", remove("decode"), "{}/decode/config.json is missing; …"),
    "no decode weights": ("run verify", gone(WEIGHTS), "{}/decode holds no model*.safetensors; build again"),
    "cut decode weights": (
        "run verify inspect",
        content(WEIGHTS, lambda data: data[:-100]),
        "{}/decode/model.safetensors…: … ends at byte …",
    ),
    "another group size": (
        "run",
        quantization(group_size=32),
        "{}/decode/config.json: quantization: model.embed_tokens has …, which 8 bits in groups of 32 do not give; …",
    ),
    "bits that are null": (
        "run",
        quantization(bits=None),
        "{}/decode/config.json: quantization.bits of model.embed_tokens is None, expected one of …; build again",
    ),
    "no test vectors": (
        "verify",
        gone("test_vectors/index.json"),
        "{}/test_vectors/index.json is missing; build again",
    ),
    "newer test vectors": (
        "verify",
        json_file("test_vectors/index.json", lambda data: data | {"schema": "2.0"}),
        f"{{}}/test_vectors/index.json: schema 2.0 is newer than {SCHEMA}; use a newer pdconvert",
    ),
    "a test vector out of the folder": (
        "verify",
        case(inputs="../../secret"),
        "{}/test_vectors/index.json: path '../../secret' leads out of the folder; build again",
    ),
    "a cut test vector": (
        "verify",
        content(EXPECTED, lambda data: data[:-20]),
        f"{{}}/{EXPECTED}: damaged (…); build again",
    ),
    "an input that is missing": (
        "verify",
        arrays(INPUTS, lambda values: {name: value for name, value in values.items() if name != "mask"}),
        "{}/prefill.mlpackage: function prefill_128: input 'mask' is missing; …",
    ),
    "no tokenizer": ("run", gone("decode/tokenizer.json"), "{}/decode: its tokenizer cannot be loaded: …"),
}

COMMANDS = {
    "run": ("run", "{}", "--prompt", "hello", "--max-tokens", "2"),
    "verify": ("verify", "{}"),
    "inspect": ("inspect", "{}"),
}
CASES = {
    f"{command}: {name}": (command, change, expected)
    for name, (commands, change, expected) in BUILDS.items()
    for command in commands.split()
}


@pytest.mark.parametrize(("command", "change", "expected"), CASES.values(), ids=CASES)
def test_a_damaged_build_is_refused(
    intact: Path, tmp_path: Path, own_cache: Path, command: str, change: Change, expected: str
) -> None:
    damaged = shutil.copytree(intact, tmp_path / "b")
    change(damaged)
    args = [part.format(damaged) for part in COMMANDS[command]]
    said = refusal(args, tmp_path, own_cache)
    assert says(said, expected.replace("{}", str(damaged))), said


PROMPTS: dict[str, tuple[list[str], bytes, str]] = {
    "empty": (["--prompt", ""], b"", "the prompt is empty; give at least one character with --prompt"),
    "empty on stdin": (["--prompt", "-"], b"", "the prompt is empty; …"),
    "not UTF-8 on stdin": (
        ["--prompt", "-"],
        b"\xff\xfe",
        "--prompt -: stdin is not UTF-8 text (byte 0); give it as UTF-8",
    ),
    "not UTF-8": (["--prompt", "\udcff"], b"", "the prompt holds bytes that are not UTF-8; …"),
    "longer than the functions hold": (["--prompt", "a" * 129], b"", "the prompt has 129 tokens, and …128…"),
    "a chat without a template": (
        ["--prompt", "a", "--chat"],
        b"",
        "{}/decode: the model has no chat template; run it without --chat",
    ),
    "a temperature that is none": (["--prompt", "a", "--temperature", "nan"], b"", "temperature is nan, …"),
}


@pytest.mark.parametrize(("options", "stdin", "expected"), PROMPTS.values(), ids=PROMPTS)
def test_a_bad_prompt_is_refused(
    intact: Path, tmp_path: Path, own_cache: Path, options: list[str], stdin: bytes, expected: str
) -> None:
    said = refusal(["run", str(intact), *options], tmp_path, own_cache, stdin=stdin)
    assert says(said, expected.replace("{}", str(intact))), said
