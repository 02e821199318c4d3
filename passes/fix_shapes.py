"""A static number of new tokens; a shorter input is padded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from pdconvert.errors import InputError
from pdconvert.program import Block


@dataclass(frozen=True)
class FixShapes:
    """Fix the number of new tokens of a block; what is computed for real tokens must not depend on the padding.

    Before: any number of tokens. After: exactly `tokens`, the last chunk of a probe padded up to it, the chunks
    before given as past.

    Source: Apple's engine rule 5: fully static shapes, one function per shape.

    Attributes:
        tokens: new tokens of one call.
    """

    name: ClassVar[str] = "fix_shapes"
    floor_db: ClassVar[float] = 80.0
    tokens: int = 128

    def requires(self, block: Block) -> None:
        if self.tokens < 1:
            raise InputError(f"fix_shapes: tokens must be at least 1, not {self.tokens}")

    def run(self, block: Block) -> Block:
        return replace(block, tokens=self.tokens)

    def ensures(self, before: Block, after: Block) -> None:
        assert after.tokens == self.tokens
