"""Normalizations. Each is one op, so its inside is fp32 in both modes."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from pdconvert.executors.mil.ops.row import OpRow, positive_axes, row

Tensor = torch.Tensor


def _scaled(normal: Tensor, gamma: Tensor | None, beta: Tensor | None, shape: Sequence[int]) -> Tensor:
    if gamma is not None:
        normal = normal * gamma.reshape(tuple(shape))
    if beta is not None:
        normal = normal + beta.reshape(tuple(shape))
    return normal


def layer_norm(
    x: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    axes: Sequence[int] | None = None,
    epsilon: float = 1e-5,
) -> Tensor:
    """(x - mean) / sqrt(variance + epsilon) * gamma + beta over `axes` (all where None)."""
    dims = positive_axes(axes, x.dim())
    if dims == list(range(x.dim() - len(dims), x.dim())):
        sizes = [x.shape[dim] for dim in dims]
        return F.layer_norm(x, sizes, gamma, beta, epsilon)
    centred = x - x.mean(dims, keepdim=True)
    normal = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + epsilon)
    return _scaled(normal, gamma, beta, [x.shape[d] if d in dims else 1 for d in range(x.dim())])


def instance_norm(
    x: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None, *, epsilon: float = 1e-5
) -> Tensor:
    """Normalize each channel of each batch item over its spatial axes; x (N, C, *D)."""
    dims = list(range(2, x.dim()))
    centred = x - x.mean(dims, keepdim=True)
    normal = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + epsilon)
    return _scaled(normal, gamma, beta, [1, x.shape[1]] + [1] * len(dims))


def batch_norm(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    epsilon: float = 1e-5,
) -> Tensor:
    """gamma * (x - mean) / sqrt(variance + epsilon) + beta with one value of each for a channel."""
    shape = [1, x.shape[1]] + [1] * (x.dim() - 2)
    normal = (x - mean.reshape(shape)) * torch.rsqrt(variance.reshape(shape) + epsilon)
    return _scaled(normal, gamma, beta, shape)


def l2_norm(x: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """x / sqrt(sum of squares over the last three axes + epsilon)."""
    return x * torch.rsqrt(x.square().sum((-3, -2, -1), keepdim=True) + epsilon)


def local_response_norm(
    x: Tensor, *, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Tensor:
    """x / (k + alpha / size * sum of squares over `size` neighbouring channels) ** beta."""
    return F.local_response_norm(x, size, alpha, beta, k)


ROWS: dict[str, OpRow] = {
    "layer_norm": row(layer_norm),
    "instance_norm": row(instance_norm),
    "batch_norm": row(batch_norm),
    "l2_norm": row(l2_norm),
    "local_response_norm": row(local_response_norm),
}
