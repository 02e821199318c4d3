"""Reductions, `cumsum`, sorting and `topk`.

Integer inputs keep their type: sums wrap around, means and norms are cut towards zero, as MIL types them.
"""

from collections.abc import Callable, Sequence

import torch

from pdconvert.executors.mil import dtypes
from pdconvert.executors.mil.ops.row import OpRow, positive_axes, row

Tensor = torch.Tensor
Axes = Sequence[int] | None


def _reduction(
    compute: Callable[[Tensor, list[int], bool], Tensor], *, whole: bool = False
) -> Callable[..., Tensor]:
    """Wrap a reduction over a list of axes into MIL's calling form.

    Args:
        compute: reduces floats, or int64 where `whole`.
        whole: integers stay integers and wrap around in their type; else they go through float64.
    """

    def reduce(x: Tensor, *, axes: Axes = None, keep_dims: bool = False) -> Tensor:
        dims = list(range(x.dim())) if axes is None else list(axes)
        if not dims:  # for torch no axes are all of them
            return reduce(x.unsqueeze(0), axes=[0])
        if x.dtype.is_floating_point:
            return compute(x, dims, keep_dims)
        return compute(x.to(torch.int64 if whole else torch.float64), dims, keep_dims).to(x.dtype)

    return reduce


def _prod(x: Tensor, dims: list[int], keep: bool) -> Tensor:
    for dim in reversed(positive_axes(dims, x.dim())):
        x = torch.prod(x, dim, keepdim=keep)
    return x


def reduce_argmax(
    x: Tensor, *, axis: int = -1, keep_dims: bool = False, output_dtype: str = "int32"
) -> Tensor:
    """Index of the first maximum along `axis`."""
    return torch.argmax(x, axis, keepdim=keep_dims).to(getattr(torch, dtypes.BY_NAME[output_dtype].torch))


def reduce_argmin(
    x: Tensor, *, axis: int = -1, keep_dims: bool = False, output_dtype: str = "int32"
) -> Tensor:
    """Index of the first minimum along `axis`."""
    return torch.argmin(x, axis, keepdim=keep_dims).to(getattr(torch, dtypes.BY_NAME[output_dtype].torch))


def cumsum(x: Tensor, *, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Tensor:
    """Running sum along `axis`; `exclusive` leaves the element itself out, `reverse` runs from the end."""
    given = x.flip(axis) if reverse else x
    total = torch.cumsum(given, axis, dtype=x.dtype)
    if exclusive:
        size = x.shape[axis]
        zero = torch.zeros_like(total.narrow(axis, 0, min(size, 1)))
        total = torch.cat([zero, total.narrow(axis, 0, max(size - 1, 0))], axis)
    return total.flip(axis) if reverse else total


def argsort(x: Tensor, *, axis: int = -1, ascending: bool = False) -> Tensor:
    """Indices that sort along `axis`; equal elements keep their order."""
    return torch.sort(x, dim=axis, descending=not ascending, stable=True).indices.to(torch.int32)


def topk(
    x: Tensor,
    *,
    k: int = 1,
    axis: int = -1,
    ascending: bool = False,
    sort: bool = True,
    return_indices: bool = True,
    output_indices_dtype: str = "int32",
) -> Tensor | tuple[Tensor, Tensor]:
    """The k largest (or smallest) elements along `axis`, in order; of equal ones the first.

    `sort` False leaves the order open in MIL; here it is sorted all the same.
    """
    del sort
    count = x.shape[axis] if k == -1 else k
    values, indices = torch.sort(x, dim=axis, descending=not ascending, stable=True)
    values = values.narrow(axis, 0, count)
    if not return_indices:
        return values
    held = getattr(torch, dtypes.BY_NAME[output_indices_dtype].torch)
    return values, indices.narrow(axis, 0, count).to(held)


ROWS: dict[str, OpRow] = {
    "reduce_argmax": row(reduce_argmax),
    "reduce_argmin": row(reduce_argmin),
    "reduce_l1_norm": row(_reduction(lambda x, dims, keep: x.abs().sum(dims, keepdim=keep), whole=True)),
    "reduce_l2_norm": row(_reduction(lambda x, dims, keep: x.square().sum(dims, keepdim=keep).sqrt())),
    "reduce_log_sum": row(_reduction(lambda x, dims, keep: x.sum(dims, keepdim=keep).log())),
    "reduce_log_sum_exp": row(_reduction(lambda x, dims, keep: torch.logsumexp(x, dims, keepdim=keep))),
    "reduce_max": row(
        _reduction(lambda x, dims, keep: torch.amax(x, dims, keepdim=keep), whole=True), copies=True
    ),
    "reduce_mean": row(_reduction(lambda x, dims, keep: torch.mean(x, dims, keepdim=keep))),
    "reduce_min": row(
        _reduction(lambda x, dims, keep: torch.amin(x, dims, keepdim=keep), whole=True), copies=True
    ),
    "reduce_prod": row(_reduction(_prod, whole=True)),
    "reduce_sum": row(_reduction(lambda x, dims, keep: torch.sum(x, dims, keepdim=keep), whole=True)),
    "reduce_sum_square": row(
        _reduction(lambda x, dims, keep: x.square().sum(dims, keepdim=keep), whole=True)
    ),
    "cumsum": row(cumsum),
    "argsort": row(argsort),
    "topk": row(topk, copies=True),
}
