"""The last decoder layer cut down to what its keys and values need."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from pdconvert.blocks import DecoderLayer, KeysValuesLayer
from pdconvert.errors import InputError
from pdconvert.program import Block


@dataclass(frozen=True)
class TruncateLastLayer:
    """Drop the last layer's attention and MLP: decode starts with the last prompt token and computes them itself.

    Before: hidden → norm, attention, MLP → hidden, k, v.
    After:  hidden → norm, k_proj, v_proj, RoPE → k, v.
    """

    name: ClassVar[str] = "truncate_last_layer"
    floor_db: ClassVar[float] = 80.0

    def requires(self, block: Block) -> None:
        if not isinstance(block.module, DecoderLayer):
            raise InputError(f"truncate_last_layer: {block.name} is not a decoder layer")

    def run(self, block: Block) -> Block:
        kept = KeysValuesLayer(block.module)
        records = {
            name: record for name, record in block.records.items() if name in dict(kept.named_parameters())
        }
        return replace(block, module=kept, records=records)

    def ensures(self, before: Block, after: Block) -> None:
        assert after.outputs == ("k", "v"), "the hidden state is still an output"
