"""Weighted one-dimensional k-means of many rows at once: the lookup tables of LUT-quantized weights.

In one dimension clusters are intervals of the sorted values, so that one Lloyd step needs only the clusters'
boundaries and sums between them, read off prefix sums: O(tables · levels · log values) after one sort.
"""

from __future__ import annotations

import torch
from torch import Tensor

INITIAL_POWER = 1 / 3
"""Levels of a fine quantizer lie with the density's cube root (Panter and Dite, 1951)."""
BINS = 256


def cluster_rows(values: Tensor, weights: Tensor, levels: int, *, steps: int = 30) -> Tensor:
    """Level values that minimise the weighted squared error of each row's values to their nearest level.

    Args:
        values: (R, N) finite.
        weights: (R, N) or (1, N), not negative.
        levels: of each table.
        steps: of Lloyd's iteration; it stops where nothing moves.

    Returns:
        (R, levels) float32, ascending; a row with fewer distinct values repeats some.
    """
    order = values.argsort(1)
    ordered = values.gather(1, order).double()
    weight = weights.expand_as(values).gather(1, order).double()
    weight = torch.where(weight.sum(1, keepdim=True) > 0, weight, torch.ones_like(weight))
    sums = _prefix(weight)
    moments = _prefix(weight * ordered)
    centers = _initial(ordered, sums, levels)
    for _ in range(steps):
        moved = _centers(ordered, sums, moments, centers)
        if torch.equal(moved, centers):
            break
        centers = moved
    return centers.float()


def _prefix(values: Tensor) -> Tensor:
    """Sums of the first 0 … N values of each row, (R, N + 1)."""
    return torch.nn.functional.pad(values.cumsum(1), (1, 0))


def _initial(ordered: Tensor, sums: Tensor, levels: int) -> Tensor:
    """Levels at equal shares of the cube root of the density, estimated on a grid of bins."""
    low, high = ordered[:, :1], ordered[:, -1:]
    edges = low + (high - low) * torch.linspace(0, 1, BINS + 1, dtype=ordered.dtype, device=ordered.device)
    inside = torch.searchsorted(ordered, edges[:, 1:-1].contiguous())
    inside = torch.nn.functional.pad(inside, (1, 1))
    inside[:, -1] = ordered.shape[1]
    mass = sums.gather(1, inside).diff(dim=1).clamp_min(0)
    share = _prefix(mass**INITIAL_POWER)
    share = share / share[:, -1:].clamp_min(torch.finfo(share.dtype).tiny)
    wanted = (torch.arange(levels, dtype=ordered.dtype, device=ordered.device) + 0.5) / levels
    position = torch.searchsorted(share, wanted.expand(len(share), -1).contiguous()).clamp(1, BINS)
    before, after = share.gather(1, position - 1), share.gather(1, position)
    part = (wanted - before) / (after - before).clamp_min(torch.finfo(share.dtype).tiny)
    start, end = edges.gather(1, position - 1), edges.gather(1, position)
    return start + part.clamp(0, 1) * (end - start)


def _centers(ordered: Tensor, sums: Tensor, moments: Tensor, centers: Tensor) -> Tensor:
    """One Lloyd step; a level without values moves between its neighbours."""
    middles = (centers[:, 1:] + centers[:, :-1]) / 2
    bounds = torch.nn.functional.pad(torch.searchsorted(ordered, middles.contiguous()), (1, 1))
    bounds[:, -1] = ordered.shape[1]
    mass = sums.gather(1, bounds).diff(dim=1)
    moment = moments.gather(1, bounds).diff(dim=1)
    return (
        torch.where(mass > 0, moment / mass.clamp_min(torch.finfo(mass.dtype).tiny), centers).sort(1).values
    )
