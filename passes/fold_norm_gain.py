"""Norm gains multiplied into the linears that read them: one elementwise op less per norm."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from pdconvert.errors import InputError
from pdconvert.program import Block
from pdconvert.rewriting import rewrite, set_parameter


def fold_gains(module: Any) -> None:
    """Multiply the gains of a rewritten block's norms into the linears that alone read them; ones are left."""
    for norm_path, consumers in module.norm_consumers:
        norm = module.get_submodule(norm_path)
        for path in consumers:
            linear = module.get_submodule(path)
            shape = (1, -1) + (1,) * (linear.weight.dim() - 2)
            weight = linear.weight.detach() * norm.weight.detach().view(shape)
            set_parameter(linear, "weight", weight)
        set_parameter(norm, "weight", torch.ones_like(norm.weight))


@dataclass(frozen=True)
class FoldNormGain:
    """Fold the gain of every norm into the linears that alone read it.

    Before: W · (g ⊙ norm(x)). After: (W · diag(g)) · norm(x), gain 1, in both halves of the pair.

    It comes before quantize_weights, so that the product is what is quantized.
    """

    name: ClassVar[str] = "fold_norm_gain"
    floor_db: ClassVar[float] = 80.0

    def requires(self, block: Block) -> None:
        if block.records:
            raise InputError("fold_norm_gain must come before quantize_weights; move it up in the recipe")

    def run(self, block: Block) -> Block:
        module = rewrite(block.module, lambda part: None)
        fold_gains(module)
        for norm, _ in module.norm_consumers:
            module.get_submodule(norm).gain_is_one = True
        return replace(block, module=module)

    def ensures(self, before: Block, after: Block) -> None:
        for path, _ in after.module.norm_consumers:
            assert after.module.get_submodule(path).gain_is_one, f"{path} keeps its gain"
