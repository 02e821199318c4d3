"""Orthonormal bases of the residual stream: Hadamard where there is one, the same from the same seed."""

import pytest
import torch

from pdconvert.basis import Basis, hadamard, into, out_of

KNOWN = (1, 2, 4, 12, 16, 20, 24, 28, 36, 60, 576, 640, 896, 960, 1536)
"""Widths of models among them; 12, 20, 24 and 60 are Paley's first kind, 28 and 36 the second."""


@pytest.mark.parametrize("size", KNOWN)
def test_a_hadamard_matrix_has_signs_and_orthogonal_rows(size: int) -> None:
    found = hadamard(size)
    assert found is not None and bool((found.abs() == 1).all())
    assert torch.equal(found @ found.T, size * torch.eye(size, dtype=torch.float64))


@pytest.mark.parametrize("size", [3, 6, 33, 50, 92])
def test_widths_without_a_construction_have_none(size: int) -> None:
    assert hadamard(size) is None


@pytest.mark.parametrize("size", [1, 33, 50, 64, 576])
def test_a_basis_is_orthonormal_and_told_by_its_seed(size: int) -> None:
    one, other = Basis(size, 0).matrix(), Basis(size, 1).matrix()
    assert torch.allclose(one @ one.T, torch.eye(size), atol=1e-5)
    assert torch.equal(one, Basis(size, 0).matrix())
    assert size == 1 or not torch.allclose(one.abs(), other.abs()) or not torch.equal(one, other)


def test_one_loud_channel_is_spread_evenly() -> None:
    loud = torch.zeros(1, 576)
    loud[0, 17] = 240.0
    spread = into(loud, Basis(576, 3))
    assert torch.allclose(spread.abs(), torch.tensor(10.0))
    assert torch.allclose(out_of(spread, Basis(576, 3)), loud, atol=1e-4)


def test_none_is_the_checkpoints_basis_and_meta_has_a_shape() -> None:
    x = torch.randn(2, 3, 8)
    assert into(x, None) is x and out_of(x, None) is x
    assert into(x.to("meta"), Basis(8, 0)).shape == x.shape
