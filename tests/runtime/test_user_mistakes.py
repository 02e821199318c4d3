"""Mistakes of users of long prompts and hand-offs, on the command line: one clear line each, exit code 2."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from tiny_build import LIMIT, prompt_text, tiny_build

from pdconvert.cli import main

STORAGES = ("io", "state")


@pytest.fixture(scope="module", params=STORAGES)
def build(request, tmp_path_factory):
    return tiny_build(tmp_path_factory, storage=request.param)


def refused(*arguments: object) -> str:
    """What the command line says, without "error: "."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    (line,) = result.stderr.splitlines()
    return line.removeprefix("error: ")


@pytest.fixture
def handed(build, tmp_path):
    """A hand-off file of the build."""
    path = tmp_path / "kv.pdkv"
    result = CliRunner().invoke(
        main, ["prefill", str(build), "--prompt", prompt_text(100), "--out", str(path)]
    )
    assert result.exit_code == 0, result.output
    return path


class TestContext:
    @pytest.mark.parametrize("command", ["run", "prefill"])
    def test_a_prompt_beyond_the_functions(self, build, command, tmp_path):
        options = ["--out", tmp_path / "kv.pdkv"] if command == "prefill" else []
        assert refused(command, build, "--prompt", prompt_text(LIMIT + 1), *options) == (
            f"the prompt has {LIMIT + 1} tokens, and the functions of this build hold {LIMIT}; shorten the prompt, "
            "or build with a function that has a longer past"
        )
        assert not (tmp_path / "kv.pdkv").exists()

    def test_a_prompt_beyond_what_decodes(self, build):
        said = refused("run", build, "--prompt", prompt_text(270), "--decode", "package")
        assert said.startswith("the prompt has 270 tokens, and what decodes it holds 257; shorten it")


class TestHandOff:
    def test_of_another_model_of_the_same_form(self, handed, build, tmp_path):
        other = tmp_path / "other"
        shutil.copytree(build / "decode", other / "decode")
        manifest = json.loads((build / "manifest.json").read_text())
        manifest["hash"]["store"] = "0" * 64
        (other / "manifest.json").write_text(json.dumps(manifest))
        said = refused("decode", other, "--kv", handed)
        assert said.startswith(f"{handed}: model_hash is ")
        assert "'000000" in said

    @pytest.mark.parametrize("kept", [8, 48, 1000, -1])
    def test_that_was_cut(self, handed, build, kept):
        data = handed.read_bytes()
        handed.write_bytes(data[:kept])
        assert refused("decode", build, "--kv", handed).startswith(f"{handed} is truncated (")

    def test_that_is_something_else(self, handed, build):
        for content in (b"PK\x03\x04" + bytes(500), b""):
            handed.write_bytes(content)
            assert refused("decode", build, "--kv", handed).startswith(f"{handed}: magic is not that of a")

    def test_that_is_not_there(self, build, tmp_path):
        said = refused("decode", build, "--kv", tmp_path / "none.pdkv")
        assert said == f"No such file or directory: {tmp_path / 'none.pdkv'}"


def renamed(manifest: dict) -> None:
    functions = manifest["prefill"]["functions"]
    functions["extend_7_ctx64"] = functions.pop("extend_8_ctx64")


def without(key: str) -> Callable[[dict], None]:
    def change(manifest: dict) -> None:
        for function in manifest["prefill"]["functions"].values():
            function.pop(key, None)

    return change


class TestFunctions:
    @pytest.fixture
    def damaged(self, build, tmp_path) -> Callable[[Callable[[dict], None]], Path]:
        def make(change: Callable[[dict], None]) -> Path:
            folder = Path(shutil.copytree(build, tmp_path / "build"))
            manifest = json.loads((folder / "manifest.json").read_text())
            change(manifest)
            (folder / "manifest.json").write_text(json.dumps(manifest))
            return folder

        return make

    def test_one_that_the_package_does_not_hold(self, damaged):
        folder = damaged(renamed)
        assert refused("run", folder, "--prompt", "abc").startswith(
            f"{folder}/prefill.mlpackage: no function 'extend_7_ctx64'; it has "
        )

    def test_a_test_vector_of_one_that_is_not_there(self, damaged):
        folder = damaged(lambda manifest: None)
        index = folder / "test_vectors" / "index.json"
        content = json.loads(index.read_text())
        content["cases"][1]["function"] = "extend_7_ctx64"
        index.write_text(json.dumps(content))
        said = refused("verify", folder, "--executor", "mil")
        assert said.startswith(f"{folder}: no function 'extend_7_ctx64'; it has prefill_32, ")

    def test_states_that_the_manifest_does_not_list(self, damaged, build):
        folder = damaged(without("states"))
        if (
            "states"
            in json.loads((build / "manifest.json").read_text())["prefill"]["functions"]["prefill_32"]
        ):
            said = refused("run", folder, "--prompt", "abc")
            assert said == "extend_8_ctx64: this version cannot fill the input write (role write)"
        else:
            assert CliRunner().invoke(main, ["run", str(folder), "--prompt", "abc"]).exit_code == 0
