"""Named layouts of keys and values, and the conversions between them.

With l a layer, h a KV head, t a token and d a channel of the head:

| name | shape | where the element (l, h, t, d) is | who has it |
|---|---|---|---|
| `native` | per layer (1, kv_heads, S, head_dim) | [l][0, h, t, d] | mlx-lm's caches, `KeysValues` |
| `graph` | (1, layers · kv_heads, head_dim, S) | [0, l · kv_heads + h, d, t] | inputs and outputs of the package |
| `pd` | (1, layers · S, kv_heads, head_dim) | [0, l · S + t, h, d] | programs that move K and V token by token |

`native` is a tuple of arrays here; as one array (in a file) its layers lie one after the other on axis 0. A
conversion copies, and gives contiguous arrays; none of them changes a value or its dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

Layout = Literal["native", "graph", "pd"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)

Native = tuple[np.ndarray, ...]
"""Per layer (1, kv_heads, S, head_dim)."""


def native_to_graph(native: Sequence[np.ndarray]) -> np.ndarray:
    """(1, layers · kv_heads, head_dim, S) from per layer (1, kv_heads, S, head_dim)."""
    return np.concatenate([layer.swapaxes(2, 3) for layer in native], 1)


def graph_to_native(graph: np.ndarray, layers: int) -> Native:
    """Per layer (1, kv_heads, S, head_dim) from (1, layers · kv_heads, head_dim, S).

    Raises:
        ValueError: axis 1 does not divide by `layers`.
    """
    _, rows, dim, tokens = graph.shape
    by_layer = graph.reshape(layers, 1, _split(rows, layers), dim, tokens)
    return tuple(layer.swapaxes(2, 3).copy() for layer in by_layer)


def native_to_pd(native: Sequence[np.ndarray]) -> np.ndarray:
    """(1, layers · S, kv_heads, head_dim) from per layer (1, kv_heads, S, head_dim)."""
    return np.concatenate([layer.swapaxes(1, 2) for layer in native], 1)


def pd_to_native(pd: np.ndarray, layers: int) -> Native:
    """Per layer (1, kv_heads, S, head_dim) from (1, layers · S, kv_heads, head_dim).

    Raises:
        ValueError: axis 1 does not divide by `layers`.
    """
    _, rows, heads, dim = pd.shape
    by_layer = pd.reshape(layers, 1, _split(rows, layers), heads, dim)
    return tuple(layer.swapaxes(1, 2).copy() for layer in by_layer)


def pack(native: Sequence[np.ndarray], layout: Layout) -> np.ndarray:
    """One contiguous array in a named layout from per layer (1, kv_heads, S, head_dim).

    Returns:
        An array of the `packed_shape`.
    """
    if layout == "graph":
        return np.ascontiguousarray(native_to_graph(native))
    if layout == "pd":
        return np.ascontiguousarray(native_to_pd(native))
    return np.concatenate(native, 0)


def unpack(packed: np.ndarray, layout: Layout, layers: int) -> Native:
    """Per layer (1, kv_heads, S, head_dim) from one array in a named layout; the inverse of `pack`."""
    if layout == "graph":
        return graph_to_native(packed, layers)
    if layout == "pd":
        return pd_to_native(packed, layers)
    return tuple(layer.copy() for layer in np.split(packed, layers))


def packed_shape(
    layout: Layout, layers: int, kv_heads: int, head_dim: int, tokens: int
) -> tuple[int, int, int, int]:
    """Shape of the array that `pack` gives."""
    if layout == "graph":
        return 1, layers * kv_heads, head_dim, tokens
    if layout == "pd":
        return 1, layers * tokens, kv_heads, head_dim
    return layers, kv_heads, tokens, head_dim


def _split(rows: int, layers: int) -> int:
    """Rows of one layer."""
    if rows % layers:
        raise ValueError(f"{rows} rows are not a whole number for each of {layers} layers")
    return rows // layers
