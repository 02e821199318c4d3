"""An orthonormal basis of the residual stream other than the checkpoint's, told by what it is drawn from.

A randomised Hadamard matrix spreads a large channel evenly over all: every entry has the magnitude 1/√H. There is
one for widths m·2ᵏ where m is 1 or comes from a prime by Paley's constructions: 576 = 36·16, 2048, 5120 = 20·256.
For other widths the basis is the orthogonal factor of a Gaussian matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class Basis:
    """A basis, with x the channels of the checkpoint: x · Q are those in the basis.

    Attributes:
        size: channels, H.
        seed: of what is drawn.
    """

    size: int
    seed: int

    def matrix(self, device: torch.device | str = "cpu") -> Tensor:
        """Q, (H, H) fp32, drawn in float64; on "meta" only its shape."""
        device = torch.device(device)
        if device.type == "meta":
            return torch.empty(self.size, self.size, device=device)
        return _matrix(self.size, self.seed).to(device)


def into(x: Tensor, basis: Basis | None) -> Tensor:
    """(…, H) in the checkpoint's channels to a basis; None is the checkpoint's."""
    return x if basis is None else x @ basis.matrix(x.device)


def out_of(x: Tensor, basis: Basis | None) -> Tensor:
    """(…, H) in a basis to the checkpoint's channels."""
    return x if basis is None else x @ basis.matrix(x.device).T


@lru_cache(maxsize=1)
def _matrix(size: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    plain = hadamard(size)
    if plain is None:
        gaussian = torch.randn(size, size, generator=draw, dtype=torch.float64)
        orthogonal, upper = torch.linalg.qr(gaussian)
        return (orthogonal * upper.diagonal().sign()).float()
    signs = torch.randint(2, (size, 1), generator=draw, dtype=torch.float64) * 2 - 1
    return (signs * plain / size**0.5).float()


def hadamard(size: int) -> Tensor | None:
    """A matrix of ±1 with orthogonal rows, (size, size) float64; None where no construction is known here."""
    found = _paley(size)
    if found is not None or size % 2:
        return found
    half = hadamard(size // 2)
    return None if half is None else torch.cat((torch.cat((half, half), 1), torch.cat((half, -half), 1)))


def _paley(size: int) -> Tensor | None:
    """The matrix of order 1, of p + 1 with a prime p = 4n + 3, or of 2(p + 1) with p = 4n + 1 (Paley 1933)."""
    if size == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    if size % 4:
        return None
    first, second = size - 1, size // 2 - 1
    if _is_prime(first):  # size is a multiple of 4, so p = 4n + 3
        return torch.eye(size, dtype=torch.float64) + _bordered(first, -1)
    if second % 4 == 1 and _is_prime(second):
        core, one = _bordered(second, 1), torch.eye(second + 1, dtype=torch.float64)
        pairs = [[[1.0, 1.0], [1.0, -1.0]], [[1.0, -1.0], [-1.0, -1.0]]]
        twice, rest = (torch.tensor(pair, dtype=torch.float64) for pair in pairs)
        return torch.kron(core, twice) + torch.kron(one, rest)
    return None


def _bordered(prime: int, corner: int) -> Tensor:
    """Quadratic characters of i − j modulo a prime, with a first row of ones and a first column of `corner`."""
    numbers = torch.arange(prime)
    character = torch.full((prime,), -1.0, dtype=torch.float64)
    character[numbers * numbers % prime] = 1
    character[0] = 0
    matrix = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    matrix[0, 1:], matrix[1:, 0] = 1, corner
    matrix[1:, 1:] = character[(numbers[:, None] - numbers) % prime]
    return matrix


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
