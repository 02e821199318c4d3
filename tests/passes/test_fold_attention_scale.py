import pytest
import torch
from check_pass import check_pass, storages
from checkpoints import head_block, layer_block

from passes import (
    EagerGqaAttention,
    FoldAttentionScale,
    LinearToConv2d,
    QuantizeWeights,
    RopeAsInput,
    SafeRmsNorm,
    ScaleResidual,
)
from pdconvert.compile import stored_tensors
from pdconvert.errors import InputError
from pdconvert.program import Block, Probe
from pdconvert.reference import Reference

ADAPTED = (LinearToConv2d(), EagerGqaAttention(), SafeRmsNorm(), RopeAsInput())


@pytest.mark.parametrize(
    "earlier", [(), ADAPTED[:1], ADAPTED, (LinearToConv2d(), EagerGqaAttention(heads="single"))], ids=str
)
@pytest.mark.parametrize("raw_keys", [False, True])
def test_queries_come_scaled_from_their_projection(
    earlier: tuple, raw_keys: bool, reference: Reference, probe: Probe
) -> None:
    layer = layer_block(reference, raw_keys=raw_keys)
    for rewrite in earlier:
        layer = rewrite.run(layer)
    new = check_pass(FoldAttentionScale(), layer, probe)
    scale = layer.spec.attention_scale
    assert new.module.self_attn.scale == 1 and layer.module.self_attn.scale == scale
    names = {f"self_attn.q_proj.{kind}" for kind in ("weight", "bias")}
    assert dict(new.factors) == dict.fromkeys(names, scale)
    for name, value in new.module.named_parameters():
        old = layer.module.get_parameter(name)
        assert torch.equal(value, old * scale) if name in names else value is old


def test_the_store_keeps_the_queries_as_they_were(layer: Block, probe: Probe) -> None:
    quantized = QuantizeWeights().run(layer)
    new = check_pass(FoldAttentionScale(), quantized, probe)
    assert dict(new.records) == dict(quantized.records)
    stored = stored_tensors(quantized)
    assert stored["self_attn.q_proj.weight"] is quantized.records["self_attn.q_proj.weight"]


def test_factors_of_two_passes_multiply(layer: Block) -> None:
    folded = ScaleResidual(0.25).run(FoldAttentionScale().run(layer))
    assert folded.factors["self_attn.q_proj.weight"] == layer.spec.attention_scale
    assert folded.factors["self_attn.o_proj.weight"] == 0.25
    assert (
        folded.times(folded.module, "self_attn.o_proj.weight", 0.5).factors["self_attn.o_proj.weight"]
        == 0.125
    )


def test_the_head_has_no_scale(reference: Reference, probe: Probe) -> None:
    block = head_block(reference)
    assert FoldAttentionScale().run(block) is block
    check_pass(FoldAttentionScale(), block, probe)


def test_a_second_time_is_refused(layer: Block) -> None:
    with pytest.raises(InputError) as error:
        FoldAttentionScale().requires(FoldAttentionScale().run(layer))
    assert str(error.value) == "fold_attention_scale: the attention scale is 1 already; list the pass once"


def test_a_scale_left_behind_does_not_pass_unseen(layer: Block) -> None:
    with pytest.raises(AssertionError, match="the scale is still applied"):
        FoldAttentionScale().ensures(layer, layer)


def test_everything_but_the_queries_is_shared(layer: Block) -> None:
    before, after = storages(layer.module), storages(FoldAttentionScale().run(layer).module)
    assert {name for name in before if before[name] != after[name]} == {
        "self_attn.q_proj.weight",
        "self_attn.q_proj.bias",
    }
