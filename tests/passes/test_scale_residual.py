from dataclasses import replace

import pytest
import torch
from check_pass import check_pass
from checkpoints import head_block
from hypothesis import given
from hypothesis import strategies as st

from passes import (
    EagerGqaAttention,
    LinearToConv2d,
    QuantizeWeights,
    RopeAsInput,
    SafeRmsNorm,
    ScaleResidual,
    TruncateLastLayer,
)
from passes.scale_residual import HEADROOM
from pdconvert.errors import InputError
from pdconvert.program import Block, Probe
from pdconvert.quant.grid import FP16_MAX
from pdconvert.ranges import Ranges
from pdconvert.reference import Reference

ADAPTED = (LinearToConv2d(), EagerGqaAttention(), SafeRmsNorm(), RopeAsInput())
WRITERS = {f"{path}.{kind}" for path in ("self_attn.o_proj", "mlp.down_proj") for kind in ("weight", "bias")}
NORMS = ("input_layernorm", "post_attention_layernorm")


@pytest.mark.parametrize("factor", [0.5, 2.0**-6, 2.0])
@pytest.mark.parametrize("earlier", [(), ADAPTED, (SafeRmsNorm(method="layer_norm"),)], ids=len)
def test_the_stream_is_scaled_and_nothing_else(
    earlier: tuple, factor: float, layer: Block, probe: Probe
) -> None:
    for rewrite in earlier:
        layer = rewrite.run(layer)
    new = check_pass(ScaleResidual(factor), layer, probe)
    assert dict(new.factors) == dict.fromkeys(WRITERS, factor)
    assert new.layout == replace(layer.layout, residual=factor)
    for name, value in new.module.named_parameters():
        old = layer.module.get_parameter(name)
        assert torch.equal(value, old * factor) if name in WRITERS else value is old
    for norm in NORMS:
        old, found = layer.module.get_submodule(norm), new.module.get_submodule(norm)
        assert found.eps == old.eps * factor**2 == layer.spec.norm_eps * factor**2


def test_the_module_itself_sees_the_scaled_stream(layer: Block, probe: Probe) -> None:
    new = ScaleResidual(0.125).run(layer)
    seen = []
    new.module.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output[0])))
    hidden = new.run(probe)["hidden"]
    assert torch.equal(seen[0][0], probe.hidden * 0.125)
    assert torch.equal(seen[0][1], hidden * 0.125)


def test_the_head_reads_the_scaled_stream(reference: Reference, probe: Probe) -> None:
    new = check_pass(ScaleResidual(0.125), head_block(reference), probe)
    assert not new.factors and new.module.norm.eps == reference.spec.norm_eps * 0.125**2


def test_codes_stay_those_of_the_store(layer: Block, probe: Probe) -> None:
    quantized = QuantizeWeights().run(layer)
    new = check_pass(ScaleResidual(0.25), quantized, probe)
    assert dict(new.records) == dict(quantized.records)


def test_a_layer_may_be_truncated_afterwards(layer: Block, probe: Probe) -> None:
    for rewrite in ADAPTED:
        layer = rewrite.run(layer)
    check_pass(TruncateLastLayer(), check_pass(ScaleResidual(0.25), layer, probe), probe)


@given(peak=st.floats(1e-3, 1e9))
def test_auto_leaves_two_bits_above_the_measured_peak(peak: float) -> None:
    chosen, why = ScaleResidual().resolve(Ranges(peak, "layers.7", {}))
    assert f"the residual stream peaks at {peak:,.0f} in layers.7" in why
    if chosen is None:
        assert peak * HEADROOM <= FP16_MAX and why.endswith("not needed")
        return
    assert isinstance(chosen.factor, float)
    assert peak * chosen.factor * HEADROOM <= FP16_MAX < peak * chosen.factor * 2 * HEADROOM
    assert why.endswith(f"scaled by 1/{round(1 / chosen.factor)}")


def test_auto_needs_nothing_where_the_stream_is_silent() -> None:
    assert ScaleResidual().resolve(Ranges(0.0, "embedding", {}))[0] is None


def test_auto_refuses_a_stream_that_no_factor_can_save() -> None:
    with pytest.raises(InputError) as error:
        ScaleResidual().resolve(Ranges(float("inf"), "layers.3", {}))
    assert (
        str(error.value) == "scale_residual: the residual stream in layers.3 is not finite, in fp32 already"
    )


REFUSED = {
    "auto": "scale_residual: `auto` was not resolved; measure the ranges first",
    0.3: "scale_residual: factor 0.3 is not a power of two; use 0.5, 0.25, 0.125, …",
    0.0: "scale_residual: factor 0.0 is not a power of two; use 0.5, 0.25, 0.125, …",
    -0.5: "scale_residual: factor -0.5 is not a power of two; use 0.5, 0.25, 0.125, …",
    float("inf"): "scale_residual: factor inf is not a power of two; use 0.5, 0.25, 0.125, …",
    float("nan"): "scale_residual: factor nan is not a power of two; use 0.5, 0.25, 0.125, …",
}


@pytest.mark.parametrize("factor", list(REFUSED))
def test_a_factor_that_changes_mantissas_is_refused(factor: float, layer: Block) -> None:
    with pytest.raises(InputError) as error:
        ScaleResidual(factor).requires(layer)
    assert str(error.value) == REFUSED[factor]


def test_a_second_time_is_refused(layer: Block) -> None:
    with pytest.raises(InputError) as error:
        ScaleResidual(0.5).requires(ScaleResidual(0.25).run(layer))
    assert str(error.value) == "scale_residual is listed twice in the recipe"


def test_an_eps_left_behind_does_not_pass_unseen(layer: Block) -> None:
    with pytest.raises(AssertionError, match="input_layernorm keeps its eps"):
        ScaleResidual(0.5).ensures(layer, layer)
