import pytest
import torch
from check_pass import check_pass
from checkpoints import head_block

from passes import EagerGqaAttention, FoldNormGain, LinearToConv2d, QuantizeWeights, RopeAsInput, SafeRmsNorm
from pdconvert.blocks import RMSNorm
from pdconvert.errors import InputError
from pdconvert.program import Block, Probe
from pdconvert.reference import Reference

ADAPTED = (LinearToConv2d(), EagerGqaAttention(), SafeRmsNorm(), RopeAsInput())
READERS = {
    "input_layernorm": {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"},
    "post_attention_layernorm": {"mlp.gate_proj", "mlp.up_proj"},
}


@pytest.mark.parametrize("earlier", [(), ADAPTED, (SafeRmsNorm(method="layer_norm"),)], ids=len)
def test_gains_go_into_the_linears_that_read_them(earlier: tuple, layer: Block, probe: Probe) -> None:
    for rewrite in earlier:
        layer = rewrite.run(layer)
    new = check_pass(FoldNormGain(), layer, probe)
    changed = set()
    for name, value in new.module.named_parameters():
        path, old = name.removesuffix(".weight"), layer.module.get_parameter(name)
        norm = next((norm for norm, readers in READERS.items() if path in readers), None)
        if path in READERS:
            assert torch.equal(value, torch.ones_like(old))
        elif norm is not None:
            gain = layer.module.get_parameter(f"{norm}.weight")
            assert torch.allclose(value.flatten(1), old.flatten(1) * gain)
            changed.add(path)
        else:
            assert value is old, f"{name} does not read a norm alone"
    assert changed == set.union(*READERS.values())
    assert all(part.gain_is_one for part in new.module.modules() if isinstance(part, RMSNorm))


def test_the_head_folds_the_final_norm(reference: Reference, probe: Probe) -> None:
    block = head_block(reference)
    new = check_pass(FoldNormGain(), block, probe)
    expected = block.module.lm_head.weight * block.module.norm.weight
    assert torch.allclose(new.module.lm_head.weight, expected)


def test_folding_again_changes_nothing(layer: Block) -> None:
    once = FoldNormGain().run(layer)
    again = FoldNormGain().run(once)
    for name, value in again.module.named_parameters():
        assert torch.equal(value, once.module.get_parameter(name))


def test_the_product_is_what_gets_quantized(layer: Block, probe: Probe) -> None:
    folded = FoldNormGain().run(layer)
    quantized = check_pass(QuantizeWeights(), folded, probe)
    weight = folded.module.get_parameter("mlp.up_proj.weight")
    assert torch.allclose(quantized.records["mlp.up_proj.weight"].dequantize(), weight, atol=0.02)


def test_quantized_weights_are_refused(layer: Block) -> None:
    with pytest.raises(InputError) as error:
        FoldNormGain().requires(QuantizeWeights().run(layer))
    assert str(error.value) == "fold_norm_gain must come before quantize_weights; move it up in the recipe"


def test_a_gain_left_behind_does_not_pass_unseen(layer: Block) -> None:
    with pytest.raises(AssertionError, match="input_layernorm keeps its gain"):
        FoldNormGain().ensures(layer, layer)
