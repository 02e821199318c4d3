"""Passes know no family: each keeps its promise on a layer of every one, and on what only some have."""

import pytest
import torch
from check_pass import check_pass
from checkpoints import layer_block, probe_of, random_source, reference_of

from passes import (
    EagerGqaAttention,
    FixShapes,
    FoldAttentionScale,
    FoldNormGain,
    LinearToConv2d,
    QuantizeWeights,
    RopeAsInput,
    SafeRmsNorm,
    ScaleResidual,
    TruncateLastLayer,
)
from pdconvert import families
from pdconvert.blocks import KeysValuesLayer, RMSNorm
from pdconvert.program import Block
from pdconvert.reference import Reference


def reference(name: str) -> Reference:
    return reference_of(random_source(families.get({"model_type": name}).TINY))


def layer(name: str, *earlier: object) -> Block:
    block = layer_block(reference(name))
    for rewrite in earlier:
        block = rewrite.run(block)
    return block


SHARED = (
    LinearToConv2d(),
    EagerGqaAttention(),
    SafeRmsNorm(),
    RopeAsInput(),
    FoldNormGain(),
    QuantizeWeights(),
)
GRAPH = (FoldAttentionScale(), ScaleResidual(0.25), TruncateLastLayer(), FixShapes(tokens=5))


@pytest.mark.parametrize("name", families.names())
def test_every_pass_in_order_keeps_its_promise(name: str) -> None:
    one = reference(name)
    specs = one.spec.layers
    for spec in dict.fromkeys(specs):
        probe = probe_of(one, tokens=7, layer=specs.index(spec))
        block = layer_block(one, specs.index(spec), raw_keys=True)
        for rewrite in (*SHARED, *GRAPH):
            block = check_pass(rewrite, block, probe)
        assert isinstance(block.module, KeysValuesLayer)


@pytest.mark.parametrize("name", families.names())
@pytest.mark.parametrize("heads", ["grouped", "single"])
def test_the_layer_norm_form_and_single_heads_too(name: str, heads: str) -> None:
    probe = probe_of(reference(name), tokens=7)
    block = layer(name)
    for rewrite in (LinearToConv2d(), SafeRmsNorm("layer_norm"), EagerGqaAttention(heads), RopeAsInput()):
        block = check_pass(rewrite, block, probe)


def norm_axes(block: Block) -> dict[str, int]:
    parts = block.module.named_modules()
    return {path: part.channel_axis for path, part in parts if isinstance(part, RMSNorm)}


def test_norms_of_heads_follow_the_heads_and_others_the_channels() -> None:
    plain = {"input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"}
    assert norm_axes(layer("qwen3")) == dict.fromkeys(plain, -1)
    conv = layer("qwen3", LinearToConv2d())
    assert {norm_axes(conv)[f"self_attn.{norm}"] for norm in ("q_norm", "k_norm")} == {-1}
    assert norm_axes(conv)["input_layernorm"] == 1
    heads = layer("qwen3", LinearToConv2d(), EagerGqaAttention())
    assert {norm_axes(heads)[f"self_attn.{norm}"] for norm in ("q_norm", "k_norm")} == {2}
    assert set(norm_axes(layer("olmo2", LinearToConv2d(), EagerGqaAttention())).values()) == {1}


@pytest.mark.parametrize(("name", "path"), [("qwen3", "q_norm"), ("olmo2", "q_norm"), ("qwen2", "q_proj")])
def test_the_attention_scale_goes_where_q_is_last_linear(name: str, path: str) -> None:
    block = layer(name)
    new = FoldAttentionScale().run(block)
    scale = block.spec.attention_scale
    assert set(new.factors.values()) == {scale}
    assert {key.rpartition(".")[0] for key in new.factors} == {f"self_attn.{path}"}


def test_a_stream_without_norms_before_it_is_scaled_in_gains_and_undone_in_readers() -> None:
    new = ScaleResidual(0.25).run(layer("olmo2"))
    gains = ("post_attention_layernorm", "post_feedforward_layernorm")
    readers = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    expected = {f"{path}.weight": 0.25 for path in gains} | {f"{path}.weight": 4.0 for path in readers}
    assert dict(new.factors) == expected
    assert all(part.eps == new.spec.norm_eps for part in new.module.modules() if isinstance(part, RMSNorm))


def test_gains_behind_attention_and_mlp_are_not_folded() -> None:
    block = layer("olmo2")
    new = FoldNormGain().run(block)
    for name, value in new.module.named_parameters():
        assert torch.equal(value, block.module.get_parameter(name))


@pytest.mark.parametrize(
    ("name", "norms"), [("qwen3", {"input_layernorm", "self_attn.k_norm"}), ("olmo2", {"self_attn.k_norm"})]
)
def test_a_truncated_layer_keeps_the_norm_of_k(name: str, norms: set[str]) -> None:
    kept = TruncateLastLayer().run(layer(name))
    assert set(norm_axes(kept)) == norms
    assert not any("q_" in path or "o_proj" in path for path, _ in kept.module.named_parameters())
