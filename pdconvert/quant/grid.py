"""Records of quantized weights: integers with scales, or entries of lookup tables; and rounding to nearest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from pdconvert.errors import InputError
from pdconvert.quant.packing import BLOCK_SCALE_BITS

FP16_MAX = 65504.0
TINIEST_SCALE = 2.0**-24
"""The smallest positive fp16 number; rows below it get all-zero codes."""
SMALLEST_NORMAL = 2.0**-14
"""Below it fp16 numbers are multiples of `TINIEST_SCALE`."""

EXACT_BITS = 7
"""Significant bits of the scales of all grids but the symmetric one of 8 bits. A 4-bit code times such a scale is an
fp16 number, in every executor; and so is a zero point or a block scale, of 4 significant bits, times it."""


class _Stored:
    """What all records have: codes of some bits, and tensors that say what they stand for."""

    codes: Tensor
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def parts(self) -> dict[str, Tensor]:
        """The stored tensors by field."""
        every = ((item.name, getattr(self, item.name)) for item in fields(self))  # type: ignore[arg-type]
        return {name: value for name, value in every if isinstance(value, Tensor)}

    def with_parts(self, parts: Mapping[str, Tensor]) -> Self:
        """The record with other tensors."""
        return replace(self, **parts)  # type: ignore[type-var]

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The record with all parts changed alike."""
        return self.with_parts({name: change(part) for name, part in self.parts().items()})

    def part_bits(self) -> dict[str, int]:
        """Bits that each stored tensor takes in the package."""
        widths = {"codes": self.bits, "zero_points": self.bits, "block_scales": BLOCK_SCALE_BITS}
        return {name: part.numel() * widths.get(name, 16) for name, part in self.parts().items()}

    @property
    def stored_bits(self) -> int:
        """Bits of codes and of everything beside them."""
        return sum(self.part_bits().values())


@dataclass(frozen=True)
class QuantizedLinear(_Stored):
    """The canonical record of one quantized weight; value = (code − zero point) · block scale · scale.

    G is 1 for one scale per output channel, I / group for groups of input channels.

    Attributes:
        codes: int8 (O, I), in −127…127 at 8 bits; with zero points uint8, below 2^bits.
        scales: fp16 (O, G); with block scales (O, 1).
        bits: width of a code.
        group: input channels that share a scale; 0 means all of them.
        zero_points: uint8 (O, G), multiples of 2^(bits−4), of an asymmetric grid; None for zero.
        block_scales: uint8 (O, G), 1 … 15, of an LPBQ grid; None for one.
    """

    codes: Tensor
    scales: Tensor
    bits: int
    group: int = 0
    zero_points: Tensor | None = None
    block_scales: Tensor | None = None

    @property
    def group_scales(self) -> Tensor:
        """fp16 (O, G), block scales multiplied in, which is exact: 4 and `EXACT_BITS` bits are fp16's 11."""
        if self.block_scales is None:
            return self.scales
        return (self.scales.float() * self.block_scales.float()).half()

    @property
    def short_scales(self) -> bool:
        """Whether scales have `EXACT_BITS` significant bits."""
        return self.bits < 8 or self.zero_points is not None or self.block_scales is not None

    def dequantize(self) -> Tensor:
        """The fp32 weight (O, I); exact, since an 8-bit code times an fp16 scale fits fp32."""
        return self.values(self.scales.float())

    def values(self, scales: Tensor) -> Tensor:
        """The weight with fp32 scales in the place of its own; gradients flow through."""
        rows, columns = self.shape
        steps = self.codes.float().view(rows, -1, self.group or columns)
        if self.zero_points is not None:
            steps = steps - self.zero_points.float()[:, :, None]
        if self.block_scales is not None:
            scales = scales * self.block_scales.float()
        return (steps * scales[:, :, None]).view(rows, columns)


@dataclass(frozen=True)
class LutLinear(_Stored):
    """The record of a weight whose values are entries of lookup tables; value = tables[row // rows, code].

    Attributes:
        codes: uint8 (O, I), below 2^bits.
        tables: fp16 (O / rows, 2^bits), ascending.
        bits: width of a code.
        rows: output channels that share a table.
    """

    codes: Tensor
    tables: Tensor
    bits: int
    rows: int

    def dequantize(self) -> Tensor:
        """The fp32 weight (O, I)."""
        grouped = self.codes.reshape(len(self.tables), -1).long()
        return self.tables.float().gather(1, grouped).view(self.codes.shape)


@dataclass(frozen=True)
class AffineLinear(_Stored):
    """A weight on the grid that its checkpoint has, as MLX holds it; value = codes · scales + biases.

    Attributes:
        codes: uint8 (O, I), below 2^bits.
        scales: fp16 (O, I / group).
        biases: fp16 (O, I / group).
        bits: width of a code.
        group: input channels that share a scale and a bias.
    """

    codes: Tensor
    scales: Tensor
    biases: Tensor
    bits: int
    group: int

    def dequantize(self) -> Tensor:
        """The fp32 weight (O, I); the product is exact, the sum rounded once."""
        grouped = self.codes.view(*self.scales.shape, self.group).float()
        values = grouped * self.scales.float()[:, :, None] + self.biases.float()[:, :, None]
        return values.view(self.codes.shape)


Record = QuantizedLinear | LutLinear


SMALLEST_GROUP = 32
"""Input channels that share a scale: fewer are not taken in the place of a size that does not divide."""


def fitting_group(inputs: int, wanted: int = 64) -> int:
    """The group of a weight: the wanted one, or half of it and so on, that divides; 0 (the whole row) where none does.

    Args:
        wanted: by default, that of matrices which only the MLX half holds.
    """
    group = wanted
    while group and inputs % group:
        group = group // 2 if group >= 2 * SMALLEST_GROUP else 0
    return group


def quantize_symmetric(weight: Tensor, bits: int, name: str, group: int = 0) -> QuantizedLinear:
    """Round to nearest on a symmetric grid with fp16 scales.

    The scale is absmax / (2^(bits−1) − 1) rounded to fp16, and codes are chosen for the rounded scale. Among
    fp16's subnormals, which are few, it is the next number above where rounding leaves the largest weight out of
    reach, and where the weights lie on that number's grid alone. So no value is off by more than half a scale, and what
    was quantized before stays as it is.

    Args:
        weight: (O, I), fp32, finite.
        name: the tensor's name, for errors.
        group: input channels that share a scale; 0 for one scale per output channel.

    Raises:
        InputError: a scale, or 2^(bits−1) times it (MLX's bias), exceeds fp16.
    """
    limit = 2 ** (bits - 1) - 1
    rows, columns = weight.shape
    grouped = weight.reshape(rows, -1, group or columns)
    peaks = grouped.abs().amax(2)
    scales = (peaks / limit).clamp_min(TINIEST_SCALE).half()
    few = scales < SMALLEST_NORMAL
    scales[few] = _subnormal_scales(grouped[few], scales[few], limit)
    if scales.float().max() * (limit + 1) > FP16_MAX:
        raise InputError(
            f"{name}: weights up to {weight.abs().max().item():.4g} do not fit an fp16 grid of {bits} bits; "
            "leave quantize_weights out of the recipe for this model, or rescale the checkpoint"
        )
    codes = _codes(grouped, scales, limit).to(torch.int8)
    return QuantizedLinear(codes.view(rows, columns), scales, bits, group)


def _codes(groups: Tensor, scales: Tensor, limit: int) -> Tensor:
    """The nearest codes, fp32 (..., I), of weights (..., I) with fp16 scales (...)."""
    return (groups / scales.float()[..., None]).round_().clamp_(-limit, limit)


def _subnormal_scales(groups: Tensor, nearest: Tensor, limit: int) -> Tensor:
    """Each scale, or the fp16 number above it, for weights (N, I) and the scales (N,) nearest to peak / limit."""
    above = (nearest.view(torch.int16) + 1).view(torch.float16)
    out_of_reach = nearest.float() * (limit + 0.5) < groups.abs().amax(1)
    here, there = (
        (_codes(groups, scales, limit) * scales.float()[:, None] == groups).all(1)
        for scales in (nearest, above)
    )
    return torch.where(out_of_reach | (there & ~here), above, nearest)
