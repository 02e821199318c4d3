"""Compressed constants (`constexpr_*` of iOS 16 to 18), `quantize` and `dequantize`.

All arithmetic is fp32: a code of at most 8 bits times an fp16 scale is exact there. In fp16 mode the
session rounds the result, as a device that stores the decompressed weight in fp16 does.
"""

from collections.abc import Sequence

import torch

from pdconvert.executors.mil import dtypes
from pdconvert.executors.mil.blob import unpack_bits
from pdconvert.executors.mil.ops.row import OpRow, positive, row

Tensor = torch.Tensor


def _blocks(x: Tensor, blocks: Sequence[int]) -> Tensor:
    """View x (d0, d1, ...) as (b0, d0 / b0, b1, d1 / b1, ...)."""
    sizes: list[int] = []
    for size, count in zip(x.shape, blocks, strict=True):
        if count == 0 or size % count:
            raise ValueError(f"{size} elements cannot be divided into {count} blocks")
        sizes += [count, size // count]
    return x.reshape(sizes)


def _per_block(x: Tensor) -> Tensor:
    """View one value a block (b0, b1, ...) as (b0, 1, b1, 1, ...)."""
    return x.reshape([size for count in x.shape for size in (count, 1)])


def constexpr_blockwise_shift_scale(data: Tensor, scale: Tensor, offset: Tensor | None = None) -> Tensor:
    """scale * (data - offset) with one scale and offset for each block of data.

    Args:
        data: (d0, d1, ...) integers, or floats where the data is itself the result of another constexpr.
        scale: (b0, b1, ...) with d_i divisible by b_i.
        offset: integers or floats of the shape of scale.
    """
    values = data.to(torch.float32, copy=True)
    parts = _blocks(values, scale.shape)
    if offset is not None:
        parts -= _per_block(offset.to(torch.float32))
    parts *= _per_block(scale)
    return values


def _along(vector: Tensor, rank: int, axis: int | None) -> Tensor:
    """Shape a scalar or a vector along `axis` so that it broadcasts to `rank` axes, as fp32."""
    if vector.dim() == 0 or axis is None:
        return vector.to(torch.float32)
    sizes = [1] * rank
    sizes[positive(axis, rank)] = -1
    return vector.to(torch.float32).reshape(sizes)


def constexpr_affine_dequantize(
    quantized_data: Tensor, zero_point: Tensor, scale: Tensor, *, axis: int = 0
) -> Tensor:
    """scale * (quantized_data - zero_point); both scalars, or vectors along `axis`."""
    rank = quantized_data.dim()
    values = quantized_data.to(torch.float32)
    values -= _along(zero_point, rank, axis)
    values *= _along(scale, rank, axis)
    return values


def constexpr_cast(source_val: Tensor, *, output_dtype: str = "fp32") -> Tensor:
    """fp16 constants as fp32."""
    return source_val.to(getattr(torch, dtypes.BY_NAME[output_dtype].torch))


def constexpr_lut_to_dense(
    indices: Tensor, lut: Tensor, *, shape: Sequence[int] | None = None, vector_axis: int | None = None
) -> Tensor:
    """Replace indices by the entries of look-up tables.

    Args:
        indices: iOS 16: packed bits (M,) uint8; iOS 18: (d0, d1, ...) one index an element.
        lut: iOS 16: (palettes,); iOS 18: (b0, b1, ..., palettes, vector size), one table a block.
        shape: iOS 16 only: shape of the result.
        vector_axis: axis along which the entries of a vector table lie.
    """
    if shape is not None:
        bits = lut.numel().bit_length() - 1
        raw, sizes = indices.numpy(), tuple(shape)
        index = unpack_bits(raw, dtypes.BY_NAME[f"uint{bits}"], sizes) if bits < 8 else raw.reshape(sizes)
        return torch.from_numpy(lut.numpy()[index])
    # numpy looks up with uint8 indices; torch would widen them to int64 and takes four times as long
    palettes, vector = lut.shape[-2:]
    tables = lut.reshape(-1, vector).numpy()
    index = indices.numpy()
    if tables.shape[0] != palettes:
        first = torch.arange(0, tables.shape[0], palettes, dtype=torch.int32).reshape(lut.shape[:-2])
        index = (
            (_blocks(indices.to(torch.int32), first.shape) + _per_block(first)).reshape(indices.shape).numpy()
        )
    if vector == 1:
        return torch.from_numpy(tables[:, 0][index])
    axis = positive(vector_axis if vector_axis is not None else -1, indices.dim())
    merged = list(indices.shape)
    merged[axis] *= vector
    return torch.from_numpy(tables[index]).movedim(-1, axis + 1).reshape(merged)


def constexpr_sparse_to_dense(
    nonzero_data: Tensor, mask: Tensor, *, shape: Sequence[int] | None = None
) -> Tensor:
    """Spread values over the set bits of a mask, zero elsewhere.

    Args:
        nonzero_data: (n,) values.
        mask: iOS 16: packed bits (M,) uint8; iOS 18: 0 or 1 for each element of the result.
        shape: iOS 16 only: shape of the result.
    """
    if shape is not None:
        mask = torch.from_numpy(unpack_bits(mask.numpy(), dtypes.UINT1, tuple(shape)))
    hit = mask.bool()
    if int(hit.sum()) != nonzero_data.numel():
        raise ValueError(f"{nonzero_data.numel()} values for {int(hit.sum())} set bits")
    out = torch.zeros(hit.shape, dtype=nonzero_data.dtype)
    out[hit] = nonzero_data
    return out


def constexpr_lut_to_sparse(
    indices_mask: Tensor, indices_nonzero_data: Tensor, lut: Tensor, *, vector_axis: int | None = None
) -> tuple[Tensor, Tensor]:
    """Look up the non-zero indices only; returns the mask of the result and its values."""
    indices = constexpr_sparse_to_dense(indices_nonzero_data, indices_mask)
    dense = constexpr_lut_to_dense(indices, lut, vector_axis=vector_axis)
    mask = indices_mask
    if lut.shape[-1] > 1:
        axis = positive(vector_axis if vector_axis is not None else -1, mask.dim())
        mask = mask.repeat_interleave(lut.shape[-1], axis)
    return mask, dense[mask.bool()]


def constexpr_sparse_blockwise_shift_scale(
    data_mask: Tensor, nonzero_data: Tensor, scale: Tensor, offset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """De-quantize the non-zero elements only; returns the mask and the values."""
    dense = constexpr_blockwise_shift_scale(constexpr_sparse_to_dense(nonzero_data, data_mask), scale, offset)
    return data_mask, dense[data_mask.bool()]


_RANGE = {"int8": (-128, 127), "uint8": (0, 255)}


def quantize(
    input: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    output_dtype: str,
    axis: int | None = None,
) -> Tensor:
    """clamp(round(input / scale) + zero_point) as int8 or uint8; half rounds to even."""
    values = torch.round(input / _along(scale, input.dim(), axis))
    if zero_point is not None:
        values = values + _along(zero_point, input.dim(), axis)
    low, high = _RANGE[output_dtype]
    return values.clamp(low, high).to(getattr(torch, output_dtype))


def dequantize(
    input: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, axis: int | None = None
) -> Tensor:
    """(input - zero_point) * scale."""
    values = input.to(torch.float32)
    if zero_point is not None:
        values = values - _along(zero_point, input.dim(), axis)
    return values * _along(scale, input.dim(), axis)


ROWS: dict[str, OpRow] = {
    "constexpr_blockwise_shift_scale": row(constexpr_blockwise_shift_scale),
    "constexpr_affine_dequantize": row(constexpr_affine_dequantize),
    "constexpr_cast": row(constexpr_cast),
    "constexpr_lut_to_dense": row(constexpr_lut_to_dense, copies=True),
    "constexpr_sparse_to_dense": row(constexpr_sparse_to_dense, copies=True),
    "constexpr_lut_to_sparse": row(constexpr_lut_to_sparse, copies=True),
    "constexpr_sparse_blockwise_shift_scale": row(constexpr_sparse_blockwise_shift_scale),
    "quantize": row(quantize),
    "dequantize": row(dequantize),
}
