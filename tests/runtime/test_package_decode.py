"""Decoding with the package alone: the tokens of the MLX path, the right function, a context that ends."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from tiny_build import LIMIT, prompt_text, tiny_build, tiny_prefill, token_ids

from pdconvert.cli import main
from pdconvert.errors import InputError
from pdconvert.executors.mlx import DecodeModel
from pdconvert.runtime.manifest import Function, Port
from pdconvert.runtime.package_decode import PackageDecoder, decode_functions
from pdconvert.runtime.prefill import Prefill
from pdconvert.runtime.run import run_build

NEAR_TIE = 0.01
"""The logits of this model lie closer together than those of a real one, for which it is 0.05."""
CONTEXT = 257
FORMS = [("rotated", "none"), ("raw", "none"), ("rotated", "w8a16")]


def open_decoder(folder):
    manifest, prefill = tiny_prefill(folder)
    return PackageDecoder(prefill, decode_functions(manifest.functions.values()), {"executor": "mil"})


@pytest.fixture(scope="module", params=FORMS, ids="-".join)
def pair(request, tmp_path_factory):
    """A build, its package as a decoder, and its MLX weights."""
    folder = tiny_build(tmp_path_factory, *request.param)
    return folder, open_decoder(folder), DecodeModel.load(folder / "decode", "dequantized")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_build(tmp_path_factory)


@pytest.mark.parametrize("length", [1, 2, 33, 64, 65, 66, 200])
def test_the_tokens_are_those_of_the_mlx_path(pair, length):
    _, decoder, model = pair
    ids = token_ids(length)
    kv = decoder.prefill.run(ids)
    following = token_ids(12, seed=1)
    fed = [ids[-1], *following]
    ours = decoder.logits(fed, decoder.new_cache(kv))
    theirs = model.logits(fed, model.new_cache(kv))
    assert ours.shape == theirs.shape == (13, 320)
    assert ours.dtype == np.float32
    best = np.sort(theirs)[:, -2:]
    counts = best[:, 1] - best[:, 0] >= NEAR_TIE
    assert counts.sum() >= 8
    np.testing.assert_array_equal(ours.argmax(-1)[counts], theirs.argmax(-1)[counts])
    np.testing.assert_allclose(ours, theirs, atol=0.002)


def test_the_text_is_that_of_the_mlx_path(pair):
    folder, _, _ = pair
    for length in (1, 40, 63):
        mlx, package = (
            run_build(folder, prompt_text(length), max_tokens=16, decode=decode)
            for decode in ("mlx", "package")
        )
        assert package.token_ids == mlx.token_ids
        assert package.text == mlx.text
        assert (package.stop_reason, package.prompt_tokens) == (mlx.stop_reason, mlx.prompt_tokens)


def test_each_token_takes_the_shortest_past_that_holds_what_came_before(folder):
    decoder = open_decoder(folder)
    used = []
    call = decoder.prefill.call

    def spy(function, ids, past):
        used.append((past.length, function.name))
        return call(function, ids, past)

    decoder.prefill.call = spy
    for length in (1, 64, 65, 66, 257):
        ids = token_ids(length)
        cache = decoder.new_cache(decoder.prefill.run(ids), capacity=300)
        used.clear()
        decoder.logits(ids[-1:], cache)
        assert used == [(length - 1, "decode_1_ctx64" if length <= 65 else "decode_1_ctx256")]


def test_what_lies_behind_the_tokens_in_the_past_does_not_matter(folder):
    decoder = open_decoder(folder)
    ids = token_ids(50)
    kv = decoder.prefill.run(ids)
    plain, poisoned = decoder.new_cache(kv, capacity=256), decoder.new_cache(kv, capacity=256)
    for buffer in (poisoned.graph_keys, poisoned.graph_values):
        buffer[..., poisoned.length :] = 100
    np.testing.assert_array_equal(decoder.logits(ids[-1:], plain), decoder.logits(ids[-1:], poisoned))


def test_decoding_leaves_the_given_block_alone(folder):
    decoder = open_decoder(folder)
    kv = decoder.prefill.run(token_ids(40))
    before = [array.copy() for array in (*kv.keys, *kv.values)]
    first = decoder.logits([1, 2, 3], decoder.new_cache(kv))
    for old, now in zip(before, (*kv.keys, *kv.values), strict=True):
        np.testing.assert_array_equal(old, now)
    np.testing.assert_array_equal(decoder.logits([1, 2, 3], decoder.new_cache(kv)), first)


class TestContext:
    @pytest.mark.parametrize(("length", "left"), [(250, 8), (256, 2), (257, 1)])
    def test_a_full_context_stops_the_text_and_says_so(self, folder, length, left):
        prompt = prompt_text(length)
        result = run_build(folder, prompt, max_tokens=20, decode="package")
        assert (result.stop_reason, len(result.token_ids)) == ("context", left)
        assert result.token_ids == run_build(folder, prompt, max_tokens=left).token_ids
        exact = run_build(folder, prompt, max_tokens=left, decode="package")
        assert (exact.stop_reason, exact.token_ids) == ("length", result.token_ids)

    def test_a_prompt_beyond_it_is_refused_before_it_is_prefilled(self, folder, monkeypatch):
        message = f"^the prompt has 258 tokens, and what decodes it holds {CONTEXT}; shorten"
        assert run_build(folder, prompt_text(LIMIT), max_tokens=1).prompt_tokens == LIMIT
        monkeypatch.setattr(Prefill, "run", None)
        with pytest.raises(InputError, match=message):
            run_build(folder, prompt_text(258), decode="package")

    def test_a_step_beyond_it_is_refused_rather_than_wrong(self, folder):
        decoder = open_decoder(folder)
        cache = decoder.new_cache(decoder.prefill.run(token_ids(257)))
        decoder.logits([1], cache)
        with pytest.raises(InputError, match="^the context is full: decode_1_ctx256 holds 257 tokens"):
            decoder.logits([1], cache)
        assert cache.length == CONTEXT

    def test_the_command_line_says_so(self, folder):
        arguments = ["run", str(folder), "--prompt", prompt_text(256), "--decode", "package"]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0
        assert result.stderr == "stopped: the decoding functions of this build hold no more tokens\n"
        content = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)
        assert content["stop_reason"] == "context"
        assert len(content["token_ids"]) == 2


class TestSampling:
    OPTIONS = {"max_tokens": 12, "temperature": 1.0, "top_p": 0.9, "top_k": 20, "decode": "package"}

    def test_the_seed_decides_the_text(self, folder):
        texts = [run_build(folder, "abc", seed=seed, **self.OPTIONS).token_ids for seed in (1, 2, 1)]
        assert texts[0] == texts[2] != texts[1]

    def test_it_is_that_of_the_mlx_path(self, folder):
        package = run_build(folder, "abc", seed=5, **self.OPTIONS)
        mlx = run_build(folder, "abc", seed=5, **{**self.OPTIONS, "decode": "mlx"})
        assert package.token_ids == mlx.token_ids

    def test_an_eos_stops(self, folder):
        path = folder / "decode" / "generation_config.json"
        first = run_build(folder, "cd", max_tokens=3, decode="package")
        before = path.read_text() if path.exists() else None
        path.write_text(json.dumps({"eos_token_id": first.token_ids[1]}))
        try:
            second = run_build(folder, "cd", max_tokens=3, decode="package")
        finally:
            path.unlink() if before is None else path.write_text(before)
        assert second.stop_reason == "eos"
        assert second.token_ids == first.token_ids[: first.token_ids.index(first.token_ids[1])]


def function(tokens, past, *outputs):
    ports = tuple(Port(name, name, (), "fp16") for name in ("k", "v", *outputs))
    return Function(f"f_{tokens}_{past}", tokens, past, (), ports)


@pytest.mark.parametrize(
    ("functions", "todo"),
    [
        (
            [function(128, 0)],
            "add {tokens: 1, past: 512} to prefill.functions and set prefill.outputs to logits",
        ),
        (
            [function(128, 0), function(128, 2048)],
            "add {tokens: 1, past: 2048} to prefill.functions and set prefill.outputs to logits",
        ),
        ([function(128, 0, "logits")], "add {tokens: 1, past: 512} to prefill.functions"),
        ([function(128, 0), function(1, 512)], "set prefill.outputs to logits"),
    ],
)
def test_a_package_that_cannot_decode_names_what_its_recipe_needs(functions, todo):
    with pytest.raises(InputError) as caught:
        decode_functions(functions)
    assert str(caught.value) == (
        f"the package of this build cannot decode: in its recipe, {todo}, and build again; or decode with MLX"
    )


def test_it_is_refused_before_anything_is_loaded(folder, tmp_path):
    (tmp_path / "decode").mkdir()
    content = json.loads((folder / "manifest.json").read_text())
    content["prefill"]["functions"] = {"prefill_32": content["prefill"]["functions"]["prefill_32"]}
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    result = CliRunner().invoke(main, ["run", str(tmp_path), "--prompt", "a", "--decode", "package"])
    assert result.exit_code == 2
    assert "error: the package of this build cannot decode: in its recipe, add {tokens: 1" in result.stderr


def test_logits_of_another_vocabulary_are_refused(folder):
    decoder = open_decoder(folder)
    decoder.prefill.manifest = replace(decoder.prefill.manifest, vocab_size=319)
    with pytest.raises(
        InputError, match="^decode_1_ctx64: logits has 320 values, and the vocabulary has 319$"
    ):
        decoder.logits([1], decoder.new_cache())


def test_it_says_what_decodes_and_needs_no_mlx(folder, monkeypatch):
    for name in ("mlx", "mlx.core", "mlx_lm", "mlx_lm.models", "mlx_lm.models.cache", "mlx_lm.utils"):
        monkeypatch.setitem(sys.modules, name, None)
    result = run_build(folder, "abc", max_tokens=2, decode="package", executor="mil")
    assert result.executors["decode"] == {
        "executor": "mil",
        "reason": "asked for",
        "mode": "fp32",
        "functions": "decode_1_ctx64, decode_1_ctx256",
    }
    with pytest.raises(ImportError):
        run_build(folder, "abc", max_tokens=2)
