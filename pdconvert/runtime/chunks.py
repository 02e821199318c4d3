"""Which function takes which tokens of a prompt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from pdconvert.errors import InputError


class Shape(Protocol):
    """What is asked of a function."""

    @property
    def tokens(self) -> int: ...

    @property
    def past(self) -> int: ...


F = TypeVar("F", bound=Shape)


@dataclass(frozen=True)
class Chunk(Generic[F]):
    """One call: tokens start … start + length − 1 through a function, on `start` past ones."""

    function: F
    start: int
    length: int


def plan_chunks(functions: Iterable[F], start: int, tokens: int) -> list[Chunk[F]]:
    """Cut a run of tokens into calls.

    Each call takes the function with the fewest padded columns among those that finish the run, else the one
    with the most tokens; among equals the one with the shortest past that holds what came before, so that a
    short prompt does not pay for a long context.

    Args:
        functions: those of the package; one-token functions decode and are left out.
        start: tokens that were taken before.
        tokens: how many to take, at least one.

    Raises:
        InputError: the functions do not reach that far.
    """
    usable = [function for function in functions if function.tokens > 1]
    chunks: list[Chunk[F]] = []
    end = start + tokens
    while start < end:
        left = end - start
        fitting = [item for item in usable if (item.past >= start if start else True)]
        if not fitting:
            raise InputError(
                f"the build holds a context of {start} tokens, and {end} are needed; "
                "build it with a function that has a longer past, or shorten the prompt"
            )
        function = min(
            fitting, key=lambda item: (item.tokens < left, abs(item.tokens - left), item.past, item.tokens)
        )
        chunks.append(Chunk(function, start, min(left, function.tokens)))
        start += function.tokens
    return chunks


def reach(functions: Iterable[Shape]) -> int:
    """The longest run of tokens that calls in chunks can take."""
    usable = [function for function in functions if function.tokens > 1]
    start = 0
    while fitting := [item.tokens for item in usable if item.past >= start or not start]:
        start += max(fitting)
    return start
