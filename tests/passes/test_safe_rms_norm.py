from dataclasses import replace
from typing import Literal

import pytest
import torch
from check_pass import check_pass, storages
from checkpoints import head_block
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from passes import EagerGqaAttention, LinearToConv2d, SafeRmsNorm, TruncateLastLayer
from passes.safe_rms_norm import FORMS, RowMaxRMSNorm
from pdconvert.blocks import RMSNorm
from pdconvert.errors import InputError
from pdconvert.measure import sqnr_db
from pdconvert.program import Block, Probe
from pdconvert.ranges import Ranges
from pdconvert.reference import Reference

METHODS = ("row_max", "layer_norm")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("turned", [False, True])
def test_every_norm_takes_the_safe_form(
    method: Literal["row_max", "layer_norm"], turned: bool, layer: Block, probe: Probe
) -> None:
    block = LinearToConv2d().run(layer) if turned else layer
    new = check_pass(SafeRmsNorm(method=method), block, probe)
    norms = [part for part in new.module.modules() if isinstance(part, RMSNorm)]
    assert len(norms) == 2 and {type(part) for part in norms} == {FORMS[method]}
    assert storages(new.module) == storages(block.module)


@pytest.mark.parametrize("method", METHODS)
def test_the_final_norm_and_a_truncated_layer_change_too(
    method: Literal["row_max", "layer_norm"], reference: Reference, layer: Block, probe: Probe
) -> None:
    check_pass(SafeRmsNorm(method=method), head_block(reference), probe)
    block = TruncateLastLayer().run(EagerGqaAttention().run(LinearToConv2d().run(layer)))
    check_pass(SafeRmsNorm(method=method), block, probe)


def test_a_block_without_norms_stays_as_it_is(layer: Block) -> None:
    block = replace(layer, module=nn.Sequential(nn.ReLU(), nn.LayerNorm(4)))
    new = SafeRmsNorm().run(block)
    assert [type(part) for part in new.module] == [nn.ReLU, nn.LayerNorm]


def norm(kind: type[RMSNorm], gain: Tensor, eps: float) -> RMSNorm:
    """A norm with channels on axis 1."""
    module = kind(gain.numel(), eps)
    module.weight = nn.Parameter(gain, requires_grad=False)
    module.channel_axis = 1
    return module


def exact(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm along axis 1 in float64."""
    x = x.double()
    return x / (x.square().mean(1, keepdim=True) + eps).sqrt() * gain.double().view(1, -1, 1, 1)


@settings(deadline=None, max_examples=60)
@given(
    exponent=st.floats(-9, 4.8), eps=st.sampled_from([1e-12, 1e-6, 1e-5, 1e-3]), seed=st.integers(0, 10**6)
)
@pytest.mark.parametrize("method", METHODS)
def test_rows_of_every_size_keep_the_meaning_of_eps(
    method: str, exponent: float, eps: float, seed: int
) -> None:
    """From rows far below √eps, where eps decides the result, to fp16's largest numbers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 24, 1, 3, generator=generator) * 10.0**exponent
    x[..., 1] = 0
    gain = 1 + 0.2 * torch.randn(24, generator=generator)
    got = norm(FORMS[method], gain, eps)(x)
    assert torch.equal(got[..., 1], torch.zeros(1, 24, 1))
    assert sqnr_db(exact(x, gain, eps), got) > 100


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-3, 0.5])
@pytest.mark.parametrize("largest", [3e-4, 1.0, 300.0, 6e4])
def test_row_max_survives_fp16_where_the_plain_form_does_not(largest: float, eps: float) -> None:
    x = torch.randn(1, 64, 1, 5, generator=torch.Generator().manual_seed(0))
    x = (x / x.abs().amax(1, keepdim=True) * largest).half()
    gain = torch.ones(64, dtype=torch.float16)
    expected = exact(x, gain, eps)
    assert sqnr_db(expected, norm(RowMaxRMSNorm, gain, eps)(x)) > 50
    if largest > 300:
        assert not sqnr_db(expected, norm(RMSNorm, gain, eps)(x)) > 10


def test_row_max_gives_zero_for_zero_rows_in_fp16() -> None:
    gain = torch.ones(8, dtype=torch.float16)
    zeros = torch.zeros(1, 8, 1, 2, dtype=torch.float16)
    assert torch.equal(norm(RowMaxRMSNorm, gain, 1e-5)(zeros), zeros)


@pytest.mark.parametrize("method", METHODS)
def test_a_second_time_is_refused(method: Literal["row_max", "layer_norm"], layer: Block) -> None:
    with pytest.raises(InputError) as error:
        SafeRmsNorm().requires(SafeRmsNorm(method=method).run(layer))
    assert str(error.value) == "safe_rms_norm is listed twice in the recipe"


def test_a_plain_norm_left_behind_does_not_pass_unseen(layer: Block) -> None:
    with pytest.raises(AssertionError, match="a plain RMSNorm is left"):
        SafeRmsNorm().ensures(layer, layer)


@pytest.mark.parametrize(
    ("peak", "method"), [(100.0, None), (127.0, None), (129.0, "row_max"), (1e6, "row_max")]
)
def test_auto_takes_the_row_maximum_where_squares_come_near_the_end_of_fp16(
    peak: float, method: str | None
) -> None:
    chosen, why = SafeRmsNorm(method="auto").resolve(Ranges(peak, "layers.2", {}))
    assert f"peaks at {peak:,.0f} in layers.2" in why and "128" in why
    assert (chosen.method if chosen else None) == method


def test_auto_is_decided_before_it_runs(layer: Block) -> None:
    with pytest.raises(InputError) as error:
        SafeRmsNorm(method="auto").requires(layer)
    assert str(error.value) == "safe_rms_norm: `auto` was not resolved; measure the ranges first"
