import itertools

import pytest
import torch
from torch import Tensor

from pdconvert.quant.clustering import cluster_rows


def cost(values: Tensor, weights: Tensor, centers: Tensor) -> float:
    """Weighted squared error of values (N,) to the nearest of centers."""
    return ((values[:, None] - centers[None]).square().amin(1) * weights).sum().item()


def best_cost(values: Tensor, weights: Tensor, levels: int) -> float:
    """The optimum, over every cut of the sorted values into intervals."""
    order = values.argsort()
    values, weights = values[order].double(), weights[order].double()
    found = float("inf")
    for cuts in itertools.combinations(range(1, len(values)), levels - 1):
        edges = (0, *cuts, len(values))
        centers = [
            (values[a:b] * weights[a:b]).sum() / weights[a:b].sum().clamp_min(1e-30)
            for a, b in itertools.pairwise(edges)
        ]
        found = min(found, cost(values, weights, torch.stack(centers)))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_close_to_the_optimum(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(6, 16, generator=draw)
    weights = torch.rand(6, 16, generator=draw)
    centers = cluster_rows(values, weights, 4)
    found = sum(cost(v, w, c) for v, w, c in zip(values, weights, centers, strict=True))
    optimum = sum(best_cost(v, w, 4) for v, w in zip(values, weights, strict=True))
    assert optimum <= found * 1.0001
    assert found <= 2 * optimum  # Lloyd ends in local optima, and 16 values make it hard


def test_gaussian_values_reach_the_known_distortion() -> None:
    """Max (1960): the best 16 levels for a Gaussian have a mean squared error of 0.009497."""
    values = torch.randn(4, 1 << 16, generator=torch.Generator().manual_seed(0))
    centers = cluster_rows(values, torch.ones(1, 1), 16)
    error = (values[:, :, None] - centers[:, None]).square().amin(2).mean().item()
    assert error == pytest.approx(0.009497, rel=0.02)


def test_weights_decide() -> None:
    values = torch.tensor([[0.0, 1.0, 10.0, 11.0]])
    heavy = cluster_rows(values, torch.tensor([[1.0, 0.0, 1.0, 3.0]]), 2)
    assert torch.allclose(heavy, torch.tensor([[0.0, 10.75]]))


@pytest.mark.parametrize(
    "row",
    [torch.zeros(32), torch.full((32,), -3.5), torch.cat((torch.ones(31), torch.tensor([1e4])))],
    ids=["zero", "constant", "an outlier"],
)
def test_degenerate_rows_are_exact(row: Tensor) -> None:
    centers = cluster_rows(row[None], torch.ones(1, 1), 16)
    assert torch.isfinite(centers).all() and (centers.diff(dim=1) >= 0).all()
    assert cost(row, torch.ones(32), centers[0]) == 0


def test_no_weight_at_all_counts_as_equal_weights() -> None:
    values = torch.tensor([[0.0, 0.0, 4.0, 6.0]])
    assert torch.equal(cluster_rows(values, torch.zeros(1, 1), 2), torch.tensor([[0.0, 5.0]]))
