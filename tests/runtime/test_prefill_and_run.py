"""Prompts through a stand-in for the package, the hand-off and MLX; the whole of `run_build`."""

import json
import shutil

import numpy as np
import pytest
import torch
from tiny_pair import EOS, HfSession, hf_greedy, hf_keys_values, hf_logits, manifest_of

from pdconvert.errors import CheckFailed, InputError
from pdconvert.executors.mlx import DecodeModel
from pdconvert.measure import sqnr_db
from pdconvert.runtime.embedding import HostEmbedding
from pdconvert.runtime.generate import Sampling
from pdconvert.runtime.manifest import read_manifest
from pdconvert.runtime.prefill import Prefill
from pdconvert.runtime.run import run_build
from pdconvert.runtime.weights import DecodeWeights

FORMS = ["rotated", "raw"]


def make_build(folder, tiny, form="rotated", tokens=(128,), **changes):
    folder.mkdir(exist_ok=True)
    shutil.copytree(tiny.decode, folder / "decode")
    (folder / "manifest.json").write_text(json.dumps(manifest_of(tiny, form, tokens) | changes))
    return folder


@pytest.fixture(scope="module", params=FORMS)
def build(request, tmp_path_factory, w8):
    return make_build(tmp_path_factory.mktemp("build") / request.param, w8, request.param)


def open_prefill(build, session):
    manifest = read_manifest(build)
    return Prefill(manifest, HostEmbedding(DecodeWeights(manifest.decode)), lambda function: session)


def prompt(length):
    return np.random.default_rng(length).integers(0, 320, length).tolist()


@pytest.mark.parametrize("length", [2, 3, 64, 127, 128])
def test_keys_and_values_equal_hugging_face(build, w8, length):
    ids = prompt(length)
    session = HfSession(w8.hf, read_manifest(build).key_form)
    kv = open_prefill(build, session).run(ids)
    assert kv.tokens == length - 1
    assert kv.form == session.form
    hidden = w8.hf.model.embed_tokens(torch.tensor([ids[:-1]]))
    rope = w8.hf.model.rotary_emb(hidden, torch.arange(length - 1)[None])
    mask = torch.full((length - 1, length - 1), -torch.inf).triu(1)[None, None]
    for layer, (raw, rotated, values) in enumerate(hf_keys_values(w8.hf, hidden, rope, mask)):
        keys = raw if kv.form == "raw" else rotated
        assert sqnr_db(keys, torch.from_numpy(kv.keys[layer])) > 60
        assert sqnr_db(values, torch.from_numpy(kv.values[layer])) > 60


@pytest.mark.parametrize("length", [1, 2, 40, 128])
def test_the_pair_equals_hugging_face_teacher_forced(build, w8, length):
    ids = prompt(length)
    prefill = open_prefill(build, HfSession(w8.hf, read_manifest(build).key_form))
    model = DecodeModel.load(build / "decode", "dequantized")
    following = hf_greedy(w8.hf, ids, 16)
    expected = hf_logits(w8.hf, [*ids, *following[:-1]])[-16:]
    found = model.logits([ids[-1], *following[:-1]], model.new_cache(prefill.run(ids)))
    assert sqnr_db(torch.from_numpy(expected), torch.from_numpy(found)) > 50
    best = np.sort(expected)[:, -2:]
    counts = best[:, 1] - best[:, 0] > 0.05
    np.testing.assert_array_equal(found.argmax(-1)[counts], np.array(following)[counts])


def test_what_padding_holds_does_not_matter(w8, build):
    class Poisoned(HfSession):
        def run(self, inputs):
            hidden = inputs["hidden"].copy()
            hidden[..., 9:] = np.random.default_rng(1).standard_normal(hidden[..., 9:].shape)
            return super().run({**inputs, "hidden": hidden})

    form = read_manifest(build).key_form
    plain, poisoned = (
        open_prefill(build, kind(w8.hf, form)).run(prompt(10)) for kind in (HfSession, Poisoned)
    )
    for name in ("keys", "values"):
        for a, b in zip(getattr(plain, name), getattr(poisoned, name), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


def test_the_smallest_function_runs_and_is_opened_once(tmp_path, w8):
    build = make_build(tmp_path / "build", w8, tokens=(16, 128))
    manifest, opened = read_manifest(build), []

    def open_session(function):
        opened.append(function.name)
        return HfSession(w8.hf, "rotated")

    prefill = Prefill(manifest, HostEmbedding(DecodeWeights(manifest.decode)), open_session)
    for length in (2, 17, 18, 128, 5):
        prefill.run(prompt(length))
    assert opened == ["prefill_16", "prefill_128"]


def test_one_token_needs_no_prefill(build):
    assert open_prefill(build, None).run([5]) is None


def test_prompts_that_are_too_long_name_the_limit(build):
    message = "the prompt has 129 tokens, and the functions of this build hold 128; shorten the prompt"
    with pytest.raises(InputError, match=f"^{message}"):
        open_prefill(build, None).run(prompt(129))
    with pytest.raises(InputError, match="^the prompt is empty"):
        open_prefill(build, None).run([])


@pytest.mark.parametrize("ids", [[320], [1, 320], [320, 1], [-1, 2]])
def test_token_ids_outside_the_vocabulary_are_refused(build, ids):
    with pytest.raises(
        InputError, match="^the prompt holds token id (320|-1), and the vocabulary ends at 319$"
    ):
        open_prefill(build, None).run(ids)


class Broken:
    kind, reason = "fake", "a test"

    def __init__(self, k, v):
        self.outputs = {"k": k, "v": v}

    def run(self, inputs):
        return self.outputs


def test_outputs_that_are_not_finite_or_of_another_shape_are_refused(build):
    good = np.zeros((1, 4, 16, 128), np.float32)
    with pytest.raises(
        CheckFailed, match="^prefill_128: output v is not finite in fp16; run `pdconvert verify`"
    ):
        open_prefill(build, Broken(good, good + np.inf)).run([1, 2])
    with pytest.raises(InputError, match=r"^prefill_128: output k is \(1, 4, 16, 64\), the manifest says"):
        open_prefill(build, Broken(good[..., :64], good)).run([1, 2])


@pytest.fixture
def run(build, w8, monkeypatch):
    """`run_build` on a build whose package is played by Hugging Face."""
    asked = []

    def open_fake(package, function, cache, **options):
        assert cache.kept_bytes == 0
        asked.append((package, function, options))
        return HfSession(w8.hf, read_manifest(build).key_form)

    monkeypatch.setattr("pdconvert.executors.open_executor", open_fake)

    def call(text, **options):
        return run_build(build, text, **options)

    call.asked = asked
    return call


class TestRunBuild:
    def test_text_tokens_pieces_and_figures(self, run, build, w8):
        pieces = []
        result = run("ab", max_tokens=12, on_text=pieces.append, mode="fp16", executor="mil")
        expected = hf_greedy(w8.hf, [97, 98], 12)
        if EOS in expected:
            expected = expected[: expected.index(EOS)]
        assert list(result.token_ids) == expected
        assert "".join(pieces) == result.text
        assert "" not in pieces
        assert result.prompt_tokens == 2
        assert run.asked == [
            (
                build / "prefill.mlpackage",
                "prefill_128",
                {"kind": "mil", "mode": "fp16", "compute_units": "cpu_and_ne"},
            )
        ]
        content = result.to_json()
        assert set(content) == {"text", "token_ids", "prompt_tokens", "stop_reason", "executors", "timings"}
        assert set(content["timings"]) == {
            "load_s",
            "tokenize_s",
            "prefill_s",
            "handoff_s",
            "decode_s",
            "tokens_per_s",
        }
        assert content["executors"]["prefill"] == {"executor": "fake", "reason": "a test"}
        assert content["executors"]["decode"]["executor"] == "mlx"
        json.dumps(content)

    @pytest.mark.parametrize("length", [1, 127, 128])
    def test_prompts_up_to_the_limit(self, run, length):
        assert run("x" * length, max_tokens=2).prompt_tokens == length

    def test_a_longer_prompt_and_an_empty_one_are_refused(self, run):
        with pytest.raises(InputError, match="the prompt has 129 tokens"):
            run("x" * 129)
        with pytest.raises(InputError, match="the prompt is empty"):
            run("")

    def test_length_and_eos_of_the_manifest_stop(self, run, build, w8):
        first = run("ab", max_tokens=3)
        assert (first.stop_reason, len(first.token_ids)) == ("length", 3)
        path = build / "manifest.json"
        before = path.read_text()
        path.write_text(json.dumps(json.loads(before) | {"eos_token_ids": [first.token_ids[1]]}))
        try:
            second = run("ab", max_tokens=3)
        finally:
            path.write_text(before)
        assert second.stop_reason == "eos"
        assert second.token_ids == first.token_ids[: first.token_ids.index(first.token_ids[1])]

    def test_eos_of_the_generation_config_stops(self, run, build):
        first = run("cd", max_tokens=2)
        path = build / "decode" / "generation_config.json"
        path.write_text(json.dumps({"eos_token_id": [400, first.token_ids[0]]}))
        try:
            second = run("cd", max_tokens=2)
        finally:
            path.unlink()
        assert (second.text, second.token_ids, second.stop_reason) == ("", (), "eos")

    def test_the_seed_decides_the_text(self, run):
        options = {"max_tokens": 12, "temperature": 1.0}
        texts = [run("ab", seed=seed, **options).token_ids for seed in (1, 2, 1)]
        assert texts[0] == texts[2] != texts[1]
        assert (
            run("ab", max_tokens=12, temperature=1.0, top_k=1, seed=9).token_ids
            == run("ab", max_tokens=12).token_ids
        )

    def test_bad_options_are_refused_before_anything_is_loaded(self, run):
        with pytest.raises(InputError, match="temperature"):
            run("ab", temperature=-1)
        assert run.asked == []


def test_sampling_defaults_are_greedy():
    assert Sampling() == Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0)
