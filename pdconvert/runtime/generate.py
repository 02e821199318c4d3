"""Decoding: one token after another from the model's logits."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from pdconvert.errors import CheckFailed, InputError

StopReason = Literal["eos", "length"]


class LogitsModel(Protocol):
    """What decoding needs of a model."""

    def logits(self, ids: list[int], cache: Any) -> np.ndarray:
        """Logits (n, V) fp32 of n new tokens on a cache, to which they are added."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 takes the most probable token; otherwise logits are divided by it.
        top_p: keeps the most probable tokens up to this mass, at least one; 1 keeps all.
        top_k: keeps that many tokens; 0, or more than there are, keeps all.
        seed: of the random numbers; the same seed gives the same text. None takes a fresh one.

    Raises:
        InputError: a value outside its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < np.inf:
            raise InputError(f"temperature is {self.temperature}, expected 0 or a positive number")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}, expected a number above 0 and at most 1")
        if self.top_k < 0:
            raise InputError(f"top_k is {self.top_k}, expected 0 or a positive number of tokens")
        if self.seed is not None and self.seed < 0:
            raise InputError(f"seed is {self.seed}, expected 0 or a positive number")


@dataclass(frozen=True)
class Step:
    """One generated token; `stop_reason` is set on the last one."""

    token_id: int
    stop_reason: StopReason | None


def choose(logits: np.ndarray, sampling: Sampling, random: np.random.Generator) -> int:
    """The next token.

    The order is temperature, then top-k, then top-p; equally probable tokens rank by id.

    Args:
        logits: (V,), finite.
        sampling: how to choose.
        random: gives one number per sampled token.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    scores = (logits.astype(np.float64) - logits.max()) / sampling.temperature
    kept = np.arange(scores.size)
    if sampling.top_k or sampling.top_p < 1:
        kept = np.argsort(-scores, kind="stable")[: sampling.top_k or None]
    mass = np.cumsum(np.exp(scores[kept]))
    if sampling.top_p < 1:
        mass = mass[: int(np.searchsorted(mass, sampling.top_p * mass[-1])) + 1]
    drawn = np.searchsorted(mass, random.random() * mass[-1], side="right")
    return int(kept[min(int(drawn), mass.size - 1)])


def generate(
    model: LogitsModel,
    cache: Any,
    last_token: int,
    *,
    eos_ids: Set[int],
    max_tokens: int,
    sampling: Sampling,
) -> Iterator[Step]:
    """Generates tokens after a prompt whose last token is not in the cache yet.

    Args:
        model: gives the logits.
        cache: the model's caches with all prompt tokens but the last.
        last_token: the prompt's last token.
        eos_ids: tokens that end the text.
        max_tokens: at most that many tokens, an EOS among them.
        sampling: how each is chosen.

    Yields:
        Every token, an EOS included; the last one with its stop reason.

    Raises:
        CheckFailed: logits that are not finite.
        InputError: `max_tokens` below 1.
    """
    if max_tokens < 1:
        raise InputError(f"max_tokens is {max_tokens}, expected at least 1")
    random = np.random.default_rng(sampling.seed)
    token = last_token
    for count in range(1, max_tokens + 1):
        logits = model.logits([token], cache)[-1]
        if not np.isfinite(logits).all():
            raise CheckFailed(
                f"token {count}: the decode logits are not finite; run `pdconvert verify` on this build"
            )
        token = choose(logits, sampling, random)
        reason: StopReason | None = "eos" if token in eos_ids else "length" if count == max_tokens else None
        yield Step(token, reason)
        if reason:
            return
