"""Samples of source and pair: the pair's own continuation, and where it parts from the source's."""

import numpy as np

from pdconvert.emit.vectors import GreedyCase
from pdconvert.proof import free_tokens, sample


class Counter:
    """A model whose next token is the last one and one more; after 7 comes 0. Remembers what it was fed."""

    def __init__(self) -> None:
        self.fed: list[int] = []

    def new_cache(self, kv: list) -> list:
        return kv

    def logits(self, ids: list[int], cache: list) -> np.ndarray:
        self.fed += ids
        return np.eye(8, dtype=np.float32)[[(token + 1) % 8 for token in ids]]


class Prefill:
    """A package that gives nothing."""

    def run(self, ids: tuple[int, ...]) -> list:
        return []


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, ids: list[int]) -> str:
        return "".join("abcdefgh"[token] for token in ids)


def case(*tokens: int) -> GreedyCase:
    return GreedyCase("prompt", (3,), tokens, tuple(0.01 * (1 + i) for i in range(len(tokens))))


def test_nothing_is_decoded_where_the_choices_agree() -> None:
    model = Counter()
    assert free_tokens(Prefill(), model, case(1, 2, 3), (1, 2, 3)) == [1, 2, 3]  # type: ignore[arg-type]
    assert model.fed == []


def test_from_the_first_difference_on_the_pair_goes_its_own_way() -> None:
    model = Counter()
    assert free_tokens(Prefill(), model, case(1, 2, 3, 4, 5), (1, 6, 0, 0, 0)) == [1, 6, 7, 0, 1]  # type: ignore[arg-type]
    assert model.fed == [3, 1, 6, 7, 0]


def test_a_difference_in_the_last_token_needs_no_decoding() -> None:
    model = Counter()
    assert free_tokens(Prefill(), model, case(1, 2, 3), (1, 2, 5)) == [1, 2, 5]  # type: ignore[arg-type]
    assert model.fed == []


def test_a_sample_is_cut_where_the_texts_part() -> None:
    found = sample(case(1, 2, 3, 4), [1, 2, 7, 4], Letters())  # type: ignore[arg-type]
    assert found == {
        "prompt": "prompt",
        "tokens": 4,
        "common": "bc",
        "source": "de",
        "pair": "he",
        "first_difference": 2,
        "margin": 0.03,
    }


def test_equal_samples_have_no_rest() -> None:
    found = sample(case(1, 2), [1, 2], Letters())  # type: ignore[arg-type]
    assert (found["common"], found["source"], found["pair"], found["first_difference"]) == (
        "bc",
        "",
        "",
        None,
    )
