"""Slices, gathers and scatters.

Indices may be negative (counted from the end) unless `validate_indices` asks for the strict range. An
index outside the tensor is always an error here; on a device without `validate_indices` it is undefined.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from pdconvert.executors.mil.ops.row import OpRow, positive, row

Tensor = torch.Tensor
Ints = Sequence[int]
Mask = Sequence[bool] | None


def _bounds(
    size: int, begin: int, end: int, stride: int, begin_mask: bool, end_mask: bool
) -> tuple[int, int, int]:
    """Return (start, count, step) of one axis by numpy's rules."""
    start, stop, step = slice(None if begin_mask else begin, None if end_mask else end, stride).indices(size)
    return start, len(range(start, stop, step)), step


def _window(
    x: Tensor,
    begin: Ints,
    end: Ints,
    stride: Ints | None,
    begin_mask: Mask,
    end_mask: Mask,
    squeeze_mask: Mask,
) -> tuple[Tensor, list[int], list[int]]:
    """Return a view of the slice, the axes that run backwards in it, and the axes to squeeze."""
    reversed_axes, squeezed = [], []
    for axis, size in enumerate(x.shape):
        first = begin_mask[axis] if begin_mask else False
        if squeeze_mask and squeeze_mask[axis]:
            index = 0 if first else begin[axis]
            if not -size <= index < size:
                raise IndexError(f"index {index} on axis {axis} of size {size}")
            x = x.narrow(axis, positive(index, size), 1)
            squeezed.append(axis)
            continue
        last = end_mask[axis] if end_mask else False
        start, count, step = _bounds(size, begin[axis], end[axis], stride[axis] if stride else 1, first, last)
        if count == size and step == 1:
            continue
        if step < 0:
            reversed_axes.append(axis)
            start, step = start + (count - 1) * step if count else 0, -step
        x = x.narrow(axis, start, (count - 1) * step + 1 if count else 0)
        if step != 1 and count:
            x = x[(slice(None),) * axis + (slice(None, None, step),)]
    return x, reversed_axes, squeezed


def slice_by_index(
    x: Tensor,
    *,
    begin: Ints,
    end: Ints,
    stride: Ints | None = None,
    begin_mask: Mask = None,
    end_mask: Mask = None,
    squeeze_mask: Mask = None,
) -> Tensor:
    """x[begin:end:stride] on every axis; a masked bound is left out, a squeezed axis is indexed."""
    view, backwards, squeezed = _window(x, begin, end, stride, begin_mask, end_mask, squeeze_mask)
    if backwards:
        view = view.flip(backwards)
    return view.squeeze(tuple(squeezed)) if squeezed else view


def _bind_slice(
    begin: Ints,
    end: Ints,
    stride: Ints | None = None,
    begin_mask: Mask = None,
    end_mask: Mask = None,
    squeeze_mask: Mask = None,
) -> Callable[[Tensor], Tensor]:
    """Return `slice_by_index` for constant bounds; plain ranges, the usual case, take the short way."""
    forwards = stride is None or all(step == 1 for step in stride)
    masks = zip(begin, end, begin_mask or [False] * len(begin), end_mask or [False] * len(end), strict=True)
    cuts = [(axis, 0 if bm else b, -1 if em else e) for axis, (b, e, bm, em) in enumerate(masks)]
    counted = all(b >= 0 and (e >= 0 or (end_mask and end_mask[axis])) for axis, b, e in cuts)
    if not forwards or not counted or (squeeze_mask and any(squeeze_mask)):
        return partial(
            slice_by_index, begin=begin, end=end, stride=stride,
            begin_mask=begin_mask, end_mask=end_mask, squeeze_mask=squeeze_mask,
        )  # fmt: skip
    cuts = [(axis, b, e) for axis, b, e in cuts if b or e >= 0]

    def short(x: Tensor) -> Tensor:
        for axis, first, last in cuts:
            size = x.shape[axis]
            stop = size if last < 0 or last > size else last
            if first or stop != size:
                x = x.narrow(axis, min(first, stop), max(stop - first, 0))
        return x

    return short


def slice_update(
    x: Tensor,
    update: Tensor,
    *,
    begin: Ints,
    end: Ints,
    stride: Ints | None = None,
    begin_mask: Mask = None,
    end_mask: Mask = None,
    squeeze_mask: Mask = None,
) -> Tensor:
    """A copy of x in which the slice that `slice_by_index` would read holds `update`."""
    return _update_into(
        x, update, x.clone(), begin=begin, end=end, stride=stride,
        begin_mask=begin_mask, end_mask=end_mask, squeeze_mask=squeeze_mask,
    )  # fmt: skip


def _update_into(
    x: Tensor,
    update: Tensor,
    out: Tensor,
    *,
    begin: Ints,
    end: Ints,
    stride: Ints | None = None,
    begin_mask: Mask = None,
    end_mask: Mask = None,
    squeeze_mask: Mask = None,
) -> Tensor:
    """`slice_update` that writes into `out` (x itself, or a copy of it)."""
    del x
    view, backwards, squeezed = _window(out, begin, end, stride, begin_mask, end_mask, squeeze_mask)
    if squeezed:
        for axis in squeezed:
            update = update.unsqueeze(axis)
    if update.shape != view.shape:
        raise ValueError(f"an update of shape {list(update.shape)} for a slice of shape {list(view.shape)}")
    view.copy_(update.flip(backwards) if backwards else update)
    return out


def slice_by_size(x: Tensor, *, begin: Ints, size: Ints) -> Tensor:
    """x[begin : begin + size] on every axis; a size of -1 takes the rest."""
    for axis, length in enumerate(x.shape):
        start = positive(begin[axis], length)
        count = length - start if size[axis] == -1 else size[axis]
        if count != length:
            x = x.narrow(axis, start, count)
    return x


def _index(indices: Tensor, size: int, validate: bool) -> Tensor:
    """Return int64 indices counted from the front; out of range is an IndexError."""
    index = indices.long()
    if index.numel():
        low, high = int(index.min()), int(index.max())
        if low < (0 if validate else -size) or high >= size:
            raise IndexError(f"index {low if low < 0 else high} on an axis of size {size}")
        if low < 0:
            index = torch.where(index < 0, index + size, index)
    return index


def gather(
    x: Tensor, indices: Tensor, *, axis: int = 0, batch_dims: int = 0, validate_indices: bool = False
) -> Tensor:
    """Slices of x along `axis`; the first `batch_dims` axes of x and indices go together."""
    place = positive(axis, x.dim())
    index = _index(indices, x.shape[place], validate_indices)
    if batch_dims == 0:
        picked = x.index_select(place, index.reshape(-1))
        return picked.reshape(x.shape[:place] + index.shape + x.shape[place + 1 :])
    between, after = x.shape[batch_dims:place], x.shape[place + 1 :]
    flat = index.reshape(*index.shape[:batch_dims], *(1,) * len(between), -1, *(1,) * len(after))
    count = flat.shape[batch_dims + len(between)]
    picked = torch.gather(x, place, flat.expand(x.shape[:place] + (count,) + after))
    return picked.reshape(x.shape[:place] + index.shape[batch_dims:] + after)


def gather_along_axis(x: Tensor, indices: Tensor, *, axis: int = 0, validate_indices: bool = False) -> Tensor:
    """x with the index along `axis` replaced by `indices`, element by element."""
    place = positive(axis, x.dim())
    return torch.gather(x, place, _index(indices, x.shape[place], validate_indices))


def _flat_nd(indices: Tensor, sizes: Ints, validate: bool) -> Tensor:
    """Turn (..., depth) indices into indices of an array of shape `sizes`, flattened."""
    flat = torch.zeros(indices.shape[:-1], dtype=torch.int64)
    for axis, size in enumerate(sizes):
        flat = flat * size + _index(indices[..., axis], size, validate)
    return flat


def gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int = 0, validate_indices: bool = False) -> Tensor:
    """Slices of x at the index vectors in the last axis of `indices`."""
    depth = indices.shape[-1]
    batch = x.shape[:batch_dims]
    sizes, rest = x.shape[batch_dims : batch_dims + depth], x.shape[batch_dims + depth :]
    flat = _flat_nd(indices, sizes, validate_indices)
    table = x.reshape(*batch, -1, *rest)
    if batch_dims == 0:
        return table.index_select(0, flat.reshape(-1)).reshape(flat.shape + rest)
    return gather(table, flat, axis=batch_dims, batch_dims=batch_dims)


_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "update": lambda old, new: new,
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda old, new: torch.div(
        old, new, rounding_mode=None if old.dtype.is_floating_point else "trunc"
    ),
    "max": torch.maximum,
    "min": torch.minimum,
}


def _scatter_rows(table: Tensor, rows: Tensor, updates: Tensor, mode: str) -> Tensor:
    """Combine updates (n, ...) into rows (n,) of a copy of table (m, ...), in order where rows repeat."""
    out = table.clone()
    if mode == "add":
        return out.index_add_(0, rows, updates)
    if mode == "sub":
        return out.index_add_(0, rows, updates, alpha=-1)
    combine = _COMBINE[mode]
    if rows.unique().numel() == rows.numel():
        out[rows] = combine(out[rows], updates)
        return out
    for position, target in enumerate(rows.tolist()):
        out[target] = combine(out[target], updates[position])
    return out


def scatter(
    data: Tensor,
    indices: Tensor,
    updates: Tensor,
    *,
    axis: int = 0,
    mode: str = "add",
    validate_indices: bool = False,
) -> Tensor:
    """A copy of data with slice indices[i] along `axis` combined with slice i of updates."""
    place = positive(axis, data.dim())
    rows = _index(indices, data.shape[place], validate_indices)
    # indices may have several axes; they stand in updates where `axis` stands in data
    moved = updates.reshape(*data.shape[:place], rows.numel(), *data.shape[place + 1 :]).movedim(place, 0)
    return _scatter_rows(data.movedim(place, 0), rows.reshape(-1), moved, mode).movedim(0, place)


def scatter_along_axis(
    data: Tensor,
    indices: Tensor,
    updates: Tensor,
    *,
    axis: int = 0,
    mode: str = "add",
    validate_indices: bool = False,
) -> Tensor:
    """A copy of data with the elements at `indices` along `axis` combined with updates."""
    place = positive(axis, data.dim())
    index = _index(indices, data.shape[place], validate_indices)
    positions = torch.arange(data.numel()).reshape(data.shape).gather(place, index).reshape(-1)
    flat = _scatter_rows(data.reshape(-1), positions, updates.reshape(-1), mode)
    return flat.reshape(data.shape)


def scatter_nd(
    data: Tensor, indices: Tensor, updates: Tensor, *, mode: str = "add", validate_indices: bool = False
) -> Tensor:
    """A copy of data with the slices at the index vectors combined with updates."""
    depth = indices.shape[-1]
    rest = data.shape[depth:]
    rows = _flat_nd(indices, data.shape[:depth], validate_indices).reshape(-1)
    flat = _scatter_rows(data.reshape(-1, *rest), rows, updates.reshape(-1, *rest), mode)
    return flat.reshape(data.shape)


ROWS: dict[str, OpRow] = {
    "slice_by_index": row(slice_by_index, copies=True, view=True, bind=_bind_slice),
    "slice_by_size": row(slice_by_size, copies=True, view=True),
    "slice_update": row(slice_update, copies=True, into=_update_into),
    "gather": row(gather, copies=True),
    "gather_along_axis": row(gather_along_axis, copies=True),
    "gather_nd": row(gather_nd, copies=True),
    "scatter": row(scatter),
    "scatter_along_axis": row(scatter_along_axis),
    "scatter_nd": row(scatter_nd),
}
