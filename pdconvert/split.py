"""Cut a model into parts under a size: runs of decoder layers, between which one tensor goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdconvert.errors import InputError
from pdconvert.lowering.contract import Part

if TYPE_CHECKING:
    from pdconvert.prepare import Plan

WHOLE = "prefill.mlpackage"
"""Package of a model in one part."""


def split(sizes: Sequence[int], *, limit: int | None = None, parts: int | None = None) -> list[Part]:
    """Parts that hold the layers in order.

    Args:
        sizes: bytes of each layer in the package; the first includes the embedding, the last the head, where
            the package holds them.
        limit: most bytes of a part.
        parts: or the number of parts, of about equal bytes.

    Raises:
        InputError: one layer alone exceeds the limit, or there are fewer layers than parts.
    """
    if parts is not None:
        if parts > len(sizes):
            raise InputError(
                f"recipe: prefill.split_model.parts is {parts}, and the model has {len(sizes)} layers"
            )
        cuts = _even_cuts(sizes, parts)
    else:
        assert limit is not None
        cuts = _cuts_under(sizes, limit)
    ends = [*cuts, len(sizes)]
    starts = [0, *cuts]
    return [
        Part(first, last, starts=first == 0, ends=last == len(sizes))
        for first, last in zip(starts, ends, strict=True)
    ]


def package_parts(plan: Plan, stored: Mapping[str, int]) -> list[Part]:
    """How a recipe's split_model cuts the package.

    Args:
        stored: bytes of each block in the store, by name.
    """
    wanted = plan.recipe.prefill.split_model
    if wanted is None:
        return [Part.whole(plan.spec)]
    sizes = [stored[f"layers.{index}"] for index in range(len(plan.spec.layers))]
    sizes[0] += stored["embedding"] if plan.interface.embedding == "graph" else 0
    sizes[-1] += stored["head"] if plan.interface.outputs == "logits" else 0
    limit = None if wanted.limit_mb is None else wanted.limit_mb * 10**6
    return split(sizes, limit=limit, parts=wanted.parts)


def _cuts_under(sizes: Sequence[int], limit: int) -> list[int]:
    cuts: list[int] = []
    held = 0
    for index, size in enumerate(sizes):
        if size > limit:
            raise InputError(
                f"layer {index} alone has {size / 1e6:.1f} MB in the package, above the limit of {limit / 1e6:g} MB; "
                "raise prefill.split_model.limit_mb"
            )
        if held + size > limit:
            cuts.append(index)
            held = 0
        held += size
    return cuts


def _even_cuts(sizes: Sequence[int], parts: int) -> list[int]:
    """Cut where the running sum comes nearest to each even share, at least one layer a part."""
    total = sum(sizes)
    cuts: list[int] = []
    for number in range(1, parts):
        least = (cuts[-1] if cuts else 0) + 1
        most = len(sizes) - (parts - number)
        target = total * number / parts
        cuts.append(min(range(least, most + 1), key=lambda cut: abs(sum(sizes[:cut]) - target)))
    return cuts


def part_path(index: int, count: int) -> Path:
    """Where part `index` (from 0) of `count` lies in the build folder."""
    return Path(WHOLE) if count == 1 else Path("prefill") / f"part_{index + 1}_of_{count}.mlpackage"
