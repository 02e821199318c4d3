import itertools

import pytest

from pdconvert.quant.allocation import Linear, allocate

WIDTHS = (4, 6, 8)
LINEARS = {"a": Linear(100, 0.4), "b": Linear(100, 0.1), "c": Linear(200, 0.05), "d": Linear(50, 0.0)}


def cost(name: str, width: int) -> float:
    return LINEARS[name].weights * width


def damage(bits: dict[str, int]) -> float:
    return sum(LINEARS[name].damage / 4 ** (width - 4) for name, width in bits.items())


@pytest.mark.parametrize("budget", [4.0, 4.5, 5.0, 6.0, 8.0])
def test_under_a_budget_of_bits_it_is_close_to_the_best(budget: float) -> None:
    found = allocate(LINEARS, WIDTHS, cost, bits_per_weight=budget)
    assert found is not None and found.bits_per_weight <= budget
    total = sum(linear.weights for linear in LINEARS.values())
    choices = [dict(zip(LINEARS, widths, strict=True)) for widths in itertools.product(WIDTHS, repeat=4)]
    allowed = [one for one in choices if sum(cost(n, w) for n, w in one.items()) <= budget * total]
    assert found.predicted_kld == pytest.approx(damage(dict(found.bits)))
    assert found.predicted_kld <= 1.3 * min(map(damage, allowed))


@pytest.mark.parametrize("kld", [0.5, 0.1, 0.01])
def test_under_a_budget_of_divergence_it_takes_few_bits(kld: float) -> None:
    found = allocate(LINEARS, WIDTHS, cost, kld=kld)
    assert found is not None and found.predicted_kld <= kld
    fewer = allocate(LINEARS, WIDTHS, cost, bits_per_weight=found.bits_per_weight - 0.01)
    assert fewer is None or fewer.predicted_kld > kld


def test_what_suffers_most_gets_more() -> None:
    found = allocate(LINEARS, WIDTHS, cost, bits_per_weight=4.5)
    assert found is not None and found.bits["a"] > found.bits["d"] == 4


def test_a_budget_that_nothing_meets() -> None:
    assert allocate(LINEARS, WIDTHS, cost, bits_per_weight=3.9) is None
    assert allocate(LINEARS, WIDTHS, cost, kld=1e-9) is None
