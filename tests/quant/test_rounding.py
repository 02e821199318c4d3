import itertools

import pytest
import torch
from torch import Tensor

from pdconvert.errors import InputError
from pdconvert.quant.grid import LutLinear, QuantizedLinear
from pdconvert.quant.grids import EXACT_BITS, IntegerGrid, TableGrid, integer_grid, snapped, table_grid
from pdconvert.quant.rounding import corrected, damped, descend, gptq

Case = tuple[Tensor, Tensor, Tensor]


def output_error(weight: Tensor, quantized: Tensor, gram: Tensor) -> float:
    error = weight - quantized
    return ((error @ gram) * error).sum().item()


@pytest.fixture(params=range(3), ids="seed{}".format)
def case(request: pytest.FixtureRequest) -> Case:
    """A weight (24, 160), correlated inputs (500, 160) with a few strong channels, and their Gram matrix."""
    draw = torch.Generator().manual_seed(request.param)
    mixing = torch.randn(160, 160, generator=draw) / 12
    inputs = torch.randn(500, 160, generator=draw) @ (torch.eye(160) + mixing)
    inputs[:, ::40] *= 10
    return torch.randn(24, 160, generator=draw), inputs, inputs.T @ inputs


def grids(weight: Tensor, gram: Tensor) -> list[IntegerGrid | TableGrid]:
    return [
        integer_grid(weight, gram, 4, 0, "w"),
        integer_grid(weight, gram, 4, 32, "w"),
        integer_grid(weight, gram, 8, 0, "w"),
        integer_grid(weight, gram, 4, 0, "w", symmetric=False),
        integer_grid(weight, gram, 4, 32, "w", symmetric=False),
        integer_grid(weight, gram, 8, 32, "w", symmetric=False),
        integer_grid(weight, gram, 4, 32, "w", lpbq=True),
        table_grid(weight, gram.diagonal(), 4, 4, "w"),
    ]


def test_each_method_does_better_than_the_one_before(case: Case) -> None:
    weight, _, gram = case
    columns = torch.arange(weight.shape[1])
    for grid in grids(weight, gram):
        nearest = grid.nearest(weight, columns)
        spread = gptq(weight, gram, grid)
        swept = descend(weight, gram, grid, spread, sweeps=2)
        errors = [
            output_error(weight, grid.values(codes, columns), gram) for codes in (nearest, spread, swept)
        ]
        assert errors[1] < 0.8 * errors[0], grid
        assert errors[2] <= errors[1] * 1.0001, grid


def test_gptq_is_the_textbook_recursion(case: Case) -> None:
    """One column at a time, the inverse Hessian updated by elimination, as Optimal Brain Quantization has it."""
    weight, _, gram = case
    weight, gram = weight[:, :12], gram[:12, :12]
    grid = integer_grid(weight, gram, 4, 0, "w")
    inverse, work = torch.linalg.inv(damped(gram).double()), weight.double().clone()
    codes = torch.zeros(weight.shape, dtype=torch.int8)
    for column in gram.diagonal().argsort(descending=True, stable=True).tolist():
        at = torch.tensor([column])
        codes[:, at] = grid.nearest(work[:, at].float(), at)
        error = (work[:, column] - grid.values(codes[:, at], at)[:, 0]) / inverse[column, column]
        work -= error[:, None] * inverse[column]
        inverse -= inverse[:, column, None] * inverse[column] / inverse[column, column]
    assert (gptq(weight, gram, grid) == codes).double().mean() > 0.99  # float32 against float64 at ties


def test_descent_ends_where_no_single_code_helps(case: Case) -> None:
    weight, _, gram = case
    weight, matrix = weight[:4], damped(gram)
    grid, columns = integer_grid(weight, gram, 4, 0, "w"), torch.arange(weight.shape[1])
    codes = descend(weight, gram, grid, grid.nearest(weight, columns), sweeps=30)
    least = output_error(weight, grid.values(codes, columns), matrix)
    for column, step in itertools.product(range(0, 160, 7), (-1, 1)):
        other = codes.clone()
        other[0, column] = (other[0, column] + step).clamp(-8, 7)
        assert output_error(weight, grid.values(other, columns), matrix) >= least * (1 - 1e-4)


def test_correction_gives_the_reference_outputs_on_the_quantized_inputs(case: Case) -> None:
    weight, reference, _ = case
    noisy = reference + 0.3 * torch.randn(reference.shape, generator=torch.Generator().manual_seed(9))
    gram, cross = noisy.T @ noisy, noisy.T @ reference
    wanted = reference @ weight.T
    errors = [
        (noisy @ corrected(weight, gram, cross, share).T - wanted).square().sum().item()
        for share in (0, 0.5, 1)
    ]
    assert errors[2] < errors[1] < errors[0]
    exact = torch.linalg.lstsq(noisy, wanted).solution.T
    assert errors[2] <= 1.05 * (noisy @ exact.T - wanted).square().sum().item()


def test_scales_of_four_bits_give_values_that_fp16_holds() -> None:
    given = torch.rand(200, 1) * 10 ** torch.linspace(-9, 2, 200)[:, None]
    scales = snapped(given, short=True)
    assert (snapped(given, short=True, up=True) >= given).all()
    assert torch.equal(scales, scales.half().float())
    values = scales * torch.arange(-15, 16)
    assert torch.equal(values.half().float(), values)
    fraction = torch.frexp(scales).mantissa * 2**EXACT_BITS
    assert torch.equal(fraction, fraction.round())


DEGENERATE = {
    "zero rows": torch.zeros(8, 64),
    "constant rows": torch.full((8, 64), 0.37),
    "tiny rows": torch.full((8, 64), 1e-9),
    "one huge outlier": torch.ones(8, 64).index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(5e3)),
}


@pytest.mark.parametrize("weight", DEGENERATE.values(), ids=DEGENERATE)
@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e6], ids=["dead inputs", "small inputs", "large inputs"])
def test_degenerate_weights_stay_finite(weight: Tensor, scale: float) -> None:
    inputs = scale * torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    gram = inputs.T @ inputs
    for grid in grids(weight, gram):
        record = grid.record(descend(weight, gram, grid, gptq(weight, gram, grid)))
        value = record.dequantize()
        assert torch.isfinite(value).all()
        assert (value - weight).abs().max() <= weight.abs().max() * 1.2


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_beyond_fp16_are_refused(bits: int) -> None:
    weight = torch.full((4, 32), 1e5)
    with pytest.raises(InputError, match=f"w: weights do not fit an fp16 grid of {bits} bits"):
        integer_grid(weight, None, bits, 0, "w")
    with pytest.raises(InputError, match="w: weights do not fit"):
        table_grid(weight, torch.ones(32), bits, 4, "w")


def test_records_hold_what_the_grid_says(case: Case) -> None:
    weight, _, gram = case
    columns = torch.arange(weight.shape[1])
    for grid in grids(weight, gram):
        codes = grid.nearest(weight, columns)
        record = grid.record(codes)
        assert isinstance(record, QuantizedLinear | LutLinear)
        assert torch.equal(record.dequantize(), grid.values(codes, columns))
        if isinstance(record, LutLinear):
            size = 16 * record.tables.numel()
        else:
            groups = len(weight) * (weight.shape[1] // (record.group or weight.shape[1]))
            size = 16 * groups + record.bits * groups * (record.zero_points is not None)
            if record.block_scales is not None:
                size = 16 * len(weight) + 4 * groups
        assert record.stored_bits == weight.numel() * record.bits + size


def test_a_zero_point_helps_and_block_scales_cost_little(case: Case) -> None:
    """On weights that lie off the middle, 4 bits, groups of 32."""
    weight, _, gram = case
    weight = weight + torch.linspace(-1, 1, len(weight))[:, None]

    def error(**form: bool) -> float:
        grid = integer_grid(weight, gram, 4, 32, "w", **form)
        return output_error(weight, grid.values(gptq(weight, gram, grid), torch.arange(160)), gram)

    plain = error()
    assert error(symmetric=False) < 0.9 * plain
    assert error(lpbq=True) < 1.1 * plain


@pytest.mark.parametrize("form", [{}, {"symmetric": False}, {"lpbq": True}], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 7e4])
def test_weights_that_are_not_finite_or_too_large_are_refused(form: dict[str, bool], bad: float) -> None:
    weight, gram = torch.ones(4, 64), torch.eye(64)
    weight[1, 40] = bad
    for given in (None, gram):
        with pytest.raises(InputError, match="w: weights do not fit an fp16 grid of 8 bits"):
            integer_grid(weight, given, 8, 32, "w", **form)
