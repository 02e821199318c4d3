import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from pdconvert.errors import InputError
from pdconvert.quant.grid import FP16_MAX, TINIEST_SCALE, QuantizedLinear, fitting_group, quantize_symmetric
from pdconvert.quant.grids import integer_grid

LARGEST = {8: 127 * FP16_MAX / 128, 4: 7 * FP16_MAX / 8}
"""Just above it a scale times 2^(bits−1) exceeds fp16."""


def expand(record: QuantizedLinear) -> Tensor:
    """The scale of every weight, fp32 (O, I)."""
    columns = record.shape[1]
    return record.scales.float().repeat_interleave(record.group or columns, 1)


def assert_on_grid(weight: Tensor, record: QuantizedLinear) -> None:
    """The record is well-formed, and no weight is off by more than half a step."""
    limit = 2 ** (record.bits - 1) - 1
    assert record.codes.dtype == torch.int8 and record.scales.dtype == torch.float16
    assert record.codes.shape == weight.shape and record.codes.abs().max() <= limit
    assert (record.scales > 0).all() and torch.isfinite(record.scales).all()
    values = record.dequantize()
    assert torch.equal(values.double(), record.codes.double() * expand(record).double()), "rounded twice"
    error = (weight.double() - values.double()).abs()
    assert (error <= expand(record).double() * 0.5000001).all()


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """(O, I) whose rows differ in size by up to thirteen orders of magnitude, zero and constant rows among them."""
    rows, columns = draw(st.integers(1, 5)), 32 * draw(st.integers(1, 3))
    unit = hnp.arrays("float32", (rows, columns), elements=st.floats(-1, 1, width=32))
    weight = torch.from_numpy(draw(unit))
    exponents = draw(st.lists(st.floats(-9, 4), min_size=rows, max_size=rows))
    weight = weight * 10.0 ** torch.tensor(exponents)[:, None]
    if draw(st.booleans()):
        weight[0] = 0
    if draw(st.booleans()):
        weight[-1] = weight[-1, 0]
    return weight


@settings(deadline=None, max_examples=150)
@given(weight=matrices(), bits=st.sampled_from([4, 8]), group=st.sampled_from([0, 8, 32]))
def test_no_value_is_off_by_more_than_half_a_step(weight: Tensor, bits: int, group: int) -> None:
    before = weight.clone()
    record = quantize_symmetric(weight, bits, "w", group)
    assert torch.equal(weight, before), "the weight was changed in place"
    assert record.scales.shape == (weight.shape[0], weight.shape[1] // group if group else 1)
    assert_on_grid(weight, record)


@settings(deadline=None, max_examples=50)
@given(weight=matrices(), bits=st.sampled_from([4, 8]), group=st.sampled_from([0, 32]))
def test_what_is_on_the_grid_stays_where_it_is(weight: Tensor, bits: int, group: int) -> None:
    values = quantize_symmetric(weight, bits, "w", group).dequantize()
    again = quantize_symmetric(values, bits, "w", group).dequantize()
    assert torch.allclose(values, again, rtol=2**-10, atol=0)


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_on_a_subnormal_grid_stays_where_it_is(bits: int) -> None:
    """Every scale of up to 400 units: a largest code of 126 once looked like one of 127 with the scale below."""
    limit = 2 ** (bits - 1) - 1
    units = torch.arange(1, 400)[:, None] * TINIEST_SCALE
    peaks = units * limit * torch.linspace(0.4, 1.004, 200)  # of rows whose scale is each unit, or nearly so
    weight = torch.stack([peaks, peaks * 0.617, -peaks * 0.291], 2).flatten(0, 1)
    values = quantize_symmetric(weight, bits, "w").dequantize()
    assert torch.equal(quantize_symmetric(values, bits, "w").dequantize(), values)


def test_zero_rows_stay_zero() -> None:
    record = quantize_symmetric(torch.zeros(3, 8), 8, "w")
    assert not record.codes.any() and torch.equal(record.dequantize(), torch.zeros(3, 8))
    assert (record.scales.float() == TINIEST_SCALE).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [1e-9, 6e-8, 1e-7, 9e-7, 5e-6, 1e-5])
def test_rows_whose_scale_is_subnormal_in_fp16_are_not_clipped(size: float, bits: int) -> None:
    weight = torch.linspace(-1, 1, 64)[None] * size
    assert_on_grid(weight, quantize_symmetric(weight, bits, "w"))


def test_one_outlier_takes_the_whole_scale_of_its_row_only() -> None:
    weight = torch.full((2, 64), 0.01)
    weight[0, 5] = 100.0
    record = quantize_symmetric(weight, 8, "w")
    assert record.codes[0, 5] == 127 and record.codes[0].count_nonzero() == 1
    assert torch.allclose(record.dequantize()[1], weight[1], rtol=1e-3)


def test_groups_keep_an_outlier_to_themselves() -> None:
    weight = torch.full((1, 64), 0.01)
    weight[0, 5] = 100.0
    values = quantize_symmetric(weight, 8, "w", 32).dequantize()
    assert torch.allclose(values[0, 32:], weight[0, 32:], rtol=1e-3)


@pytest.mark.parametrize("bits", [4, 8])
def test_constant_rows_of_either_sign_use_the_outermost_codes(bits: int) -> None:
    weight = torch.tensor([[0.7], [-0.7]]).expand(2, 16)
    record = quantize_symmetric(weight, bits, "w")
    limit = 2 ** (bits - 1) - 1
    assert (record.codes[0] == limit).all() and (record.codes[1] == -limit).all()


def test_negating_weights_negates_codes() -> None:
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    one, other = quantize_symmetric(weight, 8, "w"), quantize_symmetric(-weight, 8, "w")
    assert torch.equal(one.codes, -other.codes) and torch.equal(one.scales, other.scales)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_grid_reaches_as_far_as_mlx_can_hold_its_bias(bits: int) -> None:
    fits = torch.tensor([[LARGEST[bits], 1.0]])
    record = quantize_symmetric(fits, bits, "w")
    assert record.scales.float().max() * 2 ** (bits - 1) <= FP16_MAX
    assert_on_grid(fits, record)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("factor", [1.001, 10.0, 1e30])
def test_larger_weights_are_refused_by_name(factor: float, bits: int) -> None:
    weight = torch.tensor([[1.0, 2.0], [1.0, -LARGEST[bits] * factor]])
    with pytest.raises(InputError) as error:
        quantize_symmetric(weight, bits, "model.layers.3.mlp.down_proj.weight")
    assert str(error.value) == (
        f"model.layers.3.mlp.down_proj.weight: weights up to {LARGEST[bits] * factor:.4g} do not fit an fp16 grid "
        f"of {bits} bits; leave quantize_weights out of the recipe for this model, or rescale the checkpoint"
    )


@pytest.mark.parametrize(
    ("inputs", "wanted", "group"),
    [
        (576, 64, 64),
        (64, 64, 64),
        (96, 64, 32),
        (32, 64, 32),
        (40, 64, 0),
        (1, 64, 0),
        (576, 128, 64),
        (96, 128, 32),
        (48, 16, 16),
        (40, 16, 0),
        (192, 96, 96),
    ],
)
def test_a_group_is_the_wanted_one_or_a_part_of_it_that_divides(inputs: int, wanted: int, group: int) -> None:
    assert fitting_group(inputs, wanted) == group


@settings(deadline=None, max_examples=150)
@given(
    weight=matrices(),
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([0, 8, 32]),
    form=st.sampled_from([{"symmetric": False}, {"lpbq": True}]),
)
def test_grids_with_more_than_a_scale_reach_every_weight(
    weight: Tensor, bits: int, group: int, form: dict[str, bool]
) -> None:
    """No value is off by more than half a step; every part has the few bits that make its products exact."""
    grid = integer_grid(weight, None, bits, group, "w", **form)
    record = grid.record(grid.nearest(weight, torch.arange(weight.shape[1])))
    groups = (len(weight), weight.shape[1] // (group or weight.shape[1]))
    scales, values = record.group_scales.double(), record.dequantize()
    assert scales.shape == groups and torch.isfinite(scales).all() and (scales > 0).all()
    steps = scales.repeat_interleave(group or weight.shape[1], 1)
    assert ((weight.double() - values.double()).abs() <= steps * 0.5000001).all()
    if record.zero_points is not None:
        assert record.zero_points.shape == groups and record.codes.dtype == torch.uint8
        assert not (record.zero_points % 2 ** (bits - 4)).any() and int(record.codes.max()) < 2**bits
        bias = -record.zero_points.double() * scales
        assert torch.equal(bias.half().double(), bias), "MLX's bias would be rounded"
    else:
        assert record.block_scales is not None and record.block_scales.shape == groups
        assert record.scales.shape == (len(weight), 1)
        assert record.block_scales.min() >= 1 and record.block_scales.max() <= 15
        assert torch.equal(scales, record.scales.double() * record.block_scales.double())


def test_zero_points_serve_one_sided_rows() -> None:
    weight = torch.stack([torch.linspace(0.1, 1.6, 32), torch.linspace(-1.6, -0.1, 32)])
    errors = []
    for symmetric in (True, False):
        grid = integer_grid(weight, None, 4, 0, "w", symmetric=symmetric)
        values = grid.values(grid.nearest(weight, torch.arange(32)), torch.arange(32))
        errors.append((values - weight).square().sum(1))
    assert (errors[1] < 0.3 * errors[0]).all()


def test_the_shape_of_a_record_is_that_of_its_weight() -> None:
    assert quantize_symmetric(torch.ones(3, 64), 8, "w", 32).shape == (3, 64)
