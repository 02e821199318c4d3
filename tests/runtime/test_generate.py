"""Choosing tokens: greedy, temperature, top-k, top-p, seeds, stop reasons."""

import re

import numpy as np
import pytest

from pdconvert.errors import CheckFailed, InputError
from pdconvert.runtime.generate import Sampling, Step, choose, generate


class Fixed:
    """A model whose logits do not depend on anything."""

    def __init__(self, logits):
        self.row = np.asarray(logits, np.float32)
        self.fed: list[int] = []

    def logits(self, ids, cache):
        self.fed += ids
        return self.row[None]


def run(model, sampling=None, max_tokens=20, eos=()):
    steps = generate(
        model, None, 7, eos_ids=frozenset(eos), max_tokens=max_tokens, sampling=sampling or Sampling()
    )
    return list(steps)


def tokens(model, sampling, count=40):
    return [step.token_id for step in run(model, sampling, count)]


def counts(logits, sampling, draws=20_000):
    random = np.random.default_rng(0)
    row = np.asarray(logits, np.float32)
    return np.bincount([choose(row, sampling, random) for _ in range(draws)], minlength=row.size) / draws


def test_greedy_takes_the_largest_and_of_equals_the_first():
    assert choose(np.array([0.0, 3.0, 3.0]), Sampling(), np.random.default_rng(0)) == 1


def test_temperature_one_samples_the_models_distribution():
    logits = np.log([0.5, 0.3, 0.2])
    np.testing.assert_allclose(counts(logits, Sampling(temperature=1.0)), [0.5, 0.3, 0.2], atol=0.015)


def test_temperature_flattens_and_sharpens():
    logits = np.log([0.8, 0.2])
    np.testing.assert_allclose(counts(logits, Sampling(temperature=2.0)), [2 / 3, 1 / 3], atol=0.015)
    np.testing.assert_allclose(counts(logits, Sampling(temperature=0.5)), [16 / 17, 1 / 17], atol=0.015)


def test_a_tiny_temperature_is_greedy_without_overflow():
    np.testing.assert_array_equal(counts([500.0, 501.0], Sampling(temperature=1e-300), 50), [0, 1])


def test_top_k_keeps_the_most_probable():
    found = counts(np.log([0.4, 0.1, 0.3, 0.2]), Sampling(temperature=1.0, top_k=2))
    np.testing.assert_allclose(found, [4 / 7, 0, 3 / 7, 0], atol=0.015)


@pytest.mark.parametrize("top_k", [0, 4, 5, 70_000])
def test_top_k_of_everything_or_more_keeps_everything(top_k):
    found = counts(np.zeros(4), Sampling(temperature=1.0, top_k=top_k))
    np.testing.assert_allclose(found, np.full(4, 0.25), atol=0.015)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.4, [1, 0, 0]), (0.5, [1, 0, 0]), (0.51, [0.625, 0.375, 0]), (1.0, [0.5, 0.3, 0.2])]
)
def test_top_p_keeps_the_smallest_set_of_that_mass(top_p, kept):
    found = counts(np.log([0.5, 0.3, 0.2]), Sampling(temperature=1.0, top_p=top_p))
    np.testing.assert_allclose(found, kept, atol=0.015)


def test_top_p_counts_the_mass_after_top_k():
    found = counts(np.log([0.4, 0.3, 0.2, 0.1]), Sampling(temperature=1.0, top_k=2, top_p=0.6))
    np.testing.assert_allclose(found, [4 / 7, 3 / 7, 0, 0], atol=0.015)


def test_a_large_vocabulary_is_sampled_evenly():
    random = np.random.default_rng(0)
    drawn = [choose(np.zeros(70_000), Sampling(1.0, top_k=100_000), random) for _ in range(200)]
    assert min(drawn) < 5_000 and max(drawn) > 65_000


def test_the_seed_decides_the_text():
    model = Fixed(np.zeros(50))
    texts = [tokens(model, Sampling(temperature=1.0, seed=seed)) for seed in (1, 2, 3, 1, 2, 3)]
    assert texts[:3] == texts[3:]
    assert len({tuple(text) for text in texts}) == 3


def test_no_seed_takes_a_fresh_one():
    model = Fixed(np.zeros(50))
    assert tokens(model, Sampling(1.0, seed=None)) != tokens(model, Sampling(1.0, seed=None))


def test_every_generated_token_is_fed_once_and_the_last_is_not():
    model = Fixed([0, 1, 0])
    assert run(model, max_tokens=3) == [Step(1, None), Step(1, None), Step(1, "length")]
    assert model.fed == [7, 1, 1]


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_an_eos_ends_the_text_even_as_the_last_token_allowed(max_tokens):
    assert run(Fixed([0, 1, 0]), max_tokens=max_tokens, eos=(2, 1)) == [Step(1, "eos")]


def test_logits_that_are_not_finite_fail():
    with pytest.raises(CheckFailed, match="token 1: the decode logits are not finite"):
        run(Fixed([0.0, np.nan]))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0, expected 0 or a positive number"),
        ({"temperature": float("nan")}, "temperature is nan, expected 0 or a positive number"),
        ({"temperature": float("inf")}, "temperature is inf, expected 0 or a positive number"),
        ({"top_p": 0.0}, "top_p is 0.0, expected a number above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p is 1.5, expected a number above 0 and at most 1"),
        ({"top_k": -1}, "top_k is -1, expected 0 or a positive number of tokens"),
        ({"seed": -1}, "seed is -1, expected 0 or a positive number"),
    ],
)
def test_refuses_values_outside_their_range(values, message):
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        Sampling(**values)


def test_refuses_to_generate_nothing():
    with pytest.raises(InputError, match="^max_tokens is 0, expected at least 1$"):
        run(Fixed([0.0]), max_tokens=0)
