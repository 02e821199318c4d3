"""cos and sin of the positions as graph inputs, computed on the host in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pdconvert.blocks import Head, RotaryTable
from pdconvert.errors import InputError
from pdconvert.program import Block
from pdconvert.rewriting import rewrite


@dataclass(frozen=True)
class RopeAsInput:
    """Take the rotary table out of the block.

    Before: `positions` (B, S) is an input, cos and sin are computed inside.
    After:  `rope_cos` and `rope_sin`, (1, 1, D_rot, S) once heads come first, are inputs.

    Source: Apple's engine rule 17: position arithmetic in fp16 is wrong past 2048, and an in-graph gather
    leaves the ANE.
    """

    name: ClassVar[str] = "rope_as_input"
    floor_db: ClassVar[float] = 80.0

    def requires(self, block: Block) -> None:
        if block.layout.rope_inputs:
            raise InputError("rope_as_input is listed twice in the recipe")

    def run(self, block: Block) -> Block:
        if isinstance(block.module, Head):
            return block
        module = rewrite(block.module, lambda part: None)
        for part in module.modules():
            for name in [name for name, child in part.named_children() if isinstance(child, RotaryTable)]:
                del part._modules[name]
        return block.with_layout(module, rope_inputs=True)

    def ensures(self, before: Block, after: Block) -> None:
        assert not any(isinstance(part, RotaryTable) for part in after.module.modules()), (
            "a rotary table is left"
        )
