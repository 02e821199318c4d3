"""Which linear gets how many bits, under a budget of bits or of KL divergence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

FALL_PER_BIT = 4.0
"""By how much one more bit divides the damage: half a step has a quarter of the squared error."""


@dataclass(frozen=True)
class Linear:
    """A linear in the search.

    Attributes:
        weights: how many it has.
        damage: KL divergence, nats, when it alone has the fewest bits.
    """

    weights: int
    damage: float


@dataclass(frozen=True)
class Allocation:
    """Bits by linear, and what they come to.

    Attributes:
        bits_per_weight: of codes and tables.
        predicted_kld: sum of the damages, nats: a prediction, since they do not quite add up.
    """

    bits: Mapping[str, int]
    bits_per_weight: float
    predicted_kld: float


def allocate(
    linears: Mapping[str, Linear],
    widths: Sequence[int],
    cost: Callable[[str, int], float],
    *,
    bits_per_weight: float | None = None,
    kld: float | None = None,
) -> Allocation | None:
    """Start with the fewest bits everywhere, and buy more where a bit saves most, until the budget is met.

    Args:
        linears: by name.
        widths: that a linear can have, ascending.
        cost: bits that a linear takes at a width, codes, scales and tables.
        bits_per_weight: stop before the mean exceeds it.
        kld: or: stop once the predicted divergence is at most this.

    Returns:
        The allocation; None where no allocation meets the budget.
    """
    total = sum(linear.weights for linear in linears.values())
    level = dict.fromkeys(linears, 0)

    def damage(name: str, at: int) -> float:
        return linears[name].damage / FALL_PER_BIT ** (widths[at] - widths[0])

    def step(name: str, by: int) -> tuple[float, float]:
        """Damage saved, and bits paid."""
        at = level[name]
        paid = cost(name, widths[at + by]) - cost(name, widths[at])
        return damage(name, at) - damage(name, at + by), paid

    spent = sum(cost(name, widths[0]) for name in linears)
    left = sum(damage(name, 0) for name in linears)
    while not (kld is not None and left <= kld):
        offers = []
        for name, at in level.items():
            for by in range(1, len(widths) - at):
                saved, paid = step(name, by)
                if bits_per_weight is None or (spent + paid) / total <= bits_per_weight:
                    offers.append((saved / paid, name, by))
        if not offers:
            break
        _, name, by = max(offers)
        saved, paid = step(name, by)
        level[name] += by
        spent, left = spent + paid, left - saved
    within = bits_per_weight is None or spent / total <= bits_per_weight
    if not within or (kld is not None and left > kld):
        return None
    return Allocation({name: widths[at] for name, at in level.items()}, spent / total, left)
