"""cos and sin of the rotary position embedding, as the prefill graph takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


def rope_tables(
    inv_freq: Sequence[float],
    attention_factor: float,
    start: int,
    length: int,
    dtype: type[np.floating] = np.float16,
) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin for the positions start ... start + length − 1.

    The angle of pair i at position p is p · inv_freq[i] radians. It is computed in float64, because
    p · inv_freq in fp32 is off by 1e-3 radians at position 10,000 already. Both halves of the channels
    are filled, as the half-split form needs: channels i and i + D_rot/2 hold the same value.

    Args:
        inv_freq: D_rot / 2 inverse frequencies in radians per token.
        attention_factor: factor multiplied into both tables (yarn, longrope); 1.0 otherwise.
        start: position of the first column, that is the number of past tokens.
        length: number of columns S; columns of padded tokens simply continue the count.
        dtype: the graph's dtype.

    Returns:
        (cos, sin), each (1, 1, D_rot, S).
    """
    positions = np.arange(start, start + length, dtype=np.float64)
    angles = np.asarray(inv_freq, np.float64)[:, None] * positions
    angles = np.concatenate((angles, angles))[None, None]
    return (np.cos(angles) * attention_factor).astype(dtype), (np.sin(angles) * attention_factor).astype(
        dtype
    )


def rotate_half_split(keys: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """RoPE in the half-split form on keys (1, heads, D, S), with tables (1, 1, D_rot, S); computed in fp32."""
    dims = cos.shape[2]
    turning = keys[:, :, :dims].astype(np.float32)
    half = dims // 2
    swapped = np.concatenate((-turning[:, :, half:], turning[:, :, :half]), 2)
    turned = turning * cos.astype(np.float32) + swapped * sin.astype(np.float32)
    return np.concatenate((turned.astype(keys.dtype), keys[:, :, dims:]), 2)


@dataclass(frozen=True)
class Frequencies:
    """A rotary embedding: radians per token, one for each pair of channels.

    Attributes:
        attention_factor: factor in cos and sin.
        layers: that turn by it.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float
    layers: tuple[int, ...]


class RopeTables:
    """cos and sin of a run of positions for every rotary embedding of a model.

    Args:
        ropes: by the suffix of their inputs' roles: "", and ".local" where a model has a second one.
        start, length: positions start … start + length − 1.
        dtype: the graph's dtype.
    """

    def __init__(
        self,
        ropes: Mapping[str, Frequencies],
        start: int,
        length: int,
        dtype: type[np.floating] = np.float16,
    ):
        self._ropes = ropes
        self._tables = {
            suffix: rope_tables(rope.inv_freq, rope.attention_factor, start, length, dtype)
            for suffix, rope in ropes.items()
        }

    def inputs(self, span: slice) -> dict[str, np.ndarray]:
        """The graph's inputs by role for some of the positions, each (1, 1, D_rot, S)."""
        return {
            f"{name}{suffix}": table[..., span]
            for suffix, pair in self._tables.items()
            for name, table in zip(("rope_cos", "rope_sin"), pair, strict=True)
        }

    def rotate(self, keys: np.ndarray, kv_heads: int, span: slice) -> np.ndarray:
        """The keys of all layers, (1, layers · kv_heads, D, S), each turned by its layer's RoPE if it has one.

        Args:
            span: the keys' positions, counted from `start`.
        """
        turned = keys.copy()
        for suffix, (cos, sin) in self._tables.items():
            layers = np.array(self._ropes[suffix].layers, int)
            rows = (layers[:, None] * kv_heads + np.arange(kv_heads)).ravel()
            turned[:, rows] = rotate_half_split(keys[:, rows], cos[..., span], sin[..., span])
        return turned
