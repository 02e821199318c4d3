"""Checkpoints that look odd and are right: each gives the same model as the plain one, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from refusals import (
    WEIGHTS,
    Change,
    add,
    base,
    both,
    checkpoint,
    config,
    content,
    gone,
    json_file,
    pickled,
    shards,
    tensors,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdconvert.pipeline import BuildResult, build
from pdconvert.prepare import Plan, make_plan
from pdconvert.recipe import load_recipe
from pdconvert.sources import open_source

__all__ = ["base", "checkpoint"]

GATES = ("gates.kld=99", "gates.top1=0", "gates.reason=random weights", "probe.eval_windows=1")


def plan_of(folder: Path) -> Plan:
    recipe = load_recipe("tiny", source=str(folder))
    return make_plan(recipe, open_source(recipe.source))


def weights_of(plan: Plan) -> dict[str, Tensor]:
    return {name: plan.source.read(name) for name in plan.source.tensors()}


def resaved(change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]], metadata: dict | None) -> Change:
    def apply(folder: Path) -> None:
        state = dict(change(load_file(folder / WEIGHTS)))
        (folder / WEIGHTS).unlink()
        save_file(state, folder / WEIGHTS, metadata=metadata)

    return apply


SAME: dict[str, Change] = {
    "head_dim is null": config(head_dim=None),
    "head_dim written out": config(head_dim=16),
    "RoPE in the new form": config(
        rope_theta=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    ),
    "RoPE scaling is null": config(rope_scaling=None),
    "remote code that is not needed": config(auto_map={"AutoConfig": "configuration.Custom"}),
    "padding with token 0": config(pad_token_id=0),
    "padding with EOS": config(pad_token_id=257),
    "no padding": config(pad_token_id=None),
    "an empty quantization block": config(quantization_config=None),
    "a window that is null": config(sliding_window=None),
    "base-model names": tensors(
        lambda state: {name.removeprefix("model."): value for name, value in state.items()}
    ),
    "leftover RoPE buffers": add("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8)),
    "no metadata": resaved(dict, None),
    "metadata of MLX": resaved(dict, {"format": "mlx"}),
    "metadata of torch": resaved(dict, {"format": "pt"}),
    "in shards": shards(),
    "pickled": pickled(),
    "pickled in shards": shards(pickled=True),
    "pickled, transposed in memory": pickled(
        lambda state: {n: v.T.contiguous().T if v.dim() == 2 else v for n, v in state.items()}
    ),
    "an older form beside": lambda folder: torch.save({"old": torch.ones(2)}, folder / "pytorch_model.bin"),
    "no tokenizer_config": gone("tokenizer_config.json"),
    "the newest tokenizer class": json_file(
        "tokenizer_config.json", lambda data: data | {"tokenizer_class": "TokenizersBackend"}
    ),
    "no generation config": gone("generation_config.json"),
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_the_same_model(base: Path, checkpoint: Path, change: Change) -> None:
    change(checkpoint)
    plain, odd = plan_of(base), plan_of(checkpoint)
    assert odd.spec == plain.spec
    assert odd.decode_config == plain.decode_config
    expected, found = weights_of(plain), weights_of(odd)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_bf16_is_read_exactly(base: Path, checkpoint: Path) -> None:
    resaved(lambda state: {name: value.bfloat16() for name, value in state.items()}, None)(checkpoint)
    plan = plan_of(checkpoint)
    assert {info.dtype for info in plan.source.tensors().values()} == {"BF16"}
    for name, value in weights_of(plan_of(base)).items():
        assert torch.equal(plan.source.read(name), value.bfloat16().float())


def test_tokenizer_files_are_copied_byte_for_byte(checkpoint: Path, tmp_path: Path) -> None:
    both(
        content("chat_template.jinja", "{{ messages[0]['content'] }} ñ\r\n".encode()),
        json_file("tokenizer_config.json", lambda data: data | {"tokenizer_class": "TokenizersBackend"}),
    )(checkpoint)
    out = tmp_path / "tokenizer"
    out.mkdir()
    plan_of(checkpoint).source.write_tokenizer(out)
    names = {path.name for path in out.iterdir()}
    assert names >= {
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    }
    assert all((out / name).read_bytes() == (checkpoint / name).read_bytes() for name in names)


def build_of(folder: Path, out: Path, *overrides: str) -> BuildResult:
    return build(load_recipe("tiny", source=str(folder), overrides=(*GATES, *overrides)), out)


def test_large_key_biases_survive_fp16(checkpoint: Path, tmp_path: Path) -> None:
    """Small models with biases up to 300 on the keys gave one repeated symbol elsewhere."""

    def biased(state: dict[str, Tensor]) -> dict[str, Tensor]:
        for layer in range(2):
            prefix = f"model.layers.{layer}.self_attn"
            for name, size in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32), ("o_proj", 64)):
                state[f"{prefix}.{name}.bias"] = torch.zeros(size)
            state[f"{prefix}.k_proj.bias"] = torch.linspace(-300, 300, 32)
        return state

    both(config(attention_bias=True), tensors(biased))(checkpoint)
    result = build_of(checkpoint, tmp_path / "out", "passes.quantize_weights.scheme=none")
    checks = json.loads((tmp_path / "out" / "report" / "report.json").read_text())["checks"]
    assert result.verdict == "pass", result.summary
    assert all(check["passed"] for check in checks)


def test_large_logits_stay_finite(checkpoint: Path, tmp_path: Path) -> None:
    tensors(lambda state: state | {"lm_head.weight": state["lm_head.weight"] * 50})(checkpoint)
    result = build_of(checkpoint, tmp_path / "out", "prefill.outputs=logits")
    assert result.verdict == "pass", result.summary
