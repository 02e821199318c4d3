"""Rounding that looks at activations: GPTQ onto a fixed grid, and coordinate descent after it.

Both minimise tr (W − Q) G (W − Q)ᵀ, with G = XᵀX over the calibration tokens: the squared error of the outputs.
Columns are taken in order of falling activation; the grid stays where it is, so no index tensor is needed.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

DAMPING = 0.01
BLOCK = 128


class Grid(Protocol):
    """Values that a weight may take: by row, and by column where scales are in groups."""

    def nearest(self, values: Tensor, columns: Tensor) -> Tensor:
        """Codes of the nearest values: (O, C) float32 at columns (C,) to (O, C) integers."""

    def values(self, codes: Tensor, columns: Tensor) -> Tensor:
        """The values of codes (O, C) at columns (C,), float32."""


def damped(gram: Tensor, damping: float = DAMPING) -> Tensor:
    """The Gram matrix with a share of its mean diagonal added, float32; the identity where it is all zero."""
    mean = gram.diagonal().mean()
    lift = damping * mean if mean > 0 else torch.ones_like(mean)
    return gram.float() + lift * torch.eye(len(gram), device=gram.device)


def gptq(weight: Tensor, gram: Tensor, grid: Grid, *, damping: float = DAMPING) -> Tensor:
    """Codes (O, I) by GPTQ (Frantar et al., arXiv:2210.17323): each column's error is spread over the later ones.

    Args:
        weight: (O, I) float32.
        gram: (I, I), XᵀX.
        grid: where to round to.
        damping: share of the mean diagonal that is added to it.
    """
    order = gram.diagonal().argsort(descending=True, stable=True)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped(gram, damping)[order][:, order]))
    upper = torch.linalg.cholesky(inverse, upper=True)
    work = weight[:, order].clone()
    codes: list[Tensor] = []
    for start in range(0, work.shape[1], BLOCK):
        end = min(start + BLOCK, work.shape[1])
        part, factor = work[:, start:end], upper[start:end]
        errors = torch.empty_like(part)
        for j in range(end - start):
            column = order[start + j : start + j + 1]
            values = part[:, j : j + 1]
            codes.append(grid.nearest(values, column))
            errors[:, j : j + 1] = (values - grid.values(codes[-1], column)) / factor[j, start + j]
            part[:, j + 1 :].addmm_(errors[:, j : j + 1], factor[j : j + 1, start + j + 1 : end], alpha=-1)
        work[:, end:].addmm_(errors, factor[:, end:], alpha=-1)
    return torch.cat(codes, 1)[:, order.argsort()]


def descend(weight: Tensor, gram: Tensor, grid: Grid, codes: Tensor, *, sweeps: int = 1) -> Tensor:
    """Codes (O, I) after sweeps of coordinate descent: each column is set to its best value, the others held.

    Args:
        weight: (O, I) float32.
        gram: (I, I), XᵀX.
        grid: where to round to.
        codes: (O, I), where to start.
    """
    order = gram.diagonal().argsort(descending=True, stable=True)
    matrix = damped(gram)[order][:, order]
    diagonal = matrix.diagonal()
    new = codes[:, order].clone()
    held = grid.values(new, order)
    for _ in range(sweeps):
        slope = (weight[:, order] - held) @ matrix
        for start in range(0, len(order), BLOCK):
            end = min(start + BLOCK, len(order))
            steps = torch.empty_like(held[:, start:end])
            for j in range(start, end):
                column = order[j : j + 1]
                best = held[:, j : j + 1] + slope[:, j : j + 1] / diagonal[j]
                new[:, j : j + 1] = grid.nearest(best, column)
                value = grid.values(new[:, j : j + 1], column)
                step = value - held[:, j : j + 1]
                steps[:, j - start : j - start + 1] = step
                held[:, j : j + 1] = value
                slope[:, start:end].addmm_(step, matrix[j : j + 1, start:end], alpha=-1)
            slope[:, :start].addmm_(steps, matrix[start:end, :start], alpha=-1)
            slope[:, end:].addmm_(steps, matrix[start:end, end:], alpha=-1)
    return new[:, order.argsort()]


def corrected(weight: Tensor, gram: Tensor, cross: Tensor, share: float) -> Tensor:
    """The weight moved towards the one that gives the reference's outputs on the quantized model's inputs.

    With X̂ the inputs behind quantized layers and X the reference's, ‖X̂ Wᵀ − X W₀ᵀ‖ is least at
    W₀ + W₀ ((X − X̂)ᵀ X̂) (X̂ᵀX̂)⁻¹, damped. All of it fits the calibration text too well; half of it did best
    on other text.

    Args:
        weight: (O, I) float32.
        gram: (I, I), X̂ᵀX̂.
        cross: (I, I), X̂ᵀX.
        share: how far to go, 0 … 1.
    """
    return weight + share * torch.linalg.solve(damped(gram), (cross - gram) @ weight.T).T
