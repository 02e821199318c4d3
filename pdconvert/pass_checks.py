"""What the passes of a recipe ask of each other and of the model, checked before any weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pdconvert.errors import InputError
from pdconvert.program import Pass
from pdconvert.recipe.passes import quantizes

if TYPE_CHECKING:
    from pdconvert.model import ModelSpec
    from pdconvert.recipe import Recipe


def check_order(passes: Sequence[Pass]) -> None:
    """Whether scale_channels has weights to scale for, and keeps the gains that it writes.

    Raises:
        InputError: it does not.
    """
    names = [item.name for item in passes]
    if "scale_channels" not in names:
        return
    if not quantizes(passes):
        raise InputError(
            "recipe: scale_channels scales weights for their rounding; list quantize_weights after it, with a scheme"
        )
    place = names.index("scale_channels")
    for folding in ("fold_norm_gain", "rotate_residual"):
        if folding in names[place:]:
            raise InputError(
                f"recipe: {folding} would fold the gains of scale_channels away again; list it before scale_channels"
            )


def rotates(recipe: Recipe, spec: ModelSpec) -> bool:
    """Whether the recipe turns the residual stream, which the model and the decode half must follow.

    Raises:
        InputError: they cannot.
    """
    from passes import RotateResidual

    rotation = next((item for item in recipe.passes if isinstance(item, RotateResidual)), None)
    if rotation is None:
        return False
    for layer in dict.fromkeys(spec.layers):
        rotation.check_layer(layer)
    if recipe.decode.grid == "source":
        raise InputError(
            "recipe: decode.grid source keeps the checkpoint's codes, which rotate_residual changes; take the pass "
            "out, or use own or shared"
        )
    return True
