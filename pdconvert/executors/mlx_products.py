"""Replaces the matrix products of a loaded mlx-lm model by fp32 ones that torch computes.

An affine MLX weight is u · scale + bias. In fp32 this is exact for codes of up to 8 bits and fp16 scales,
so the replaced product differs from MLX's own only by the order of its sums.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from mlx.utils import tree_flatten, tree_unflatten
from torch import Tensor
from torch.nn import functional as nn_functional

from pdconvert.errors import CheckFailed
from pdconvert.quant.packing import unpack_words

CHUNK_VALUES = 1 << 24
"""De-quantized values in memory at a time: 64 MiB."""

AGREEMENT = 1e-4
"""Largest difference from MLX's product, relative to the largest output; fp32 sums differ by 1e-6."""


def replace_products(model: nn.Module, keep_bytes: int) -> None:
    """Replaces every linear and embedding of a model, quantized or not, in place.

    Args:
        model: an mlx-lm model on the CPU.
        keep_bytes: fp32 weights stay in memory if all of them together are not larger.

    Raises:
        CheckFailed: for a replaced module, MLX's own product of a seeded row differs.
    """
    modules = [
        (path, module)
        for path, module in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
        if type(module) in (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding)
    ]
    weights = [Weight(module) for _, module in modules]
    keep = 4 * sum(weight.outputs * weight.inputs for weight in weights) <= keep_bytes
    replaced = []
    with _one_thread():
        for (path, module), weight in zip(modules, weights, strict=True):
            embedding = isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
            new = ExactEmbedding(weight) if embedding else ExactLinear(weight, module.get("bias"))
            _compare(path, module, new)
            if keep:
                weight.keep()
            replaced.append((path, new))
    model.update_modules(tree_unflatten(replaced))


@contextmanager
def _one_thread() -> Iterator[None]:
    """torch on one thread: products of one row are too small to gain from more, and lose when cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Weight:
    """A weight matrix (O, I) that gives fp32 rows; its memory is MLX's own buffer until it is kept."""

    def __init__(self, module: nn.Module):
        self._values: np.ndarray = np.asarray(module.weight)
        self._bits = module.bits if "scales" in module else 0
        self.outputs, columns = self._values.shape
        self.inputs = columns * 32 // self._bits if self._bits else columns
        if self._bits:
            self._scales, self._biases = (
                torch.from_numpy(np.array(module[part].astype(mx.float32))) for part in ("scales", "biases")
            )

    def keep(self) -> None:
        """De-quantizes once and for all."""
        self._values, self._bits = self.rows(slice(None)).numpy(), 0

    def rows(self, index: Any) -> Tensor:
        """Rows (R, I) in fp32, for a slice or an array of row numbers."""
        if not self._bits:
            return torch.from_numpy(self._values[index]).float()
        codes = torch.from_numpy(unpack_words(self._values[index], self._bits))
        scales, biases = self._scales[index], self._biases[index]
        grouped = codes.view(len(codes), scales.shape[1], -1).float()
        return grouped.mul_(scales[:, :, None]).add_(biases[:, :, None]).view(len(codes), self.inputs)

    def product(self, x: mx.array) -> mx.array:
        """x · Wᵀ for x (..., I); (..., O) in fp32."""
        left = torch.from_numpy(np.array(x.astype(mx.float32))).view(-1, self.inputs)
        out = torch.empty(len(left), self.outputs)
        step = max(1, CHUNK_VALUES // self.inputs)
        for start in range(0, self.outputs, step):
            part = slice(start, start + step)
            torch.matmul(left, self.rows(part).T, out=out[:, part])
        return mx.array(out.numpy()).reshape(*x.shape[:-1], self.outputs)


class ExactLinear(nn.Module):
    """y = x · Wᵀ + b."""

    def __init__(self, weight: Weight, bias: mx.array | None):
        super().__init__()
        self.exact = weight
        if bias is not None:
            self.bias = bias

    def __call__(self, x: mx.array) -> mx.array:
        y = self.exact.product(x)
        return y + self.bias if "bias" in self else y


class ExactEmbedding(nn.Module):
    """Rows of W for token ids, and x · Wᵀ where the head is tied to it."""

    def __init__(self, weight: Weight):
        super().__init__()
        self.exact = weight

    def __call__(self, ids: mx.array) -> mx.array:
        numbers = np.array(ids)
        rows = self.exact.rows(numbers.reshape(-1)).numpy()
        return mx.array(rows).reshape(*ids.shape, self.exact.inputs)

    def as_linear(self, x: mx.array) -> mx.array:
        return self.exact.product(x)


@contextmanager
def torch_attention(model: nn.Module) -> Iterator[None]:
    """Within the block, attention of many query rows is torch's; mlx-lm's function returns afterwards.

    Every model file of mlx-lm calls `scaled_dot_product_attention` by its own global name, which is what
    is exchanged. A model without that name keeps its attention, which is slower and as right.
    """
    module, name = sys.modules[type(model).__module__], "scaled_dot_product_attention"
    stock = getattr(module, name, None)
    if stock is None:
        yield
        return
    setattr(module, name, partial(_attention, stock))
    try:
        yield
    finally:
        setattr(module, name, stock)


def _attention(
    stock: Any,
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: mx.array | str | None,
    sinks: Any = None,
) -> mx.array:
    """softmax(q · kᵀ · scale + mask) · v; q (1, heads, n, D), k and v (1, kv_heads, K, D)."""
    rows = queries.shape[2]
    if rows == 1 or sinks is not None or hasattr(cache, "bits"):
        return stock(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
    q, k, v = (torch.from_numpy(np.array(x.astype(mx.float32))) for x in (queries, keys, values))
    allowed = None if mask is None else torch.ones(rows, k.shape[2], dtype=torch.bool)
    if isinstance(mask, mx.array):
        allowed = torch.from_numpy(np.array(mask))
    elif allowed is not None:
        allowed = allowed.tril(k.shape[2] - rows)
    out = nn_functional.scaled_dot_product_attention(q, k, v, allowed, scale=scale, enable_gqa=True)
    return mx.array(out.numpy())


def _compare(path: str, stock: Any, new: Any) -> None:
    """Runs one seeded row through MLX's module and its replacement."""
    stock.set_dtype(mx.float32)
    row = np.random.default_rng(0).standard_normal((1, new.exact.inputs), np.float32)
    x = mx.array(row)
    linear = isinstance(new, ExactLinear)
    theirs, ours = (np.array((m if linear else m.as_linear)(x)) for m in (stock, new))
    difference = float(np.abs(theirs - ours).max() / max(np.abs(theirs).max(), np.finfo(np.float32).tiny))
    if not difference <= AGREEMENT:
        raise CheckFailed(
            f"{path}: MLX's own product differs from the de-quantized one by {difference:.2g} of its largest "
            "value; MLX is not reliable on this machine"
        )
