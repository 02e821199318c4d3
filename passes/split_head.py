"""A head in parts, so that no axis exceeds what a Neural Engine takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from pdconvert.blocks import Head
from pdconvert.errors import InputError
from pdconvert.lowering.contract import vocabulary_parts
from pdconvert.program import Block


class PartedHead(Head):
    """A head whose projection is cut into runs of the vocabulary, one product each.

    Attributes:
        parts: (first, one beyond the last) token id of each.
        vocabulary_axis: of the logits.
    """

    def __init__(self, head: Head, parts: tuple[tuple[int, int], ...]):
        nn.Module.__init__(self)
        self.norm, self.lm_head = head.norm, head.lm_head
        self.divisor, self.cap = head.divisor, head.cap
        self.parts = parts
        self.vocabulary_axis = 1 if head.lm_head.weight.dim() == 4 else -1

    def pieces(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Logits of each part."""
        normed = self.norm(hidden)
        product = nn.functional.conv2d if self.vocabulary_axis == 1 else nn.functional.linear
        weight, bias = self.lm_head.weight, self.lm_head.bias
        logits = []
        for first, end in self.parts:
            rows = None if bias is None else bias.narrow(0, first, end - first)
            logits.append(self.divided(product(normed, weight.narrow(0, first, end - first), rows)))
        return tuple(logits)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.cat(self.pieces(hidden), self.vocabulary_axis)


@dataclass(frozen=True)
class SplitHead:
    """Cut the head's projection along the vocabulary, in the graph alone; the store keeps it whole.

    Before: hidden → norm → Conv2d(H, V) → logits (1, V, 1, S).
    After:  hidden → norm → Conv2d(H, V₁), Conv2d(H, V₂), … → logits_1 (1, V₁, 1, S), logits_2 (1, V₂, 1, S), …

    The parts stay outputs of their own, since their concatenation would have the long axis again.

    Source: `ane-silicon-reference.md` (reverse-engineered): 16384 an axis through A15 and M1, 65536 from A16;
    more-ane-transformers: a linear of 50257 outputs is refused.

    Attributes:
        limit: most token ids of a part.
    """

    name: ClassVar[str] = "split_head"
    graph_only: ClassVar[bool] = True
    floor_db: ClassVar[float] = 80.0
    limit: int = 16384

    def requires(self, block: Block) -> None:
        if self.limit < 1:
            raise InputError(f"split_head: limit must be at least 1, not {self.limit}")
        if not isinstance(block.module, Head) or isinstance(block.module, PartedHead):
            raise InputError(f"split_head: {block.name} is not a head in one piece")

    def run(self, block: Block) -> Block:
        vocabulary = block.module.lm_head.weight.shape[0]
        return replace(block, module=PartedHead(block.module, vocabulary_parts(vocabulary, self.limit)))

    def ensures(self, before: Block, after: Block) -> None:
        ends = [0, *(end for _, end in after.module.parts)]
        assert [first for first, _ in after.module.parts] == ends[:-1], "a gap between two parts"
        assert ends[-1] == before.module.lm_head.weight.shape[0], "token ids are left over"
        assert all(end - first <= self.limit for first, end in after.module.parts), "a part is too long"
