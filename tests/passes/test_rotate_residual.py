from dataclasses import replace
from typing import Any

import pytest
import torch
from check_pass import check_pass
from checkpoints import head_block, layer_block, random_source, reference_of

from passes import (
    EagerGqaAttention,
    FoldAttentionScale,
    FoldNormGain,
    LinearToConv2d,
    QuantizeWeights,
    RopeAsInput,
    RotateResidual,
    SafeRmsNorm,
    ScaleResidual,
    TruncateLastLayer,
)
from pdconvert import families
from pdconvert.basis import Basis, into
from pdconvert.errors import InputError
from pdconvert.program import Block, Probe
from pdconvert.reference import Reference

ADAPTED = (LinearToConv2d(), EagerGqaAttention(), SafeRmsNorm(), RopeAsInput())
NORMS = ("input_layernorm", "post_attention_layernorm")


@pytest.mark.parametrize("earlier", [(), ADAPTED, (SafeRmsNorm(method="layer_norm"),)], ids=len)
@pytest.mark.parametrize("seed", [0, 7])
def test_the_stream_turns_and_the_layer_stays(earlier: tuple, seed: int, layer: Block, probe: Probe) -> None:
    for rewrite in earlier:
        layer = rewrite.run(layer)
    new = check_pass(RotateResidual(seed), layer, probe)
    basis = Basis(layer.spec.hidden_size, seed)
    assert new.layout == replace(layer.layout, basis=basis)
    old = dict(layer.module.named_parameters())
    for name, value in new.module.named_parameters():
        assert value.shape == old[name].shape and value.is_contiguous()
    for norm in NORMS:
        assert bool((new.module.get_parameter(f"{norm}.weight") == 1).all())
    gain, weight = old["input_layernorm.weight"], old["self_attn.k_proj.weight"].flatten(1)
    got = new.module.get_parameter("self_attn.k_proj.weight").flatten(1)
    assert torch.allclose(got, into(weight * gain, basis), atol=1e-5)
    got = new.module.get_parameter("mlp.down_proj.bias")
    assert torch.allclose(got, into(old["mlp.down_proj.bias"], basis), atol=1e-6)


def test_the_module_itself_sees_the_turned_stream(layer: Block, probe: Probe) -> None:
    new, basis = RotateResidual().run(layer), Basis(layer.spec.hidden_size, 0)
    seen = []
    new.module.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output[0])))
    hidden = new.run(probe)["hidden"]
    assert torch.equal(seen[0][0], into(probe.hidden, basis))
    assert torch.allclose(seen[0][1], into(hidden, basis), atol=1e-4)


def test_the_head_reads_the_turned_stream(reference: Reference, probe: Probe) -> None:
    new = check_pass(RotateResidual(), head_block(reference), probe)
    assert bool((new.module.norm.weight == 1).all())


def test_what_follows_it_keeps_its_promise(layer: Block, probe: Probe) -> None:
    block = layer
    later = (FoldNormGain(), QuantizeWeights(), FoldAttentionScale(), ScaleResidual(0.25))
    for rewrite in (*ADAPTED, RotateResidual(), *later, TruncateLastLayer()):
        block = check_pass(rewrite, block, probe)
    assert block.layout.residual == 0.25 and block.layout.basis == Basis(layer.spec.hidden_size, 0)


def test_fold_norm_gain_takes_the_ones_out(layer: Block, probe: Probe) -> None:
    rotated = RotateResidual().run(layer)
    assert not rotated.module.input_layernorm.gain_is_one
    folded = check_pass(FoldNormGain(), rotated, probe)
    assert folded.module.input_layernorm.gain_is_one
    for name, value in folded.module.named_parameters():
        assert torch.equal(value, rotated.module.get_parameter(name))


CONFIGS: dict[str, dict[str, Any]] = {
    name: families.get({"model_type": name}).TINY for name in families.names()
}
BEFORE = [
    name for name in CONFIGS if reference_of(random_source(CONFIGS[name])).spec.layers[0].norms == "before"
]


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - set(BEFORE)))
def test_norms_behind_are_refused(name: str) -> None:
    with pytest.raises(InputError) as error:
        RotateResidual().requires(layer_block(reference_of(random_source(CONFIGS[name]))))
    assert str(error.value) == (
        "rotate_residual: the model has norms behind attention and MLP, whose gains act on single channels of the "
        "residual stream; leave the pass out"
    )


def test_quantized_weights_and_a_second_time_are_refused(layer: Block) -> None:
    with pytest.raises(InputError, match="^rotate_residual must come before quantize_weights; move it up"):
        RotateResidual().requires(QuantizeWeights().run(layer))
    with pytest.raises(InputError, match="^rotate_residual is listed twice in the recipe$"):
        RotateResidual(1).requires(RotateResidual().run(layer))


def test_another_norm_is_refused(layer: Block) -> None:
    layer.module.input_layernorm = torch.nn.LayerNorm(layer.spec.hidden_size)
    with pytest.raises(InputError, match=r"layers.0.input_layernorm is no RMSNorm; leave the pass out$"):
        RotateResidual().requires(layer)


def test_a_gain_left_behind_does_not_pass_unseen(layer: Block) -> None:
    turned = layer.with_layout(layer.module, basis=Basis(layer.spec.hidden_size, 0))
    with pytest.raises(AssertionError, match="input_layernorm keeps its gain"):
        RotateResidual().ensures(replace(layer, layout=replace(layer.layout, basis=None)), turned)
