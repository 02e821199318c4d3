"""The additive attention mask, as the prefill graph takes it."""

from __future__ import annotations

import numpy as np

MASKED = -4e4
"""What hides a key: far below any score, and with room before fp16's −65504."""


def causal_mask(
    past_length: int,
    capacity: int,
    new_length: int,
    tokens: int,
    dtype: type[np.floating] = np.float16,
    window: int | None = None,
) -> np.ndarray:
    """Which key each new token sees: every past one, and the new ones up to itself, as far as its window goes.

    Keys come in the order [past, new]: key c < C is past token c, key C + j is new token j. Past columns
    from `past_length` on are unused and hidden. Padded rows follow the same rule, so each of them sees at
    least itself and its softmax stays finite; no real token sees a padded key.

    Args:
        past_length: real past tokens P, 0 ≤ P ≤ C.
        capacity: past columns C of the function; 0 for a function without past.
        new_length: real new tokens N, 1 ≤ N ≤ S.
        tokens: new columns S of the function.
        dtype: the graph's dtype.
        window: tokens that a token sees, itself included; None for all.

    Returns:
        (1, 1, C + S, S): rows are keys, columns are queries; 0 where the query sees the key, else −4e4.

    Raises:
        ValueError: a length outside its range.
    """
    if not 0 <= past_length <= capacity:
        raise ValueError(f"{past_length} past tokens do not fit {capacity} columns")
    if not 1 <= new_length <= tokens:
        raise ValueError(f"{new_length} new tokens do not fit {tokens} columns")
    mask = np.full((capacity + tokens, tokens), MASKED, dtype)
    mask[:past_length] = 0
    queries = np.arange(tokens)
    mask[capacity:][queries[:, None] <= queries] = 0
    if window is not None:
        positions = np.concatenate((np.arange(capacity), past_length + queries))
        mask[positions[:, None] <= past_length + queries - window] = MASKED
    return mask[None, None]
