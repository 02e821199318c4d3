"""Products: `conv`, `linear`, `matmul`, `einsum`, attention.

Which routine multiplies two fp32 matrices matters more than anything else here. Measured on 2 Zen 4
cores, (1536, 576) @ (576, 128): oneDNN's inner product 1.1 ms, `torch.mm` (MKL) 1.3 to 1.8 ms, a 1x1
`conv2d` 1.3 to 2.5 ms; with 8 columns 0.17 against 0.64 ms; with one column MKL's is the faster one.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from pdconvert.executors.mil.ops.row import OpRow, row

Tensor = torch.Tensor
Ints = Sequence[int]

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def _onednn_linear() -> Callable[..., Tensor] | None:
    """Return oneDNN's x @ weight^T + bias, or None where this torch has none."""
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return torch.ops.mkldnn._linear_pointwise.default
    return None


LINEAR = _onednn_linear()
SMALL = 1 << 18
"""Multiplications below which oneDNN's 15 microseconds a call are more than the product itself."""


def product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices: a (M, K) @ b (K, N), any strides."""
    large = a.numel() * b.shape[1] > SMALL and b.shape[1] > 1
    if large and LINEAR is not None and a.dtype == torch.float32 and 1 not in a.shape:
        return LINEAR(a, b.t(), None, "none", [], "")
    return torch.mm(a, b)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., I) @ weight (O, I) transposed, plus bias (O,)."""
    flat = x.reshape(-1, x.shape[-1])
    out = product(flat, weight.t())
    if bias is not None:
        out += bias
    return out.reshape(x.shape[:-1] + (weight.shape[0],))


def matmul(x: Tensor, y: Tensor, *, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
    """Matrix product over the last two axes with numpy's broadcasting of the others."""
    if transpose_x:
        x = x.transpose(-1, -2)
    if transpose_y:
        y = y.transpose(-1, -2)
    if x.dim() < 2 or y.dim() < 2:
        return torch.matmul(x, y)
    rows, columns = x.shape[-2], y.shape[-1]
    if y.dim() == 2 or all(size == 1 for size in y.shape[:-2]):
        # one right-hand matrix: the batch of x becomes rows
        batch = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        right = y.reshape(y.shape[-2:])
        return product(x.reshape(-1, x.shape[-1]), right).reshape(*batch, rows, columns)
    if x.dim() == y.dim() >= 3 and x.shape[:-3] == y.shape[:-3] and y.shape[-3] == 1 != x.shape[-3]:
        # one right-hand matrix for each group (grouped-query attention): the group becomes rows
        merged = x.reshape(*x.shape[:-3], x.shape[-3] * rows, x.shape[-1])
        out = torch.matmul(merged, y.squeeze(-3))
        return out.reshape(*x.shape[:-1], columns)
    if x.dim() == y.dim() >= 4 and x.shape[:-3] == y.shape[:-3] and x.shape[-3] == 1 != y.shape[-3]:
        return _shared_left(x, y)
    return torch.matmul(x, y)


def _shared_left(x: Tensor, y: Tensor) -> Tensor:
    """x (..., 1, M, K) @ y (..., G, K, N): one left-hand matrix for each group, not copied G times."""
    group, rows, columns = y.shape[-3], x.shape[-2], y.shape[-1]
    out = torch.empty(*y.shape[:-2], rows, columns, dtype=y.dtype)
    lefts, rights = x.flatten(0, -4), y.flatten(0, -4)
    for left, right, place in zip(lefts, rights, out.flatten(0, -4), strict=True):
        torch.bmm(left.expand(group, -1, -1), right, out=place)
    return out


def einsum(values: Sequence[Tensor], *, equation: str) -> Tensor:
    """Product of two tensors; axes of size 1 broadcast against the other tensor's axis."""
    inputs, _, output = equation.replace(" ", "").partition("->")
    left, right = inputs.split(",")
    x, y = values
    sizes: dict[str, int] = {}
    for names, tensor in ((left, x), (right, y)):
        for name, size in zip(names, tensor.shape, strict=True):
            sizes[name] = max(size, sizes.get(name, 1))
    expanded = [t.expand([sizes[n] for n in names]) for names, t in ((left, x), (right, y))]
    return torch.einsum(f"{left},{right}->{output}", *expanded)


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None
) -> Tensor:
    """softmax(query @ key^T / sqrt(E) + mask) @ value; a boolean mask keeps the keys that are True."""
    scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.shape[-1])
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return torch.matmul(torch.softmax(scores, -1), value)


def conv_padding(
    pad_type: str, sizes: Ints, kernel: Ints, strides: Ints, dilations: Ints, pad: Ints | None
) -> list[tuple[int, int]]:
    """Return (before, after) padding of each spatial axis.

    Args:
        pad_type: `valid`, `custom`, `same` (an odd element goes after) or `same_lower` (before).
        sizes: spatial sizes of the input.
        kernel: spatial sizes of the kernel.
        strides: step of each axis.
        dilations: kernel spacing of each axis.
        pad: pairs for `custom`.
    """
    if pad_type == "valid":
        return [(0, 0)] * len(sizes)
    if pad_type == "custom":
        given = list(pad) if pad else [0] * (2 * len(sizes))
        return [(given[2 * i], given[2 * i + 1]) for i in range(len(sizes))]
    if pad_type not in ("same", "same_lower"):
        raise ValueError(f"pad_type {pad_type!r}")
    pairs = []
    for size, width, step, spacing in zip(sizes, kernel, strides, dilations, strict=True):
        reach = (width - 1) * spacing + 1
        total = max(0, (math.ceil(size / step) - 1) * step + reach - size)
        small, large = total // 2, total - total // 2
        pairs.append((small, large) if pad_type == "same" else (large, small))
    return pairs


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    strides: Ints | None = None,
    pad_type: str = "valid",
    pad: Ints | None = None,
    dilations: Ints | None = None,
    groups: int = 1,
) -> Tensor:
    """Convolution of x (N, C_in, *D) with weight (C_out, C_in / groups, *K); D has 1 to 3 axes."""
    spatial = x.dim() - 2
    kernel = weight.shape[2:]
    steps = list(strides) if strides else [1] * spatial
    if (
        groups == 1
        and max(kernel) == 1
        and max(steps) == 1
        and (pad_type != "custom" or not pad or not any(pad))
    ):
        return _pointwise(x, weight, bias)
    spacing = list(dilations) if dilations else [1] * spatial
    pairs = conv_padding(pad_type, x.shape[2:], kernel, steps, spacing, pad)
    if any(before != after for before, after in pairs):
        x = F.pad(x, [size for pair in reversed(pairs) for size in pair])
        pairs = [(0, 0)] * spatial
    return _CONV[spatial](x, weight, bias, steps, [before for before, _ in pairs], spacing, groups)


def _bind_conv(
    strides: Ints | None = None,
    pad_type: str = "valid",
    pad: Ints | None = None,
    dilations: Ints | None = None,
    groups: int = 1,
) -> Callable[..., Tensor]:
    """Return `conv` for constant params; one that only mixes channels is told by its kernel's size alone."""
    full = partial(conv, strides=strides, pad_type=pad_type, pad=pad, dilations=dilations, groups=groups)
    plain = (
        groups == 1
        and not (strides and max(strides) > 1)
        and (pad_type != "custom" or not pad or not any(pad))
    )
    if not plain:
        return full

    def either(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.numel() == weight.shape[0] * weight.shape[1]:
            return _pointwise(x, weight, bias)
        return full(x, weight, bias)

    return either


def _pointwise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A 1x1 convolution as a matrix product: weight (O, I) @ x (I, positions) for each batch item."""
    batch, channels, *spatial = x.shape
    matrix = weight.flatten(1)
    out = product(matrix, x.reshape(channels, -1)) if batch == 1 else torch.matmul(matrix, x.flatten(2))
    if bias is not None:
        out += bias.unsqueeze(-1)
    return out.view(batch, weight.shape[0], *spatial)


def conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    pad: Ints | None = None,
    output_shape: Ints | None = None,
    pad_type: str = "valid",
    strides: Ints | None = None,
    dilations: Ints | None = None,
    groups: int = 1,
) -> Tensor:
    """Transposed convolution of x (N, C_in, *D) with weight (C_in, C_out / groups, *K).

    The full result is computed, then cut to what padding or `output_shape` leave; where they ask for
    more than there is, the missing end is filled with the bias.
    """
    spatial = x.dim() - 2
    steps = list(strides) if strides else [1] * spatial
    spacing = list(dilations) if dilations else [1] * spatial
    full = _CONV_TRANSPOSE[spatial](x, weight, None, steps, 0, 0, groups, spacing)
    for axis in range(spatial):
        size = full.shape[2 + axis]
        before, after = 0, 0
        if pad_type == "custom" and pad:
            before, after = pad[2 * axis], pad[2 * axis + 1]
        elif pad_type == "same":
            wanted = output_shape[2 + axis] if output_shape is not None else x.shape[2 + axis] * steps[axis]
            surplus = size - wanted
            before = max(surplus, 0) // 2
            after = surplus - before
        if output_shape is not None:
            after = size - before - output_shape[2 + axis]
        full = full.narrow(2 + axis, before, size - before - max(after, 0))
        if after < 0:
            full = F.pad(full, [0, 0] * (spatial - 1 - axis) + [0, -after])
    if bias is not None:
        full = full + bias.reshape((1, -1) + (1,) * spatial)
    return full


ROWS: dict[str, OpRow] = {
    "conv": row(conv, bind=_bind_conv),
    "conv_transpose": row(conv_transpose),
    "linear": row(linear),
    "matmul": row(matmul),
    "einsum": row(einsum),
    "scaled_dot_product_attention": row(scaled_dot_product_attention),
}
