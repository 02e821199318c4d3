"""Packing of integer codes into the uint32 words of MLX's affine quantization, and back.

MLX stores `32 / bits` codes in one word, the first code of a row in the lowest bits. On a
little-endian machine a row of words is therefore the row of codes as a plain bit stream, so that
8-bit codes are only viewed as words and 4-bit codes are paired into bytes first.

A symmetric record has signed codes `c` in [-2^(bits-1), 2^(bits-1) - 1] and value `c · scale`. MLX
computes `u · scale + bias` with unsigned `u`; with `u = c + 2^(bits-1)` and `bias = -2^(bits-1) · scale`
both agree exactly, because a multiplication by a power of two does not round.
"""

from __future__ import annotations

import numpy as np

BLOCK_SCALE_BITS = 4
"""Of the whole numbers, 1 … 15, that an LPBQ grid multiplies its scales by."""

PACKED_BITS = (2, 4, 8)
"""Widths whose codes never straddle two words."""


def code_offset(bits: int) -> int:
    """Distance 2^(bits-1) between a signed code and its unsigned form."""
    _check_bits(bits)
    return 1 << (bits - 1)


def unsigned_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Signed codes as MLX's unsigned ones: `codes + 2^(bits-1)`.

    Args:
        codes: (..., I) int8, each in [-2^(bits-1), 2^(bits-1) - 1].
        bits: width of a code.

    Returns:
        (..., I) uint8.

    Raises:
        ValueError: codes that are not int8, or one that does not fit in `bits`.
    """
    offset = code_offset(bits)
    if codes.dtype != np.int8:
        raise ValueError(f"codes have dtype {codes.dtype}, expected int8")
    if codes.size and bits < 8 and not (-offset <= codes.min() and codes.max() < offset):
        raise ValueError(f"codes span {codes.min()}..{codes.max()}, which {bits} bits do not hold")
    return (codes + np.int8(offset)).view(np.uint8) if bits < 8 else codes.view(np.uint8) ^ np.uint8(offset)


def signed_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned codes (..., I) uint8 back to signed ones (..., I) int8."""
    offset = code_offset(bits)
    return codes.view(np.int8) - np.int8(offset) if bits < 8 else (codes ^ np.uint8(offset)).view(np.int8)


def pack_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes packed as MLX packs them.

    Args:
        codes: (..., I) uint8, each below 2^bits; I · bits is a multiple of 32.
        bits: width of a code, one of `PACKED_BITS`.

    Returns:
        (..., I · bits / 32) uint32.

    Raises:
        ValueError: another dtype, a row that does not fill its last word, or a code of more than `bits` bits.
    """
    _check_bits(bits)
    if codes.dtype != np.uint8:
        raise ValueError(f"codes have dtype {codes.dtype}, expected uint8")
    if codes.shape[-1] * bits % 32:
        raise ValueError(f"a row of {codes.shape[-1]} codes of {bits} bits does not fill its 32-bit words")
    if codes.size and int(codes.max()) >> bits:
        raise ValueError(f"code {codes.max()} has more than {bits} bits")
    per_byte = 8 // bits
    packed = np.zeros((*codes.shape[:-1], codes.shape[-1] // per_byte), np.uint8)
    for place in range(per_byte):
        packed |= codes[..., place::per_byte] << np.uint8(bits * place)
    return packed.view("<u4").astype(np.uint32, copy=False)


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `pack_words`: (..., W) uint32 to (..., W · 32 / bits) uint8."""
    _check_bits(bits)
    if words.dtype != np.uint32:
        raise ValueError(f"words have dtype {words.dtype}, expected uint32")
    packed = np.ascontiguousarray(words).astype("<u4", copy=False).view(np.uint8)
    per_byte = 8 // bits
    if per_byte == 1:
        return packed
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * per_byte), np.uint8)
    for place in range(per_byte):
        codes[..., place::per_byte] = packed >> np.uint8(bits * place) & np.uint8((1 << bits) - 1)
    return codes


def _check_bits(bits: int) -> None:
    if bits not in PACKED_BITS:
        raise ValueError(f"{bits} bits cannot be packed, expected one of {', '.join(map(str, PACKED_BITS))}")
