"""Records of quantized weights: symmetric integers, or entries of lookup tables; and rounding to nearest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdconvert.errors import InputError

FP16_MAX = 65504.0
TINIEST_SCALE = 2.0**-24
"""The smallest positive fp16 number; rows below it get all-zero codes."""


@dataclass(frozen=True)
class QuantizedLinear:
    """The canonical record of one quantized weight; value = codes · scales.

    Attributes:
        codes: int8 (O, I), in −127…127 at 8 bits.
        scales: fp16 (O, 1) for one scale per output channel, (O, I / group) for groups of input channels.
        bits: width of a code.
        group: input channels that share a scale; 0 means all of them.
    """

    codes: Tensor
    scales: Tensor
    bits: int
    group: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def stored_bits(self) -> int:
        """Bits of codes and scales."""
        return self.codes.numel() * self.bits + 16 * self.scales.numel()

    def dequantize(self) -> Tensor:
        """The fp32 weight (O, I); exact, since an 8-bit code times an fp16 scale fits fp32."""
        codes = self.codes.float()
        if not self.group:
            return codes * self.scales.float()
        rows, columns = self.shape
        return (codes.view(rows, -1, self.group) * self.scales.float()[:, :, None]).view(rows, columns)


@dataclass(frozen=True)
class LutLinear:
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

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def stored_bits(self) -> int:
        """Bits of codes and tables."""
        return self.codes.numel() * self.bits + 16 * self.tables.numel()

    def dequantize(self) -> Tensor:
        """The fp32 weight (O, I)."""
        grouped = self.codes.reshape(len(self.tables), -1).long()
        return self.tables.float().gather(1, grouped).view(self.codes.shape)


@dataclass(frozen=True)
class AffineLinear:
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

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def stored_bits(self) -> int:
        """Bits of codes, scales and biases."""
        return self.codes.numel() * self.bits + 16 * (self.scales.numel() + self.biases.numel())

    def dequantize(self) -> Tensor:
        """The fp32 weight (O, I); the product is exact, the sum rounded once."""
        grouped = self.codes.view(*self.scales.shape, self.group).float()
        values = grouped * self.scales.float()[:, :, None] + self.biases.float()[:, :, None]
        return values.view(self.codes.shape)


Record = QuantizedLinear | LutLinear


DECODE_GROUPS = (64, 32)
"""Input channels that share a scale in matrices that only the MLX half holds, the first that divides."""


def decode_group(inputs: int) -> int:
    """The group for a matrix that only the MLX half holds; 0 (the whole row) where none divides."""
    return next((group for group in DECODE_GROUPS if inputs % group == 0), 0)


def quantize_symmetric(weight: Tensor, bits: int, name: str, group: int = 0) -> QuantizedLinear:
    """Round to nearest on a symmetric grid with fp16 scales.

    The scale is absmax / (2^(bits−1) − 1) rounded to fp16, and codes are chosen for the rounded scale. Among
    fp16's subnormals rounding can lower the scale so far that the largest weight is out of reach; there it is
    rounded up. So no value is off by more than half a scale.

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
    short = scales.float() * (limit + 0.5) < peaks
    scales = (scales.view(torch.int16) + short).view(torch.float16)  # the next fp16 number above, where short
    if scales.float().max() * (limit + 1) > FP16_MAX:
        raise InputError(
            f"{name}: weights up to {weight.abs().max().item():.4g} do not fit an fp16 grid of {bits} bits; "
            "leave quantize_weights out of the recipe for this model, or rescale the checkpoint"
        )
    codes = (grouped / scales.float()[:, :, None]).round_().clamp_(-limit, limit).to(torch.int8)
    return QuantizedLinear(codes.view(rows, columns), scales, bits, group)
