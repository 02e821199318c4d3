"""cos and sin of the rotary position embedding, as the prefill graph takes them."""

from __future__ import annotations

from collections.abc import Sequence

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


def rotate_layers(
    keys: np.ndarray, cos: np.ndarray, sin: np.ndarray, kv_heads: int, unrotated: Sequence[int]
) -> np.ndarray:
    """RoPE on the keys of all layers, (1, layers · kv_heads, D, S), but for those that have none."""
    turned = rotate_half_split(keys, cos, sin)
    for layer in unrotated:
        rows = slice(layer * kv_heads, (layer + 1) * kv_heads)
        turned[:, rows] = keys[:, rows]
    return turned
