"""`max_pool` and `avg_pool` over 1 to 3 spatial axes."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from pdconvert.executors.mil.ops.products import conv_padding
from pdconvert.executors.mil.ops.row import OpRow, row

Tensor = torch.Tensor
Ints = Sequence[int]

_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVG = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _padding(
    x: Tensor, kernel: Ints, strides: Ints | None, pad_type: str, pad: Ints | None, ceil_mode: bool
) -> tuple[list[int], list[tuple[int, int]], bool]:
    """Return strides, (before, after) pairs, and whether torch's own padding can do them.

    MIL reads the type of padding in either case, for pools only.
    """
    spatial = x.dim() - 2
    steps = list(strides) if strides else [1] * spatial
    pairs = conv_padding(pad_type.lower(), x.shape[2:], kernel, steps, [1] * spatial, pad)
    native = all(a == b and 2 * a <= k for (a, b), k in zip(pairs, kernel, strict=True))
    if ceil_mode and not native:
        raise ValueError("ceil_mode with padding that is uneven or wider than half the kernel")
    return steps, pairs, native


def _padded(x: Tensor, pairs: list[tuple[int, int]], value: float) -> Tensor:
    return F.pad(x, [size for pair in reversed(pairs) for size in pair], value=value)


def max_pool(
    x: Tensor,
    *,
    kernel_sizes: Ints,
    strides: Ints | None = None,
    pad_type: str = "valid",
    pad: Ints | None = None,
    ceil_mode: bool = False,
) -> Tensor:
    """Maximum of each window; padding never wins. x (N, C, *D)."""
    kernel = list(kernel_sizes)
    steps, pairs, native = _padding(x, kernel, strides, pad_type, pad, ceil_mode)
    pool = _MAX[x.dim() - 2]
    if native:
        return pool(x, kernel, steps, [before for before, _ in pairs], ceil_mode=ceil_mode)
    return pool(_padded(x, pairs, -torch.inf), kernel, steps)


def avg_pool(
    x: Tensor,
    *,
    kernel_sizes: Ints,
    strides: Ints | None = None,
    pad_type: str = "valid",
    pad: Ints | None = None,
    exclude_padding_from_average: bool = False,
    ceil_mode: bool = False,
) -> Tensor:
    """Mean of each window, padding counted as zeros or not counted. x (N, C, *D)."""
    kernel = list(kernel_sizes)
    steps, pairs, native = _padding(x, kernel, strides, pad_type, pad, ceil_mode)
    pool = _AVG[x.dim() - 2]
    small = x.dim() == 5 and any(size < k for size, k in zip(x.shape[2:], kernel, strict=True))
    if small and ceil_mode:
        raise ValueError("ceil_mode in three dimensions on an input smaller than the kernel")
    if native and not small:  # torch's own in three dimensions does not count padding when it checks sizes
        before = [size for size, _ in pairs]
        return pool(x, kernel, steps, before, ceil_mode, not exclude_padding_from_average)
    mean = pool(_padded(x, pairs, 0.0), kernel, steps)
    if exclude_padding_from_average:
        mean = mean / pool(_padded(torch.ones_like(x[:1, :1]), pairs, 0.0), kernel, steps)
    return mean


ROWS: dict[str, OpRow] = {"max_pool": row(max_pool, copies=True), "avg_pool": row(avg_pool)}
