import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdconvert.measure import kl_divergence_nats, mean_and_error, sqnr_db

LN2 = math.log(2)


def test_equal_tensors_have_no_noise() -> None:
    assert sqnr_db(torch.ones(3, 4), torch.ones(3, 4)) == math.inf
    assert sqnr_db(torch.zeros(3), torch.zeros(3)) == math.inf


def test_a_tenth_of_noise_is_twenty_decibel() -> None:
    signal = torch.tensor([3.0, -4.0])
    assert sqnr_db(signal, signal * 1.1) == pytest.approx(20, abs=1e-5)
    assert sqnr_db(signal, torch.zeros(2)) == 0


def test_noise_without_signal_is_the_worst() -> None:
    assert sqnr_db(torch.zeros(2), torch.ones(2)) == -math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["signal", "result", "both"])
def test_nan_and_infinity_on_either_side_give_nan(bad: float, side: str) -> None:
    good, broken = torch.ones(4), torch.tensor([1.0, bad, 1.0, 1.0])
    pair = {"signal": (broken, good), "result": (good, broken), "both": (broken, broken)}[side]
    assert math.isnan(sqnr_db(*pair))


def test_large_values_of_fp32_are_no_infinity() -> None:
    signal = torch.tensor([3e38, -3e38])
    assert sqnr_db(signal, signal * 0.9) == pytest.approx(20, abs=1e-3)


def test_narrow_types_are_compared_in_double() -> None:
    signal = torch.full((1000,), 300.0, dtype=torch.float16)
    assert sqnr_db(signal, signal * 0.5) == pytest.approx(10 * math.log10(4))


def test_nothing_compared_is_no_success() -> None:
    assert math.isnan(sqnr_db(torch.zeros(0, 3), torch.zeros(0, 3)))


def test_other_shapes_are_not_broadcast() -> None:
    with pytest.raises(ValueError) as error:
        sqnr_db(torch.ones(2, 3), torch.ones(3))
    assert str(error.value) == "shapes (2, 3) and (3,) cannot be compared"


@given(st.integers(0, 10**6), st.floats(1e-3, 1e3))
def test_a_common_factor_changes_nothing(seed: int, factor: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    signal, noise = torch.randn(2, 50, generator=generator, dtype=torch.float64)
    assert sqnr_db(signal * factor, (signal + noise) * factor) == pytest.approx(
        sqnr_db(signal, signal + noise)
    )


def test_kl_of_equal_distributions_is_zero_whatever_the_offset() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [-5.0, 0.0, 40.0]])
    assert torch.allclose(kl_divergence_nats(logits, logits + 7), torch.zeros(2, dtype=torch.float64))


def test_kl_is_in_nats_and_has_a_direction() -> None:
    sure, even = torch.tensor([[100.0, 0.0]]), torch.tensor([[0.0, 0.0]])
    assert kl_divergence_nats(sure, even).item() == pytest.approx(LN2)
    assert kl_divergence_nats(even, sure).item() == pytest.approx(50 - LN2)


def test_kl_is_one_value_per_row() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 6, 9, generator=generator)
    values = kl_divergence_nats(one.half(), other.half())
    expected = torch.nn.functional.kl_div(
        other.half().double().log_softmax(-1),
        one.half().double().log_softmax(-1),
        reduction="none",
        log_target=True,
    ).sum(-1)
    assert values.shape == (6,) and torch.allclose(values, expected) and (values > 0).all()


def test_the_error_of_a_mean_shrinks_with_the_root_of_the_count() -> None:
    assert mean_and_error(torch.tensor([1.0, 3.0])) == (2.0, pytest.approx(1.0))
    mean, error = mean_and_error(torch.tensor([1.0, 3.0]).repeat(50))
    assert mean == 2.0 and error == pytest.approx(0.1005, abs=1e-4)


def test_positions_of_one_window_are_not_independent() -> None:
    windows = torch.tensor([[1.0] * 50, [3.0] * 50])
    assert mean_and_error(windows) == (2.0, pytest.approx(1.0)), "as for two values"
    alike = torch.tensor([1.0, 3.0]).repeat(2, 50)
    assert mean_and_error(alike) == mean_and_error(alike.flatten()), "windows that agree by chance"


def test_one_value_tells_nothing_about_its_error() -> None:
    assert mean_and_error(torch.tensor([5.0])) == (5.0, math.inf)
