"""From the prefill graph's K and V to the caches of mlx-lm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pdconvert.errors import InputError
from pdconvert.runtime.clock import Clock
from pdconvert.runtime.layouts import graph_to_native, native_to_graph

KeyForm = Literal["rotated", "raw"]

CACHE_STEP = 256
"""mlx-lm's caches grow by this many tokens; a buffer of whole steps is not copied at the first decode."""


@dataclass(frozen=True)
class KeysValues:
    """Keys and values of a run of tokens, padding dropped.

    Attributes:
        keys: per layer (1, kv_heads, n, head_dim).
        values: per layer (1, kv_heads, n, head_dim).
        form: "rotated" after RoPE, "raw" before it; both after bias and k-norm.
        start: position of the first token.
    """

    keys: tuple[np.ndarray, ...]
    values: tuple[np.ndarray, ...]
    form: KeyForm = "rotated"
    start: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens n."""
        return self.keys[0].shape[2] if self.keys else 0

    @classmethod
    def from_graph(
        cls, keys: np.ndarray, values: np.ndarray, layers: int, tokens: int, form: KeyForm, start: int = 0
    ) -> KeysValues:
        """Splits the graph's outputs by layer.

        Args:
            keys: (1, layers · kv_heads, head_dim, S), layer-major; token i in column i.
            values: the same shape.
            layers: number of layers.
            tokens: real tokens n; columns from n on are padding.
            form: what `keys` holds.
            start: position of the first token.
        """
        by_layer = [graph_to_native(side[..., :tokens], layers) for side in (keys, values)]
        return cls(by_layer[0], by_layer[1], form, start)

    def graph_keys(self) -> np.ndarray:
        """Keys in the graph's layout, (1, layers · kv_heads, head_dim, n)."""
        return native_to_graph(self.keys)

    def graph_values(self) -> np.ndarray:
        """Values in the graph's layout."""
        return native_to_graph(self.values)


def fill_caches(
    model: Any, kv: KeysValues | None, dtype: Any, capacity: int = 0, clock: Clock | None = None
) -> list[Any]:
    """New caches of a loaded mlx-lm model that hold K and V.

    Raw keys are turned by the model's own RoPE module, layer by layer, in fp32 and at their positions.
    The caches own their buffers: mlx-lm writes new tokens into them in place. Only attributes that every
    version of mlx-lm's cache has are set, because its `state` changed form between versions.

    Args:
        model: the mlx-lm model that will decode.
        kv: what to put in; None or no tokens for empty caches.
        dtype: the model's dtype. A cache of another one would promote every step without a message.
        capacity: tokens that the caches shall hold without growing.

    Returns:
        One cache per layer, with the number of tokens as its offset.

    Raises:
        InputError: another kind of cache than mlx-lm's KVCache and RotatingKVCache, another number of layers, or
            raw keys for a model without a RoPE module.
    """
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

    caches = make_prompt_cache(model)
    other = next((type(one).__name__ for one in caches if type(one) not in (KVCache, RotatingKVCache)), None)
    if other:
        raise InputError(f"mlx-lm decodes this model with a {other}, which the hand-off cannot fill")
    if kv is None or not kv.tokens:
        return caches
    if len(kv.keys) != len(caches):
        raise InputError(
            f"the package gives K and V of {len(kv.keys)} layers, decode/ has {len(caches)}; build again"
        )
    clock = clock or Clock()
    steps = -(-max(kv.tokens, capacity) // CACHE_STEP) * CACHE_STEP
    sizes = [min(steps, c.max_size) if isinstance(c, RotatingKVCache) else steps for c in caches]
    firsts = [
        max(0, kv.tokens - size) for size in sizes
    ]  # a ring that is full holds the last tokens, the oldest first
    with clock.phase("rotate_s"):
        parts = zip(model.layers, kv.keys, firsts, strict=True)
        turned = [_turned(layer, kv, keys, first) for layer, keys, first in parts]
        mx.eval(turned)
    with clock.phase("inject_s"):
        for cache, keys, values, size, first in zip(caches, turned, kv.values, sizes, firsts, strict=True):
            cache.keys = _buffer(keys, size, dtype)
            cache.values = _buffer(mx.array(values[:, :, first:]), size, dtype)
            cache.offset = kv.tokens
            if isinstance(cache, RotatingKVCache):
                cache._idx = kv.tokens - first
        mx.eval([(cache.keys, cache.values) for cache in caches])
    return caches


def _turned(layer: Any, kv: KeysValues, keys: np.ndarray, first: int) -> Any:
    """The keys of a layer after RoPE, from token `first` on."""
    import mlx.core as mx

    kept = mx.array(keys[:, :, first:])
    if kv.form == "rotated":
        return kept
    return _rope(layer)(kept.astype(mx.float32), offset=kv.start + first)


def _rope(layer: Any) -> Any:
    rope = getattr(getattr(layer, "self_attn", None), "rope", None)
    if rope is None:
        raise InputError(
            "mlx-lm's model has no self_attn.rope, so raw keys cannot be turned; use kv.rope: rotated"
        )
    return rope


def _buffer(x: Any, steps: int, dtype: Any) -> Any:
    """(1, heads, steps, dim) in the model's dtype with `x` at its beginning."""
    import mlx.core as mx

    batch, heads, tokens, dim = x.shape
    buffer = mx.zeros((batch, heads, steps, dim), dtype)
    buffer[..., :tokens, :] = x.astype(dtype)
    return buffer
