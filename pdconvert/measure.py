"""Measures of difference, each with its unit in its name."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sqnr_db(signal: Tensor, result: Tensor) -> float:
    """Signal-to-quantization-noise ratio, 10·log10(Σ signal² / Σ (signal − result)²), in dB.

    Returns:
        inf where both are bit-equal, NaN where either holds a NaN or an infinity, or where nothing is compared.

    Raises:
        ValueError: the shapes differ; broadcasting would compare something else.
    """
    if signal.shape != result.shape:
        raise ValueError(f"shapes {tuple(signal.shape)} and {tuple(result.shape)} cannot be compared")
    if not signal.numel():
        return math.nan
    signal, result = signal.double(), result.double()
    noise = (signal - result).square().sum().item()
    power = signal.square().sum().item()
    if not (math.isfinite(noise) and math.isfinite(power)):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(power / noise) if power > 0 else -math.inf


ROWS = 16
"""Rows of logits in float64 at a time: with a vocabulary of 150,000, 20 MB a copy."""


def kl_divergence_nats(reference_logits: Tensor, logits: Tensor) -> Tensor:
    """KL(reference ‖ other) of next-token distributions, in nats, one value per row.

    Args:
        reference_logits, logits: (N, V), any float type.
    """
    parts = []
    for wanted, got in zip(reference_logits.split(ROWS), logits.split(ROWS), strict=True):
        reference, other = torch.log_softmax(wanted.double(), -1), torch.log_softmax(got.double(), -1)
        parts.append((reference.exp() * (reference - other)).sum(-1))
    return torch.cat(parts)


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """Mean and its standard error; the error of a single value is infinite.

    Positions of one text are alike: where some of its tokens are hard, all are. So the spread of the windows' means
    counts as well, and the larger of the two errors is given, since few windows can agree by chance.

    Args:
        values: (N,) independent ones, or (windows, positions).
    """
    values = values.double()
    errors = [
        (part.std() / math.sqrt(part.numel())).item()
        for part in (values.flatten(), values.mean(1) if values.dim() == 2 else values)
        if part.numel() > 1
    ]
    return values.mean().item(), max(errors, default=math.inf)
