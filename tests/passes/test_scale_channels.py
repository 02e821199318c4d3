from dataclasses import replace

import pytest
import torch
from check_pass import check_pass
from checkpoints import head_block, layer_block, random_source, reference_of

from passes import FoldNormGain, LinearToConv2d, QuantizeWeights, RotateResidual, SafeRmsNorm, ScaleChannels
from passes.scale_channels import KnownScales, scaled_stages, with_scales
from pdconvert.errors import InputError
from pdconvert.families import llama, olmo2
from pdconvert.measure import sqnr_db
from pdconvert.program import Block, Probe, applied, worst_db
from pdconvert.quant.calibration import Calibration, mean_magnitudes
from pdconvert.reference import Reference

FOUR_BITS = QuantizeWeights(scheme="w4a16")
STAGES = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.up_proj": ("mlp.down_proj",),
}


def loud_layer(config: dict | None = None) -> tuple[Block, Reference]:
    """A layer some of whose channels are loud after every norm, and after up_proj."""
    one = {**llama.TINY, "intermediate_size": 96, "mlp_bias": True, "attention_bias": True}
    source = random_source(config or one)
    for name, value in source.values.items():
        if name.endswith("layernorm.weight"):
            value[::16] *= 8
        if name.endswith("up_proj.weight"):
            value[::24] *= 8
    reference = reference_of(source)
    return layer_block(reference), reference


def calibration_of(reference: Reference, quantizer: QuantizeWeights = FOUR_BITS) -> Calibration:
    draw = torch.Generator().manual_seed(5)
    hidden = torch.randn(2, 120, reference.spec.hidden_size, generator=draw)
    return Calibration([hidden], [hidden], lambda x: reference.probe(0, x), "cpu", quantizer.nearest)


def probe_from(calibration: Calibration) -> Probe:
    draw = torch.Generator().manual_seed(9)
    return calibration.probe(torch.randn(1, 200, calibration.stored[0].shape[2], generator=draw))


@pytest.mark.parametrize(
    ("earlier", "gain_db"),
    [((), 2.0), ((LinearToConv2d(), SafeRmsNorm()), 2.0), ((RotateResidual(),), None)],
    ids=["plain", "convolutions", "rotated"],
)
def test_scaling_changes_nothing_but_what_rounding_costs(earlier: tuple, gain_db: float | None) -> None:
    """In a rotated stream no channel is loud, and there is nothing to gain there."""
    block, reference = loud_layer()
    for rewrite in earlier:
        block = rewrite.run(block)
    calibration = calibration_of(reference)
    scaled = applied(ScaleChannels(), block, calibration)
    ScaleChannels().ensures(block, scaled)
    probe = probe_from(calibration)
    assert worst_db(block.run(probe), scaled.run(probe)) > 110
    assert set(scaled.scales) <= set(STAGES) and "mlp.up_proj" in scaled.scales
    if gain_db is None:
        return
    plain, better = (
        sqnr_db(block.run(probe)["hidden"], FOUR_BITS.run(one).run(probe)["hidden"])
        for one in (block, scaled)
    )
    assert better > plain + gain_db


def test_the_error_weighted_by_activations_falls_in_every_stage() -> None:
    block, reference = loud_layer()
    calibration = calibration_of(reference)
    scaled = applied(ScaleChannels(), block, calibration)
    means = mean_magnitudes(block, calibration, [readers[0] for readers in STAGES.values()])
    for source, readers in STAGES.items():
        ratio = scaled.scales[source]
        for path in readers:
            errors = []
            for one, scale in ((block, torch.ones_like(ratio)), (scaled, ratio)):
                weight = one.module.get_parameter(f"{path}.weight").detach()
                lost = FOUR_BITS.nearest(weight, f"layers.0.{path}.weight") - weight
                errors.append(float((lost / scale * means[readers[0]]).square().sum()))
            assert errors[1] < errors[0], path


def test_new_gains_are_fp16_numbers_and_scales_follow_them() -> None:
    block, reference = loud_layer()
    scaled = applied(ScaleChannels(), block, calibration_of(reference))
    for norm in set(scaled.scales) - {"mlp.up_proj"}:
        gain = scaled.module.get_parameter(f"{norm}.weight")
        assert torch.equal(gain, gain.half().float())
        reader = f"{STAGES[norm][0]}.weight"
        old, new = (one.module.get_parameter(reader) for one in (block, scaled))
        before = block.module.get_parameter(f"{norm}.weight")
        assert torch.allclose(old * before, new * gain, rtol=1e-6, atol=0)


def test_a_channel_without_a_gain_is_left() -> None:
    """So is one whose gain fp16 could not hold."""
    block, _ = loud_layer()
    gain = block.module.input_layernorm.weight
    gain[3], gain[4], gain[5] = 0, 4e4, 1e-7
    scale = torch.full_like(gain, 1.5)
    scale[4], scale[5] = 0.5, 8.0
    scaled = with_scales(block, {"input_layernorm": scale})
    assert torch.equal(scaled.module.input_layernorm.weight[3:6], gain[3:6])
    for path in STAGES["input_layernorm"]:
        old, new = (one.module.get_parameter(f"{path}.weight") for one in (block, scaled))
        assert torch.equal(old[:, 3:6], new[:, 3:6]) and not torch.equal(old[:, 6], new[:, 6])


def test_a_stage_that_rounding_does_not_hurt_stays() -> None:
    """With a grid that holds every weight there is no loss to lower."""
    block, reference = loud_layer()
    calibration = replace(calibration_of(reference), nearest=lambda matrix, path: matrix)
    scaled = applied(ScaleChannels(), block, calibration)
    loss = worst_db(block.run(probe := probe_from(calibration)), scaled.run(probe))
    assert loss > 110
    for name, scale in scaled.scales.items():
        assert bool(torch.isfinite(scale).all()), name


def test_silent_channels_have_finite_scales() -> None:
    block, reference = loud_layer()
    block.module.mlp.up_proj.weight[:7] = 0
    block.module.mlp.up_proj.bias[:7] = 0
    scaled = applied(ScaleChannels(), block, calibration_of(reference))
    assert all(bool(torch.isfinite(value).all()) for value in scaled.module.parameters())
    block.module.mlp.up_proj.weight.zero_()
    block.module.mlp.up_proj.bias.zero_()
    scaled = applied(ScaleChannels(), block, calibration_of(reference))
    assert all(bool(torch.isfinite(value).all()) for value in scaled.module.parameters())


def test_known_scales_give_the_same_block_again() -> None:
    block, reference = loud_layer()
    scaled = applied(ScaleChannels(), block, calibration_of(reference))
    again = KnownScales(scaled.scales).run(block)
    for name, value in scaled.module.named_parameters():
        assert torch.equal(value, again.module.get_parameter(name))


def test_without_text_the_block_has_its_form_and_its_values(layer: Block, probe: Probe) -> None:
    folded = FoldNormGain().run(layer)
    new = check_pass(ScaleChannels(), folded, probe)
    assert not new.module.input_layernorm.gain_is_one and not new.scales
    for name, value in new.module.named_parameters():
        assert value is folded.module.get_parameter(name)


def test_without_norms_before_only_the_mlp_scales() -> None:
    block, reference = loud_layer(olmo2.TINY)
    assert scaled_stages(block.module) == (("mlp.up_proj", ("mlp.down_proj",)),)
    scaled = applied(ScaleChannels(), block, calibration_of(reference))
    probe = reference.probe(0, torch.randn(1, 9, reference.spec.hidden_size))
    assert worst_db(block.run(probe), scaled.run(probe)) > 110 and set(scaled.scales) == {"mlp.up_proj"}


def test_quantized_weights_and_the_head_are_refused(layer: Block, reference: Reference) -> None:
    with pytest.raises(InputError, match="^scale_channels must come before quantize_weights; move it up"):
        ScaleChannels().requires(QuantizeWeights().run(layer))
    with pytest.raises(InputError, match="^scale_channels: head is not a decoder layer$"):
        ScaleChannels().requires(head_block(reference))


def test_a_gain_that_the_graph_leaves_out_does_not_pass_unseen(layer: Block) -> None:
    folded = FoldNormGain().run(layer)
    with pytest.raises(AssertionError, match="input_layernorm has no gain"):
        ScaleChannels().ensures(folded, folded)
