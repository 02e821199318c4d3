"""Prefill into a file and decode from it, in programs and on the command line, against one run in one piece."""

import json
import shutil

import pytest
from click.testing import CliRunner
from tiny_build import assert_same_bits, prompt_text, tiny_build, tiny_prefill, token_ids

from pdconvert.cli import main
from pdconvert.runtime.layouts import LAYOUTS
from pdconvert.runtime.pdkv import read_pdkv, write_pdkv
from pdconvert.runtime.pdkv_header import Header
from pdconvert.runtime.run import run_build
from pdconvert.runtime.split_run import decode_build, prefill_build

FORMS = ["rotated", "raw"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_build(tmp_path_factory)


@pytest.mark.parametrize("form", FORMS)
class TestParted:
    """Prefill here, decode there, against the same run in one piece."""

    @pytest.fixture
    def parted(self, form, tmp_path_factory, tmp_path):
        """A build, and a copy of it which has no package."""
        folder, other = tiny_build(tmp_path_factory, form), tmp_path / "other"
        shutil.copytree(folder / "decode", other / "decode")
        shutil.copy(folder / "manifest.json", other)
        return folder, other

    def test_the_text_is_that_of_one_run(self, parted, tmp_path):
        here, there = parted
        for length in (1, 2, 33, 129, 257):
            prompt, path = prompt_text(length), tmp_path / "kv.pdkv"
            written = prefill_build(here, prompt, path, layout=LAYOUTS[length % 3])
            assert (written.header.tokens, written.header.prompt_tokens) == (length - 1, length)
            result, whole = decode_build(there, path, max_tokens=12), run_build(here, prompt, max_tokens=12)
            assert result.token_ids == whole.token_ids
            assert (result.text, result.stop_reason) == (whole.text, whole.stop_reason)
            assert result.prompt_tokens == whole.prompt_tokens

    def test_sampling_and_stream(self, parted, tmp_path):
        here, there = parted
        prefill_build(here, "hello", tmp_path / "kv.pdkv")
        options = {"max_tokens": 12, "temperature": 1.0, "top_p": 0.9, "seed": 3}
        pieces = []
        result = decode_build(there, tmp_path / "kv.pdkv", on_text=pieces.append, **options)
        assert result.token_ids == run_build(here, "hello", **options).token_ids
        assert "".join(pieces) == result.text

    def test_keys_and_values_are_those_of_the_package_to_the_bit(self, parted, tmp_path):
        prompt = prompt_text(150)
        prefill_build(parted[0], prompt, tmp_path / "kv.pdkv")
        manifest, prefill = tiny_prefill(parted[0])
        ids = [int(item) for item in prompt.encode()]
        header, kv = read_pdkv(tmp_path / "kv.pdkv", manifest)
        if header.prompt_tokens > len(ids):
            ids = [256, *ids]
        assert_same_bits(prefill.run(ids), kv)
        header.check(manifest, "kv.pdkv", ids)

    def test_more_than_one_last_token(self, parted, tmp_path):
        here, there = parted
        manifest, prefill = tiny_prefill(here)
        ids = token_ids(40)
        write_pdkv(tmp_path / "kv.pdkv", Header.of(manifest, ids, 37), prefill.extend(None, ids[:37]))
        write_pdkv(tmp_path / "all.pdkv", Header.of(manifest, ids, 39), prefill.extend(None, ids[:39]))
        three, one = (decode_build(there, tmp_path / name, max_tokens=8) for name in ("kv.pdkv", "all.pdkv"))
        assert three.token_ids == one.token_ids
        assert three.prompt_tokens == 40


class TestCommandLine:
    def invoke(self, *args):
        return CliRunner().invoke(main, [str(arg) for arg in args])

    def test_prefill_and_decode(self, folder, tmp_path):
        path, prompt = tmp_path / "kv.pdkv", prompt_text(140)
        result = self.invoke("prefill", folder, "--prompt", prompt, "--out", path, "--json")
        content = json.loads(result.stdout)
        timings = content.pop("timings")
        assert set(timings) == {"load_s", "tokenize_s", "prefill_s", "write_s"}
        assert content.pop("executors")["prefill"]["executor"] == "mil"
        assert content == {
            "path": str(path),
            "size_bytes": path.stat().st_size,
            "prompt_tokens": 140,
            "tokens": 139,
            "blocks": 2,
            "layout": "native",
        }
        decoded = json.loads(self.invoke("decode", folder, "--kv", path, "--max-tokens", 8, "--json").stdout)
        run = json.loads(self.invoke("run", folder, "--prompt", prompt, "--max-tokens", 8, "--json").stdout)
        for key in ("text", "token_ids", "prompt_tokens", "stop_reason"):
            assert decoded[key] == run[key]
        assert decoded["executors"]["prefill"] == {"executor": "file", "reason": str(path)}
        assert self.invoke("decode", folder, "--kv", path, "--max-tokens", 8).stdout == run["text"] + "\n"
        text = self.invoke("prefill", folder, "--prompt", prompt, "--out", path).stdout
        assert text == f"{path}: K and V of 139 of 140 prompt tokens, 36.3 kB\n"

    def test_mistakes(self, folder, tmp_path, tmp_path_factory):
        path = tmp_path / "kv.pdkv"
        self.invoke("prefill", folder, "--prompt", "abc", "--out", path)
        raw = tiny_build(tmp_path_factory, "raw")
        other = self.invoke("decode", raw, "--kv", path)
        assert (other.exit_code, other.stdout) == (2, "")
        assert other.stderr.startswith(f"error: {path}: key_form is 'rotated', and {raw} has 'raw'; prefill")
        path.write_bytes(path.read_bytes()[:-100])
        cut = self.invoke("decode", folder, "--kv", path)
        assert cut.exit_code == 2
        assert cut.stderr.startswith(f"error: {path} is truncated (size ")
        missing = self.invoke("decode", folder, "--kv", tmp_path / "none")
        assert (missing.exit_code, missing.stderr) == (
            2,
            f"error: No such file or directory: {tmp_path / 'none'}\n",
        )
        long = self.invoke("prefill", folder, "--prompt", "x" * 400, "--out", tmp_path / "long.pdkv")
        assert long.exit_code == 2
        assert "the prompt has 400 tokens" in long.stderr
        assert not (tmp_path / "long.pdkv").exists()
