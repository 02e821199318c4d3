"""The grids that weights are rounded to, on whatever device they are on; records of them go into the store."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdconvert.errors import InputError
from pdconvert.quant.clustering import cluster_rows
from pdconvert.quant.grid import FP16_MAX, TINIEST_SCALE, LutLinear, QuantizedLinear
from pdconvert.quant.rounding import damped

EXACT_BITS = 7
"""Significant bits of a 4-bit grid's scales: code times scale is then an fp16 number, in every executor."""


@dataclass(frozen=True)
class IntegerGrid:
    """code · scale, codes −2^(b−1) … 2^(b−1) − 1 (8 bits: from −127), one scale per row or group of columns.

    Attributes:
        scales: (O, G) float32 with fp16 values.
        group: columns that share a scale; 0 means all of them.
    """

    scales: Tensor
    bits: int
    group: int = 0

    @property
    def lowest(self) -> int:
        return -127 if self.bits == 8 else -(1 << self.bits - 1)

    def _scales(self, columns: Tensor) -> Tensor:
        return self.scales[:, columns // self.group] if self.group else self.scales

    def nearest(self, values: Tensor, columns: Tensor) -> Tensor:
        highest = (1 << self.bits - 1) - 1
        return (values / self._scales(columns)).round_().clamp_(self.lowest, highest).to(torch.int8)

    def values(self, codes: Tensor, columns: Tensor) -> Tensor:
        return codes.float() * self._scales(columns)

    def record(self, codes: Tensor) -> QuantizedLinear:
        """The stored form of codes (O, I)."""
        return QuantizedLinear(codes.cpu(), self.scales.half().cpu(), self.bits, self.group)


@dataclass(frozen=True)
class TableGrid:
    """Entries of lookup tables, one table per group of output channels.

    Attributes:
        tables: (O / rows, 2^bits) float32 with fp16 values, ascending.
        rows: output channels that share a table.
    """

    tables: Tensor
    bits: int
    rows: int

    def nearest(self, values: Tensor, columns: Tensor) -> Tensor:
        grouped = values.reshape(len(self.tables), -1)
        middles = (self.tables[:, 1:] + self.tables[:, :-1]) / 2
        return torch.searchsorted(middles, grouped.contiguous()).view(values.shape).to(torch.uint8)

    def values(self, codes: Tensor, columns: Tensor) -> Tensor:
        grouped = codes.reshape(len(self.tables), -1).long()
        return self.tables.gather(1, grouped).view(codes.shape)

    def record(self, codes: Tensor) -> LutLinear:
        """The stored form of codes (O, I)."""
        return LutLinear(codes.cpu(), self.tables.half().cpu(), self.bits, self.rows)


def table_grid(weight: Tensor, importance: Tensor, bits: int, rows: int, name: str) -> TableGrid:
    """Tables by k-means on a weight (O, I), columns weighted by `importance` (I,).

    Raises:
        InputError: a weight exceeds fp16.
    """
    _check_range(weight, 1, name, bits)
    weights = (importance / importance.mean().clamp_min(torch.finfo(importance.dtype).tiny)).repeat(rows)[
        None
    ]
    grouped = weight.reshape(-1, rows * weight.shape[1])
    parts = [
        cluster_rows(part, weights, 1 << bits) for part in grouped.split(max(1, CHUNK // grouped.shape[1]))
    ]
    return TableGrid(torch.cat(parts).half().float(), bits, rows)


CHUNK = 1 << 21
"""Weights that are clustered together: bounds the memory for sorting them."""

SHARES = 24
LOWEST_SHARE = 0.4
FINALISTS = 5


def snapped(scales: Tensor, bits: int) -> Tensor:
    """Scales as fp16 numbers; at 4 bits and below with `EXACT_BITS` significant bits."""
    scales = scales.clamp_min(TINIEST_SCALE)
    if bits < 8:
        fraction, exponent = torch.frexp(scales)
        scales = torch.ldexp((fraction * 2**EXACT_BITS).round(), exponent - EXACT_BITS)
    return scales.half().float()


def integer_grid(weight: Tensor, gram: Tensor | None, bits: int, group: int, name: str) -> IntegerGrid:
    """Scales that minimise the error of the outputs after rounding to nearest (SeqMSE, by Gram matrices).

    Args:
        weight: (O, I) float32.
        gram: (I, I), XᵀX; None takes absmax scales.
        group: columns that share a scale; 0 means all.
        name: of the tensor, for errors.

    Raises:
        InputError: a scale, or MLX's bias of it, exceeds fp16.
    """
    outputs, inputs = weight.shape
    size = group or inputs
    base = weight.reshape(outputs, -1, size).abs().amax(2) / (2 ** (bits - 1) - 1)
    _check_range(base, 2 ** (bits - 1), name, bits)
    if gram is None:
        return IntegerGrid(snapped(base, bits), bits, group)
    matrix, best = damped(gram), torch.empty_like(base)
    for index in range(inputs // size):
        columns = slice(index * size, (index + 1) * size)
        best[:, index] = _best_scale(weight[:, columns], matrix[columns, columns], base[:, index], bits)
    return IntegerGrid(best, bits, group)


def _check_range(values: Tensor, factor: int, name: str, bits: int) -> None:
    largest = values.abs().max().item()
    if not largest * factor <= FP16_MAX:
        raise InputError(
            f"{name}: weights do not fit an fp16 grid of {bits} bits (largest {largest:.4g}); leave "
            "quantize_weights out of the recipe for this model, or rescale the checkpoint"
        )


def _best_scale(weight: Tensor, gram: Tensor, base: Tensor, bits: int) -> Tensor:
    """One scale per row: the diagonal of the Gram matrix chooses finalists, the whole of it the best of them."""
    columns = torch.arange(weight.shape[1], device=weight.device)
    shares = torch.linspace(LOWEST_SHARE, 1, SHARES, device=weight.device)
    candidates = torch.stack([snapped(base * share, bits) for share in shares])

    def error(scale: Tensor) -> Tensor:
        grid = IntegerGrid(scale[:, None], bits)
        return weight - grid.values(grid.nearest(weight, columns), columns)

    rough = torch.stack([error(scale) ** 2 @ gram.diagonal() for scale in candidates])
    finalists = rough.topk(FINALISTS, dim=0, largest=False).indices
    chosen = candidates.gather(0, finalists)
    losses = torch.stack([((part := error(scale)) @ gram * part).sum(1) for scale in chosen])
    return chosen.gather(0, losses.argmin(0)[None])[0]
