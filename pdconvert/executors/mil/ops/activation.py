"""Activations and softmax."""

import torch
import torch.nn.functional as F

from pdconvert.executors.mil.ops.row import OpRow, builtin, row

Tensor = torch.Tensor


def _channel(vector: Tensor, x: Tensor) -> Tensor:
    """Shape a (C,) vector so that it broadcasts over axis 1 of x."""
    return vector.reshape((1, -1) + (1,) * (x.dim() - 2))


def clamped_relu(x: Tensor, *, alpha: float, beta: float) -> Tensor:
    """min(beta, x) where x >= 0, else min(beta, alpha * x)."""
    return torch.where(x >= 0, x, alpha * x).clamp(max=beta)


def elu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """x where x > 0, else alpha * (exp(x) - 1)."""
    return torch.where(x > 0, x, alpha * torch.expm1(x.clamp(max=0)))


def gelu(x: Tensor, *, mode: str = "EXACT") -> Tensor:
    """Gaussian error linear unit in one of MIL's three forms."""
    if mode == "EXACT":
        return F.gelu(x)
    if mode == "TANH_APPROXIMATION":
        return F.gelu(x, approximate="tanh")
    if mode == "SIGMOID_APPROXIMATION":
        return x * torch.sigmoid(1.702 * x)
    raise ValueError(f"gelu mode {mode!r}")


def leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
    """x where x >= 0, else alpha * x."""
    return torch.where(x >= 0, x, alpha * x)


def linear_activation(x: Tensor, *, alpha: float, beta: float) -> Tensor:
    """alpha * x + beta."""
    return alpha * x + beta


def prelu(x: Tensor, alpha: Tensor) -> Tensor:
    """x where x > 0, else alpha * x with one alpha for each channel (axis 1)."""
    return torch.where(x > 0, x, _channel(alpha, x) * x)


def relu6(x: Tensor) -> Tensor:
    """min(max(x, 0), 6)."""
    return x.clamp(0.0, 6.0)


def scaled_tanh(x: Tensor, *, alpha: float, beta: float) -> Tensor:
    """alpha * tanh(beta * x)."""
    return alpha * torch.tanh(beta * x)


def sigmoid_hard(x: Tensor, *, alpha: float, beta: float) -> Tensor:
    """min(max(alpha * x + beta, 0), 1)."""
    return (alpha * x + beta).clamp(0.0, 1.0)


def softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """exp(x) over its sum along `axis`, computed from x minus its maximum."""
    return torch.softmax(x, axis)


def softplus(x: Tensor) -> Tensor:
    """ln(1 + exp(x)) without overflow."""
    return torch.log1p(torch.exp(-torch.abs(x))) + x.clamp(min=0)


def softplus_parametric(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """alpha_i * ln(1 + exp(beta_i * x_i)) for each channel i (axis 1)."""
    return _channel(alpha, x) * softplus(_channel(beta, x) * x)


def softsign(x: Tensor) -> Tensor:
    """x / (1 + |x|)."""
    return x / (1 + torch.abs(x))


def thresholded_relu(x: Tensor, *, alpha: float) -> Tensor:
    """x where x >= alpha, else 0."""
    return torch.where(x >= alpha, x, 0.0)


def _silu_into(x: Tensor, out: Tensor) -> Tensor:
    return F.silu(out, inplace=True)


ROWS: dict[str, OpRow] = {
    "clamped_relu": row(clamped_relu),
    "elu": row(elu),
    "gelu": row(gelu),
    "leaky_relu": row(leaky_relu),
    "linear_activation": row(linear_activation),
    "prelu": row(prelu),
    "relu": builtin(torch.relu, copies=True),
    "relu6": row(relu6, copies=True),
    "scaled_tanh": row(scaled_tanh),
    "sigmoid": builtin(torch.sigmoid),
    "sigmoid_hard": row(sigmoid_hard),
    "silu": builtin(F.silu, into=_silu_into),
    "softmax": row(softmax),
    "softplus": row(softplus),
    "softplus_parametric": row(softplus_parametric),
    "softsign": row(softsign),
    "thresholded_relu": row(thresholded_relu, copies=True),
}
