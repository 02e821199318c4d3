"""Functions that stand for several ops of a program; `fuse.py` says where. fp32 only.

A product's result has its channels innermost in memory, as oneDNN writes it: (1, O, *D) with stride 1 at O.
"""

import math
from collections.abc import Callable, Sequence

import torch

from pdconvert.executors.mil.ops.products import LINEAR

Tensor = torch.Tensor

LARGEST_NORM = 1e19
"""Of a row whose squares fp32 can hold."""
SMALLEST_ROOT_EPSILON = 1e-15
"""From which on squares that fp32 cannot hold do not count beside epsilon's."""


def pack(weight: Tensor, columns: int) -> Tensor:
    """Reorder a matrix (O, I) into the form that oneDNN wants for this many rows of activations."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, columns)


def product(shape: Sequence[int], then: str, biased: bool) -> Callable[..., Tensor]:
    """Return a pointwise convolution of x (1, I, *D) that gives `shape` (1, O, *D).

    Args:
        shape: of the result.
        then: done to it: `swish`, `add` or `mul` (with one more tensor of that shape, last), or nothing.
        biased: whether a bias (O,) comes after the weights.
    """
    shape = tuple(shape)

    def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return _multiply(x, weight, bias, then or "none").t().view(shape)

    def with_other(x: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
        bias = rest[0] if biased else None
        other = rest[-1].reshape(shape[1], -1).t().contiguous()
        rows = x.reshape(x.shape[1], -1).t()
        out = torch.ops.mkldnn._linear_pointwise.binary(rows, other, weight, bias, then)
        return out.t().view(shape)

    return with_other if then in ("add", "mul") else plain


def products(shapes: Sequence[Sequence[int]]) -> Callable[..., tuple[Tensor, ...]]:
    """Return several of one x, with their weights (and biases, where there are any) joined."""
    sizes = [shape[1] for shape in shapes]

    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
        pieces = _multiply(x, weight, bias, "none").t().split(sizes)
        return tuple(piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))

    return call


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, then: str) -> Tensor:
    """x (1, I, *D) and weights (O, I), packed or not: (positions, O)."""
    assert LINEAR is not None, "nothing is fused where torch has no oneDNN"
    return LINEAR(x.reshape(x.shape[1], -1).t(), weight, bias, then, [], "")


def rms_norm(channels: int, root_epsilon: float) -> Callable[..., Tensor]:
    """Return x · rsqrt(mean(x²) + root_epsilon²) [· gain] over axis 1 of x (1, C, *D).

    The program scales rows so that squares stay in range; where those of fp32 do not, fp64 takes them.
    """
    epsilon, share = root_epsilon**2, 1 / channels

    def call(x: Tensor, gain: Tensor | None = None) -> Tensor:
        rows = x.reshape(channels, -1).t().contiguous()  # so a sum does not depend on what made x
        norm = torch.linalg.vector_norm(rows, 2, 1, True)
        if not norm.max() < LARGEST_NORM:
            rows = rows.double()
            norm = torch.linalg.vector_norm(rows, 2, 1, True)
        out = rows * norm.square_().mul_(share).add_(epsilon).rsqrt_()
        if gain is not None:
            out.mul_(gain.view(-1))
        return out.float().t().view(x.shape)

    return call


def scale_inputs(weight: Tensor, gain: Tensor) -> Tensor:
    """A weight (O, I, 1, ...) for inputs that a gain (1, I, 1, 1) has not been applied to."""
    return weight * gain.view(-1, *(1,) * (weight.dim() - 2))


def rotate(x: Tensor, cos: Tensor, sin: tuple[Tensor, Tensor]) -> Tensor:
    """x · cos + concat(−high, low) · sin for x (1, heads, D, S), low and high its halves along D.

    Args:
        x: (1, heads, D, S).
        cos: (1, 1, D, S).
        sin: from `signed_halves`.
    """
    out = x * cos
    for half, other, factor in zip(out.chunk(2, 2), reversed(x.chunk(2, 2)), sin, strict=True):
        half.addcmul_(other, factor)
    return out


def signed_halves(sin: Tensor) -> tuple[Tensor, Tensor]:
    """The halves of sin (1, 1, D, S) along D, the first one negated, laid out with stride 1 at D."""
    low, high = channels_inside(sin).chunk(2, 2)
    return -low, high


def attend(value: Tensor, key: Tensor, query: Tensor, mask: tuple[Tensor, bool]) -> Tensor:
    """value · softmax(keyᵀ · query + mask) over the keys.

    Args:
        value: (G, 1, D, K).
        key: (G, 1, D, K).
        query: (G, R, D, Q), scaled.
        mask: from `finite_mask`.

    Returns:
        (G, R, D, Q). A query that sees no key (a column of minus infinity) gives NaN, as the ops do.
    """
    groups, _, size, keys = key.shape
    added, finite = mask
    if not finite:  # torch's own attention gives zeros where no key is seen
        scores = torch.matmul(key.transpose(2, 3), query) + added
        return torch.matmul(value, torch.softmax(scores, 2))
    heads = query.reshape(1, -1, size, query.shape[3]).transpose(2, 3)
    k, v = (tensor.reshape(1, groups, size, keys).transpose(2, 3) for tensor in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(
        heads, k, v, attn_mask=added.transpose(2, 3), scale=1.0, enable_gqa=True
    )
    return out.transpose(2, 3).reshape(query.shape)


def finite_mask(mask: Tensor) -> tuple[Tensor, bool]:
    """A mask (1, 1, K, Q) laid out with stride 1 at K, and whether it has no minus infinity."""
    return channels_inside(mask), bool(mask.min() > -math.inf)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Callable[[], Tensor]:
    """Return what makes a tensor for `place` to fill."""
    return lambda: torch.empty(tuple(shape), dtype=dtype)


def place(axis: int, start: int) -> Callable[[Tensor, Tensor], None]:
    """Return what copies a piece into a whole, at `start` along `axis`."""

    def call(whole: Tensor, piece: Tensor) -> None:
        whole.narrow(axis, start, piece.shape[axis]).copy_(piece)

    return call


def channels_inside(x: Tensor) -> Tensor:
    """Lay x (1, 1, D, S) out with stride 1 at axis 2."""
    return x.transpose(2, 3).contiguous().transpose(2, 3)
