"""The grids that weights are rounded to, on whatever device they are on; records of them go into the store."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor

from pdconvert.errors import InputError
from pdconvert.quant.clustering import cluster_rows
from pdconvert.quant.grid import (
    EXACT_BITS,
    FP16_MAX,
    TINIEST_SCALE,
    LutLinear,
    QuantizedLinear,
)
from pdconvert.quant.packing import BLOCK_SCALE_BITS
from pdconvert.quant.rounding import damped


@dataclass(frozen=True)
class IntegerGrid:
    """(code − zero point) · scale, one scale per row or group of columns.

    Codes are −2^(b−1) … 2^(b−1) − 1 (8 bits: from −127), with zero points 0 … 2^b − 1.

    Attributes:
        scales: (O, G) float32 with fp16 values, block scales multiplied in.
        group: columns that share a scale; 0 means all of them.
        zero_points: (O, G) float32, whole; None for zero.
        block_scales: (O, G) float32, whole; None for one.
    """

    scales: Tensor
    bits: int
    group: int = 0
    zero_points: Tensor | None = None
    block_scales: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> IntegerGrid:
        """The grid with its scales and its zero points changed alike."""
        zeros = None if self.zero_points is None else change(self.zero_points)
        return replace(self, scales=change(self.scales), zero_points=zeros)

    def column(self, index: int) -> IntegerGrid:
        """One group's scale and zero point, (O, 1)."""
        return self.each(lambda part: part[:, index : index + 1])

    @property
    def lowest(self) -> int:
        return -127 if self.bits == 8 else -(1 << self.bits - 1)

    def _at(self, part: Tensor, columns: Tensor) -> Tensor:
        return part[:, columns // self.group] if self.group else part

    def nearest(self, values: Tensor, columns: Tensor) -> Tensor:
        steps = (values / self._at(self.scales, columns)).round_()
        if self.zero_points is None:
            return steps.clamp_(self.lowest, (1 << self.bits - 1) - 1).to(torch.int8)
        return steps.add_(self._at(self.zero_points, columns)).clamp_(0, (1 << self.bits) - 1).to(torch.uint8)

    def values(self, codes: Tensor, columns: Tensor) -> Tensor:
        steps = codes.float()
        if self.zero_points is not None:
            steps -= self._at(self.zero_points, columns)
        return steps * self._at(self.scales, columns)

    def record(self, codes: Tensor) -> QuantizedLinear:
        """The stored form of codes (O, I)."""
        scales, blocks, zeros = self.scales, self.block_scales, self.zero_points
        if blocks is not None:  # exact, since the product was
            scales, blocks = scales[:, :1] / blocks[:, :1], blocks.to(torch.uint8).cpu()
        zeros = None if zeros is None else zeros.to(torch.uint8).cpu()
        return QuantizedLinear(codes.cpu(), scales.half().cpu(), self.bits, self.group, zeros, blocks)


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
    largest = weight.abs().max().item()
    if not largest <= FP16_MAX:
        _refuse(largest, name, bits)
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


def snapped(scales: Tensor, short: bool, *, up: bool = False) -> Tensor:
    """Scales as fp16 numbers.

    Args:
        short: with no more than `EXACT_BITS` significant bits.
        up: never below what they were.
    """
    scales = scales.clamp_min(TINIEST_SCALE)
    if short:
        exponent = (torch.frexp(scales).exponent - EXACT_BITS).clamp_min(-24)  # 2^-24 is fp16's finest step
        steps = torch.ldexp(scales, -exponent)
        scales = torch.ldexp(steps.ceil() if up else steps.round(), exponent)
    return scales.half().float()


def integer_grid(
    weight: Tensor,
    gram: Tensor | None,
    bits: int,
    group: int,
    name: str,
    *,
    symmetric: bool = True,
    lpbq: bool = False,
) -> IntegerGrid:
    """Scales (and zero points) that minimise the error of the outputs after rounding to nearest.

    This is SeqMSE by Gram matrices. A zero point has 4 significant bits, so that MLX's bias −zero point · scale is an
    fp16 number.

    Args:
        weight: (O, I) float32.
        gram: (I, I), XᵀX; None takes the least scales that reach every weight.
        group: columns that share a scale; 0 means all.
        name: of the tensor, for errors.
        symmetric: about 0, without zero points.
        lpbq: scales are whole multiples, 1 … 15, of one per row (low-power block quantization); symmetric only.

    Raises:
        InputError: a scale, or MLX's bias of it, exceeds fp16.
    """
    groups = weight.reshape(len(weight), -1, group or weight.shape[1])
    start = _symmetric_start(groups, bits) if symmetric else _asymmetric_start(groups, bits)
    _check_grid(start, name)
    short = bits < 8 or lpbq or not symmetric
    matrix = None if gram is None else damped(gram)

    def shares(one: IntegerGrid) -> IntegerGrid:
        return _shares(one, short)

    if matrix is None:
        found = replace(start, scales=snapped(start.scales, short, up=lpbq or not symmetric))
    else:
        found = _searched(weight, matrix, start, shares)
    if lpbq:
        found = _on_multiples(weight, matrix, found)
    _check_grid(found, name)
    return replace(found, group=group)


def _symmetric_start(groups: Tensor, bits: int) -> IntegerGrid:
    """The grid by the largest magnitude in each group; `groups` is (O, G, columns)."""
    return IntegerGrid(groups.abs().amax(2) / (2 ** (bits - 1) - 1), bits)


def _asymmetric_start(groups: Tensor, bits: int) -> IntegerGrid:
    """The grid with the least scales that reach the lowest and the highest weight of each group, and 0."""
    low, high = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
    zeros = torch.arange(0, 1 << bits, _zero_step(bits), dtype=torch.float32, device=groups.device)
    sides = -low / zeros[:, None, None], high / ((1 << bits) - 1 - zeros)[:, None, None]
    below, above = (side.nan_to_num(0, posinf=math.inf) for side in sides)  # 0 / 0: nothing to reach
    needed = torch.maximum(below, above)
    least = needed.min(0)
    scales = torch.where((high - low).isfinite(), least.values, math.nan)
    return IntegerGrid(scales, bits, zero_points=zeros[least.indices])


def _zero_step(bits: int) -> int:
    """Distance of two zero points: 16 of them whatever the bits."""
    return 1 << bits - 4


def _check_grid(grid: IntegerGrid, name: str) -> None:
    """Whether fp16 holds all values of a grid, and MLX's biases.

    Raises:
        InputError: it does not.
    """
    steps: Tensor | int = 1 << grid.bits - 1
    if grid.zero_points is not None:
        steps = torch.maximum(grid.zero_points, (1 << grid.bits) - 1 - grid.zero_points)
    if not (grid.scales * steps).max() <= FP16_MAX:
        _refuse(grid.scales.max().item(), name, grid.bits)


def _refuse(largest: float, name: str, bits: int) -> NoReturn:
    raise InputError(
        f"{name}: weights do not fit an fp16 grid of {bits} bits (largest {largest:.4g}); leave "
        "quantize_weights out of the recipe for this model, or rescale the checkpoint"
    )


def _shares(one: IntegerGrid, short: bool) -> IntegerGrid:
    """Grids to choose from, (O, N): shares of the scale, each with the zero point and its neighbours."""
    steps = torch.linspace(LOWEST_SHARE, 1, SHARES, device=one.scales.device)
    scales = snapped(one.scales * steps, short)
    if one.zero_points is None:
        return replace(one, scales=scales)
    step = _zero_step(one.bits)
    zeros = torch.cat(
        [(one.zero_points + move).clamp(0, (1 << one.bits) - step) for move in (0, -step, step)], 1
    )
    return replace(one, scales=scales.repeat(1, 3), zero_points=zeros.repeat_interleave(SHARES, 1))


def _on_multiples(weight: Tensor, gram: Tensor | None, grid: IntegerGrid) -> IntegerGrid:
    """An LPBQ grid near a plain one: one scale per row, of which each group takes a whole multiple."""
    most = (1 << BLOCK_SCALE_BITS) - 1
    channel = snapped(grid.scales.amax(1, keepdim=True) / most, short=True, up=True)
    multiples = torch.arange(1, most + 1, device=channel.device)
    if gram is None:
        limit = (1 << grid.bits - 1) - 1  # the largest weight may lie nearly half a step beyond it
        blocks = (grid.scales / channel * (limit / (limit + 0.49))).ceil().clamp(1, most)
    else:
        found = _searched(weight, gram, grid, lambda one: replace(one, scales=channel * multiples))
        blocks = (found.scales / channel).round()
    return replace(grid, scales=channel * blocks, block_scales=blocks)


def _searched(
    weight: Tensor, gram: Tensor, start: IntegerGrid, options: Callable[[IntegerGrid], IntegerGrid]
) -> IntegerGrid:
    """The best grid for each group of columns by itself.

    Args:
        start: (O, G).
        options: the grid of one group, (O, 1), → the grids to choose from, (O, N).
    """
    count = start.scales.shape[1]
    size = weight.shape[1] // count
    found = []
    for index in range(count):
        columns = slice(index * size, (index + 1) * size)
        found.append(_best(weight[:, columns], gram[columns, columns], options(start.column(index))))
    zeros = [one.zero_points for one in found if one.zero_points is not None]
    scales = torch.cat([one.scales for one in found], 1)
    return replace(start, scales=scales, zero_points=torch.cat(zeros, 1) if zeros else None)


def _best(weight: Tensor, gram: Tensor, options: IntegerGrid) -> IntegerGrid:
    """One grid per row: the diagonal of the Gram matrix chooses finalists, the whole of it the best of them."""
    columns = torch.arange(weight.shape[1], device=weight.device)

    def chosen(index: Tensor) -> IntegerGrid:
        return options.each(lambda part: part.gather(1, index))

    def error(index: Tensor) -> Tensor:
        grid = chosen(index)
        return weight - grid.values(grid.nearest(weight, columns), columns)

    every = torch.arange(options.scales.shape[1], device=weight.device).expand(options.scales.shape)
    rough = torch.stack([error(at) ** 2 @ gram.diagonal() for at in every.split(1, 1)], 1)
    finalists = rough.topk(FINALISTS, dim=1, largest=False).indices
    losses = torch.stack([((part := error(at)) @ gram * part).sum(1) for at in finalists.split(1, 1)], 1)
    return chosen(finalists.gather(1, losses.argmin(1, keepdim=True)))
