"""Blocks of GGUF files on MLX's affine grid: 32 codes with an fp16 scale and bias, without a new rounding.

| type | a block in the file | value | as MLX has it |
|---|---|---|---|
| Q4_0 | fp16 d, 16 bytes | d · (u − 8) | u · d + (−8 d) |
| Q4_1 | fp16 d, fp16 m, 16 bytes | d · u + m | u · d + m |
| Q8_0 | fp16 d, 32 × int8 q | d · q | (q + 128) · d + (−128 d) |

Byte i of a 4-bit block holds code i in its low half and code i + 16 in its high half. A bias of −8 d or −128 d is exact
unless it exceeds fp16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdconvert.quant.grid import AffineLinear
    from pdconvert.sources.gguf_header import GgufTensor

BLOCK = 32
"""Values in a block of these types."""
GRIDS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8, "F16": 16}
"""Types of matrices that MLX can hold as they are, and their bits; F16 has no grid."""


def affine(raw: bytes, tensor: GgufTensor) -> AffineLinear:
    """Stored rows as codes, scales and biases.

    Args:
        raw: whole rows, in the order of the result.
        tensor: a matrix of type Q4_0, Q4_1 or Q8_0.
    """
    import numpy as np
    import torch

    from pdconvert.quant.grid import AffineLinear

    rows, columns = len(raw) // tensor.row_bytes, tensor.shape[-1]
    blocks = np.frombuffer(raw, np.uint8).reshape(rows, columns // BLOCK, -1)
    halves = 4 if tensor.type_name == "Q4_1" else 2
    numbers = np.ascontiguousarray(blocks[..., :halves]).view("<f2")
    scales, data = numbers[..., 0], blocks[..., halves:]
    bits = 8 if tensor.type_name == "Q8_0" else 4
    codes = data ^ np.uint8(128) if bits == 8 else np.concatenate((data & 15, data >> 4), -1)
    with np.errstate(over="ignore"):
        biases = numbers[..., 1] if halves == 4 else scales * np.float16(-(1 << bits - 1))
    parts = (codes.reshape(rows, columns), scales, biases)
    held = [torch.from_numpy(np.ascontiguousarray(part)) for part in parts]
    return AffineLinear(held[0], held[1], held[2], bits, BLOCK)
