"""Faults that users of similar tools have met, where the right outcome is a number and not a refusal.

What is to be refused is in test_bad_input.py and test_bad_weights.py, what only looks odd in test_odd_input.py,
damaged builds in test_bad_builds.py, and configs of each family in families/test_refusals.py.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from refusals import base, both, checkpoint, config, rope, tensors
from test_odd_input import GATES, build_of, plan_of, weights_of
from torch import Tensor

from pdconvert.blocks import rotate
from pdconvert.cli import main
from pdconvert.executors.mlx import DecodeModel
from pdconvert.runtime.manifest import read_manifest
from pdconvert.runtime.mask import MASKED, causal_mask
from pdconvert.runtime.past import HostPast
from pdconvert.runtime.tokenizer import eos_token_ids
from pdconvert.runtime.weights import DecodeWeights
from pdconvert.verify import open_prefill

__all__ = ["base", "checkpoint"]


def test_yarn_without_its_original_length_takes_the_models(checkpoint: Path) -> None:
    rope(rope_type="yarn", factor=2.0)(checkpoint)
    short = plan_of(checkpoint)
    rope(rope_type="yarn", factor=2.0, original_max_position_embeddings=1024)(checkpoint)
    assert short.spec == plan_of(checkpoint).spec
    assert short.decode_config["rope_scaling"]["original_max_position_embeddings"] == 1024


def test_a_tied_base_model_in_bf16_is_the_same_model(checkpoint: Path) -> None:
    both(
        config(tie_word_embeddings=True),
        tensors(lambda state: {key: value for key, value in state.items() if key != "lm_head.weight"}),
    )(checkpoint)
    expected = weights_of(plan_of(checkpoint))
    tensors(lambda state: {key.removeprefix("model."): value.bfloat16() for key, value in state.items()})(
        checkpoint
    )
    plan = plan_of(checkpoint)
    assert plan.spec.tied
    found = weights_of(plan)
    assert all(torch.equal(found[name], value.bfloat16().float()) for name, value in expected.items())


def test_the_stored_type_and_what_fp16_loses_are_recorded(checkpoint: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"

    def tiny_values(state: dict[str, Tensor]) -> dict[str, Tensor]:
        state[name].view(-1)[:5] = torch.tensor([2e-8, -2e-8, 1e-38, 0.0, 6e-8])
        state["model.norm.weight"][0] = 12032.0  # which bf16 holds
        return {key: value.bfloat16() for key, value in state.items()}

    tensors(tiny_values)(checkpoint)
    build_of(checkpoint, tmp_path / "out", "passes.quantize_weights.scheme=none")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["source"]["dtypes"] == {"BF16": 21}
    assert manifest["quantization"]["underflows"] == {"layers.0.mlp.up_proj.weight": 3}
    assert DecodeWeights(tmp_path / "out" / "decode").array("model.norm.weight")[0] == 12032


def test_the_last_id_of_a_vocabulary_beyond_65536_wins_in_both_halves(
    checkpoint: Path, tmp_path: Path
) -> None:
    rows, last = 65600, 65599

    def wide(state: dict[str, Tensor]) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(0)
        table = torch.randn(rows, 64, generator=draw)
        head = torch.randn(rows, 64, generator=draw) * 0.02
        head[last] = 0
        state = {key: value for key, value in state.items() if "layers.1." not in key}
        state["model.norm.weight"][0] = 50.0
        table[:, 0] = 6.0  # the first channel of the stream is large and positive for every token
        head[last, 0] = 1.0
        return state | {"model.embed_tokens.weight": table, "lm_head.weight": head}

    both(config(vocab_size=rows, num_hidden_layers=1), tensors(wide))(checkpoint)
    result = build_of(checkpoint, tmp_path / "out", "prefill.outputs=logits", "prefill.logits=all")
    assert result.verdict == "pass", result.summary
    manifest = read_manifest(tmp_path / "out")
    prefill, ids = open_prefill(manifest, "mil", "fp16"), [1, 65599, 40000]
    function = manifest.functions["prefill_128"]
    outputs = prefill.call(function, ids, HostPast(manifest, None))
    parts = [np.asarray(outputs[port.name]) for port in function.outputs if port.role == "logits"]
    logits = np.concatenate(parts, 1)
    assert len(parts) == 5 and logits.shape == (1, rows, 1, 128)
    assert (logits[0, :, 0, :3].argmax(0) == last).all()
    model = DecodeModel.load(manifest.decode, "dequantized")
    assert (model.logits(ids, model.new_cache()).argmax(-1) == last).all()


def overflowing(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A stream near 60,000 after the embedding, which the first layer takes beyond 65,504."""
    state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"].clamp(-2, 2) * 29000
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        state[f"model.layers.0.{part}.weight"] *= 4e5
    return state


def test_a_stream_beyond_fp16_fails_the_build_and_a_scaled_one_passes(
    checkpoint: Path, tmp_path: Path
) -> None:
    tensors(overflowing)(checkpoint)
    args = ["build", "tiny", "--source", str(checkpoint), "--out", str(tmp_path / "out")]
    args += [item for gate in GATES for item in ("--set", gate)]
    result = CliRunner().invoke(main, args, prog_name="pdconvert")
    assert result.exit_code == 1
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["verdict"] == "fail"

    from pdconvert.pipeline import build
    from pdconvert.recipe import load_recipe, recipe_from_data

    data = load_recipe("tiny", source=str(checkpoint), overrides=GATES).resolved()
    data["passes"].append({"scale_residual": {"factor": "auto"}})
    scaled = build(recipe_from_data(data, where="test", folder=tmp_path), tmp_path / "scaled")
    assert scaled.verdict == "pass", scaled.summary


def test_a_masked_score_stays_finite_and_below_every_other() -> None:
    mask = causal_mask(0, 0, 3, 4)
    for score in (-60.0, -20.0, 0.0, 20.0, 60.0):
        scores = (mask[0, 0] + np.float16(score)).astype(np.float16)
        assert np.isfinite(scores).all()
        weights = np.exp(scores.astype(np.float32) - scores.max(0).astype(np.float32))
        assert np.isfinite(weights).all()
        assert (weights[mask[0, 0] == np.float16(MASKED)] == 0).all()


@pytest.fixture(scope="module")
def long_pair(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """A build for prompts of up to 384 tokens in calls of 128, and Hugging Face's model on its decode weights."""
    from transformers import LlamaForCausalLM

    from pdconvert.families import llama
    from pdconvert.pipeline import build
    from pdconvert.recipe import load_recipe, recipe_from_data

    folder = tmp_path_factory.mktemp("long")
    data = load_recipe("tiny", source=str(base), overrides=GATES).resolved()
    data["prefill"]["functions"] = [{"tokens": 128}, {"tokens": 128, "past": 256}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDCONVERT_CACHE", str(folder / "cache"))
        assert build(recipe_from_data(data, where="test", folder=folder), folder / "out").verdict == "pass"
    manifest = read_manifest(folder / "out")
    model = LlamaForCausalLM(llama.hf_config(json.loads((base / "config.json").read_text()))).eval()
    decode = DecodeWeights(manifest.decode)
    state = {}
    for name, value in model.state_dict().items():
        module = name.removesuffix(".weight")
        held = decode.rows(module, list(range(value.shape[0]))) if value.dim() == 2 else decode.array(name)
        state[name] = torch.from_numpy(np.array(held, np.float32))
    model.load_state_dict(state)
    return open_prefill(manifest, "mil", "fp16"), DecodeModel.load(manifest.decode, "dequantized"), model


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 130, 255, 256, 257, 258])
def test_prompts_at_the_ends_of_chunks_continue_as_hugging_face(
    long_pair: tuple[Any, Any, Any], length: int
) -> None:
    prefill, decode, model = long_pair
    ids = np.random.default_rng(length).integers(0, 256, length).tolist()
    cache = decode.new_cache(prefill.run(ids))
    for _ in range(4):
        expected = model(torch.tensor([ids])).logits[0, -1]
        got = torch.from_numpy(decode.logits(ids[-1:], cache)[-1])
        best = expected.topk(2)
        if best.values[0] - best.values[1] > 0.05:
            assert got.argmax() == best.indices[0]
        ids.append(int(best.indices[0]))


def test_channels_beyond_a_partial_rotation_keep_their_bits() -> None:
    x = torch.randn(1, 2, 5, 16, generator=torch.Generator().manual_seed(0))
    angle = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.5, 0.1, 0.01]).repeat(2)
    turned = rotate(x, angle.cos()[None, None], angle.sin()[None, None], axis=3)
    assert torch.equal(turned[..., 8:], x[..., 8:])
    first, second = x[..., :4], x[..., 4:8]
    cos, sin = angle.cos()[:, :4], angle.sin()[:, :4]
    torch.testing.assert_close(turned[..., :4], first * cos - second * sin)
    torch.testing.assert_close(turned[..., 4:8], second * cos + first * sin)


def test_every_place_that_names_an_end_of_text_counts() -> None:
    assert eos_token_ids({"eos_token_id": 1}, {"eos_token_id": [3]}, 5) == {1, 3, 5}


def directory(folder: Path, model_type: str) -> tuple[list[str], dict[str, str]]:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return ["--source", str(folder)], {}


def in_gguf(folder: Path, model_type: str) -> tuple[list[str], dict[str, str]]:
    sys.path.insert(0, str(Path(__file__).parent / "sources"))
    try:
        from gguf_files import METADATA, write_gguf
    finally:
        sys.path.pop(0)
    metadata = {key.replace("llama.", f"{model_type}."): value for key, value in METADATA.items()}
    metadata |= {"llama.expert_count": 8} if model_type == "llama" else {}
    path = write_gguf(folder / "m.gguf", {"token_embd.weight": torch.ones(320, 64)}, metadata, model_type)
    return ["--source", str(path)], {}


def in_hub_cache(folder: Path, model_type: str) -> tuple[list[str], dict[str, str]]:
    snapshot = folder / "models--org--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (folder / "models--org--model" / "refs").mkdir()
    (folder / "models--org--model" / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text(json.dumps({"model_type": model_type}))
    return ["--source", "hub:org/model"], {"HF_HUB_CACHE": str(folder), "HF_HUB_OFFLINE": "1"}


ARCHITECTURES: dict[str, tuple[Callable[..., Any], str, str]] = {
    "experts in a folder": (directory, "qwen3_moe", "a mixture of experts"),
    "a state space in a folder": (directory, "mamba2", "state-space"),
    "images in a folder": (directory, "qwen2_vl", "a model with an image"),
    "experts in GGUF": (in_gguf, "qwen3moe", "a mixture of experts"),
    "experts in GGUF under the name of a dense family": (in_gguf, "llama", "a mixture of experts"),
    "a state space in GGUF": (in_gguf, "mamba", "state-space"),
    "images in GGUF": (in_gguf, "qwen2vl", "a model with an image"),
    "experts in the hub's cache": (in_hub_cache, "mixtral", "a mixture of experts"),
    "a state space in the hub's cache": (in_hub_cache, "jamba", "state-space"),
    "images in the hub's cache": (in_hub_cache, "llava", "a model with an image"),
}


@pytest.mark.parametrize(("place", "name", "reason"), ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_an_unsupported_architecture_is_refused_by_name_in_a_moment(
    place: Callable[..., Any], name: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    args, variables = place(tmp_path / "source", name)
    probe = "import sys, atexit; from pdconvert.cli import main; atexit.register(lambda: print('torch' in sys.modules))"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", f"{probe}; main(sys.argv[1:])", "build", "tiny", *args, "--out", "out"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])} | variables,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stdout) == (2, "False\n"), done.stderr
    assert f"{name!r} is not supported: it is {reason}" in done.stderr
    assert len(done.stderr.splitlines()) <= 2
    assert not (tmp_path / "out").exists()
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_gguf_names_of_refused_architectures_are_real() -> None:
    from gguf.constants import MODEL_ARCH_NAMES

    from pdconvert.families import UNSUPPORTED
    from pdconvert.sources.gguf_config import ARCHITECTURES as HELD
    from pdconvert.sources.gguf_config import REFUSED

    assert REFUSED.keys() <= set(MODEL_ARCH_NAMES.values())
    assert set(REFUSED.values()) <= UNSUPPORTED.keys()
    assert not REFUSED.keys() & HELD.keys()
