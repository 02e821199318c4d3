"""Ops that move values without computing: shapes, layouts, joining and cutting."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from pdconvert.executors.mil.ops.row import OpRow, positive, positive_axes, row

Tensor = torch.Tensor


def reshape(x: Tensor, *, shape: Sequence[int]) -> Tensor:
    """Same values in another shape; -1 is worked out, 0 takes the size of x.

    A 0 counts its axis from the end, which for equal ranks (all that iOS 15 allows) is the same axis.
    """
    if 0 in shape and x.numel():
        rank = x.dim()
        last = len(shape) - 1
        shape = [
            size if size else (x.shape[rank - 1 - (last - axis)] if last - axis < rank else 1)
            for axis, size in enumerate(shape)
        ]
    return x.reshape(shape)


def reshape_like(
    x: Tensor,
    ref_tensors: Sequence[Tensor],
    *,
    begins: Sequence[int],
    ends: Sequence[int],
    end_masks: Sequence[bool],
) -> Tensor:
    """Reshape to pieces of the reference tensors' shapes, joined."""
    shape: list[int] = []
    for ref, begin, end, masked in zip(ref_tensors, begins, ends, end_masks, strict=True):
        shape += ref.shape[begin:] if masked else ref.shape[begin:end]
    return x.reshape(shape)


def transpose(x: Tensor, *, perm: Sequence[int]) -> Tensor:
    """Permute axes."""
    return x.permute(*perm)


def expand_dims(x: Tensor, *, axes: Sequence[int]) -> Tensor:
    """Insert axes of size 1 at the places they have in the result."""
    if len(axes) == 1:
        return x.unsqueeze(axes[0])
    rank = x.dim() + len(axes)
    for axis in sorted(positive(axis, rank) for axis in axes):
        x = x.unsqueeze(axis)
    return x


def squeeze(x: Tensor, *, axes: Sequence[int] | None = None) -> Tensor:
    """Remove axes of size 1: those named, or all."""
    return x.squeeze() if axes is None else x.squeeze(tuple(axes))


def flatten2d(x: Tensor, *, axis: int = 1) -> Tensor:
    """Reshape to two axes: those before `axis` and the rest."""
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


def shape(x: Tensor) -> Tensor:
    """Sizes of x, as int32."""
    return torch.tensor(x.shape, dtype=torch.int32)


def reverse(x: Tensor, *, axes: Sequence[int] | None = None) -> Tensor:
    """Reverse the order along the named axes, or along all."""
    return x.flip(positive_axes(axes, x.dim()))


def reverse_sequence(x: Tensor, lengths: Tensor, *, seq_axis: int = 0, batch_axis: int = 0) -> Tensor:
    """Reverse the first lengths[i] elements along `seq_axis` of slice i along `batch_axis`."""
    rank = x.dim()
    steps = torch.arange(x.shape[seq_axis])
    count = lengths.long().unsqueeze(1)
    index = torch.where(steps < count, count - 1 - steps, steps)  # (batch, sequence)
    sizes = [1] * rank
    batch, seq = positive(batch_axis, rank), positive(seq_axis, rank)
    sizes[batch], sizes[seq] = index.shape
    if batch > seq:
        index = index.t()
    return torch.take_along_dim(x, index.reshape(sizes).expand(x.shape), seq)


def concat(values: Sequence[Tensor], *, axis: int, interleave: bool = False) -> Tensor:
    """Join along `axis`; `interleave` takes one slice of each in turn. Scalars join to a vector."""
    if values[0].dim() == 0:
        return torch.stack(tuple(values))
    if not interleave:
        return torch.cat(tuple(values), axis)
    place = positive(axis, values[0].dim())
    sizes = list(values[0].shape)
    sizes[place] *= len(values)
    return torch.stack(tuple(values), place + 1).reshape(sizes)


def split(
    x: Tensor, *, axis: int, num_splits: int | None = None, split_sizes: Sequence[int] | None = None
) -> tuple[Tensor, ...] | Tensor:
    """Cut along `axis` into `num_splits` equal pieces, or into pieces of the given sizes; one piece is x itself."""
    sizes = split_sizes
    if sizes is None:
        if num_splits is None or x.shape[axis] % num_splits:
            raise ValueError(f"{x.shape[axis]} elements cannot be split into {num_splits} equal pieces")
        sizes = [x.shape[axis] // num_splits] * num_splits
    pieces = torch.split(x, list(sizes), axis)
    return pieces if len(pieces) > 1 else pieces[0]


def stack(values: Sequence[Tensor], *, axis: int) -> Tensor:
    """Join along a new axis."""
    return torch.stack(tuple(values), axis)


def tile(x: Tensor, *, reps: Sequence[int]) -> Tensor:
    """Repeat whole axes."""
    return x.repeat(tuple(reps))


def pad(x: Tensor, *, pad: Sequence[int], mode: str = "constant", constant_val: float = 0.0) -> Tensor:
    """Pad the last len(pad) / 2 axes; pairs of (before, after), first axis first."""
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)]
    if mode == "constant":
        return F.pad(x, [size for pair in reversed(pairs) for size in pair], value=constant_val)
    first = x.dim() - len(pairs)
    for offset, (before, after) in enumerate(pairs):
        if before or after:
            x = x.index_select(first + offset, _pad_index(x.shape[first + offset], before, after, mode))
    return x


def _pad_index(size: int, before: int, after: int, mode: str) -> Tensor:
    """Indices along one axis that realise `reflect` or `replicate`."""
    index = torch.arange(-before, size + after)
    if mode == "replicate":
        return index.clamp(0, size - 1)
    if mode == "reflect":
        if max(before, after) > size - 1:
            raise ValueError(f"reflect padding of ({before}, {after}) on {size} elements")
        return (size - 1) - ((size - 1) - index.abs()).abs()
    raise ValueError(f"pad mode {mode!r}")


def fill(*, shape: Sequence[int], value: float | int | bool = 0.0) -> Tensor:
    """A tensor of one value."""
    return _full(shape, value)


def fill_like(ref_tensor: Tensor, *, value: float | int | bool = 0.0) -> Tensor:
    """A tensor of one value in the shape of another."""
    return _full(ref_tensor.shape, value)


def _full(shape: Sequence[int], value: float | int | bool) -> Tensor:
    kind = torch.bool if isinstance(value, bool) else torch.int32 if isinstance(value, int) else torch.float32
    return torch.full(tuple(shape), value, dtype=kind)


def range_1d(end: Tensor, start: Tensor, step: Tensor) -> Tensor:
    """start, start + step, ... below end."""
    return torch.arange(start.item(), end.item(), step.item(), dtype=start.dtype)


def band_part(x: Tensor, *, lower: int = -1, upper: int = -1) -> Tensor:
    """Keep `lower` diagonals below and `upper` above the main one (all where negative), zero the rest."""
    rows, columns = x.shape[-2:]
    distance = torch.arange(rows).unsqueeze(1) - torch.arange(columns)
    keep = torch.ones_like(distance, dtype=torch.bool)
    if lower >= 0:
        keep &= distance <= lower
    if upper >= 0:
        keep &= -distance <= upper
    return torch.where(keep, x, torch.zeros((), dtype=x.dtype))


def one_hot(
    indices: Tensor,
    *,
    one_hot_vector_size: int,
    axis: int = -1,
    on_value: float | int | bool = 1,
    off_value: float | int | bool = 0,
) -> Tensor:
    """Vectors along a new axis that hold `on_value` at the index and `off_value` elsewhere."""
    place = positive(axis, indices.dim() + 1)
    sizes = [1] * (indices.dim() + 1)
    sizes[place] = one_hot_vector_size
    hit = torch.arange(one_hot_vector_size).reshape(sizes) == indices.unsqueeze(place)
    return torch.where(hit, _full((), on_value), _full((), off_value))


def non_zero(x: Tensor) -> Tensor:
    """(N, rank) int32 indices of the elements that are not zero."""
    return torch.nonzero(x).to(torch.int32)


def sliding_windows(x: Tensor, *, axis: int, size: int, stride: int = 1) -> Tensor:
    """All windows of `size` along `axis`; the window becomes the axis after it."""
    place = positive(axis, x.dim())
    return x.unfold(place, size, stride).movedim(-1, place + 1).contiguous()


def depth_to_space(x: Tensor, *, block_size: int) -> Tensor:
    """(N, C, H, W) -> (N, C / b^2, H * b, W * b); the block index varies slowest over channels."""
    n, c, h, w = x.shape
    b = block_size
    parts = x.reshape(n, b, b, c // (b * b), h, w)
    return parts.permute(0, 3, 4, 1, 5, 2).reshape(n, c // (b * b), h * b, w * b)


def space_to_depth(x: Tensor, *, block_size: int) -> Tensor:
    """(N, C, H, W) -> (N, C * b^2, H / b, W / b); inverse of `depth_to_space`."""
    n, c, h, w = x.shape
    b = block_size
    parts = x.reshape(n, c, h // b, b, w // b, b)
    return parts.permute(0, 3, 5, 1, 2, 4).reshape(n, c * b * b, h // b, w // b)


def space_to_batch(x: Tensor, *, block_shape: Sequence[int], paddings: Sequence[Sequence[int]]) -> Tensor:
    """Pad with zeros, then move blocks of the last two axes into the batch (block index slowest)."""
    (top, bottom), (left, right) = paddings
    x = F.pad(x, (left, right, top, bottom))
    n, c, h, w = x.shape
    bh, bw = block_shape
    parts = x.reshape(n, c, h // bh, bh, w // bw, bw)
    return parts.permute(3, 5, 0, 1, 2, 4).reshape(n * bh * bw, c, h // bh, w // bw)


def batch_to_space(x: Tensor, *, block_shape: Sequence[int], crops: Sequence[Sequence[int]]) -> Tensor:
    """Move blocks from the batch into the last two axes, then crop; inverse of `space_to_batch`."""
    n, c, h, w = x.shape
    bh, bw = block_shape
    parts = x.reshape(bh, bw, n // (bh * bw), c, h, w)
    whole = parts.permute(2, 3, 4, 0, 5, 1).reshape(n // (bh * bw), c, h * bh, w * bw)
    (top, bottom), (left, right) = crops
    return whole[:, :, top : h * bh - bottom, left : w * bw - right]


def pixel_shuffle(x: Tensor, *, upscale_factor: int) -> Tensor:
    """(N, C, H, W) -> (N, C / f^2, H * f, W * f) as torch orders it (block index fastest)."""
    return F.pixel_shuffle(x, upscale_factor)


def pixel_unshuffle(x: Tensor, *, downscale_factor: int) -> Tensor:
    """(N, C, H, W) -> (N, C * f^2, H / f, W / f); inverse of `pixel_shuffle`."""
    return F.pixel_unshuffle(x, downscale_factor)


def crop(x: Tensor, *, crop_height: Sequence[int], crop_width: Sequence[int]) -> Tensor:
    """Cut (before, after) elements off the last two axes."""
    h, w = x.shape[-2:]
    return x[..., crop_height[0] : h - crop_height[1], crop_width[0] : w - crop_width[1]]


def identity(x: Tensor) -> Tensor:
    """x itself."""
    return x


ROWS: dict[str, OpRow] = {
    "identity": row(identity, copies=True, view=True),
    "reshape": row(reshape, copies=True, view=True),
    "reshape_like": row(reshape_like, copies=True, view=True),
    "transpose": row(transpose, copies=True, view=True),
    "expand_dims": row(expand_dims, copies=True, view=True),
    "squeeze": row(squeeze, copies=True, view=True),
    "flatten2d": row(flatten2d, copies=True, view=True),
    "split": row(split, copies=True, view=True),
    "sliding_windows": row(sliding_windows, copies=True),
    "crop": row(crop, copies=True, view=True),
    "shape": row(shape),
    "reverse": row(reverse, copies=True),
    "reverse_sequence": row(reverse_sequence, copies=True),
    "concat": row(concat, copies=True),
    "stack": row(stack, copies=True),
    "tile": row(tile, copies=True),
    "pad": row(pad, view=True),
    "fill": row(fill),
    "fill_like": row(fill_like),
    "range_1d": row(range_1d),
    "band_part": row(band_part, copies=True),
    "one_hot": row(one_hot),
    "non_zero": row(non_zero),
    "depth_to_space": row(depth_to_space, copies=True),
    "space_to_depth": row(space_to_depth, copies=True),
    "space_to_batch": row(space_to_batch, copies=True),
    "batch_to_space": row(batch_to_space, copies=True, view=True),
    "pixel_shuffle": row(pixel_shuffle, copies=True),
    "pixel_unshuffle": row(pixel_unshuffle, copies=True),
}
