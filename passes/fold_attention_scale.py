"""The attention scale inside the query projection: one elementwise op less per layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from pdconvert.blocks import Head
from pdconvert.errors import InputError
from pdconvert.program import Block
from pdconvert.rewriting import rewrite


@dataclass(frozen=True)
class FoldAttentionScale:
    """Multiply q_proj by the attention scale, in the graph alone.

    Before: q = q_proj(x), scores = (s · q)ᵀ k. After: q = (s · q_proj)(x), scores = qᵀ k.

    Codes stay those of the store; the fp16 scales are multiplied, exactly for a power of two (head
    dimensions 16, 64, 256), else rounded once more (about 66 dB). MLX multiplies by the scale itself.
    """

    name: ClassVar[str] = "fold_attention_scale"
    graph_only: ClassVar[bool] = True
    floor_db: ClassVar[float] = 80.0

    def requires(self, block: Block) -> None:
        if not isinstance(block.module, Head) and block.module.self_attn.scale == 1:
            raise InputError("fold_attention_scale: the attention scale is 1 already; list the pass once")

    def run(self, block: Block) -> Block:
        if isinstance(block.module, Head):
            return block
        module = rewrite(block.module, lambda part: None)
        path, scale = module.query_projection, module.self_attn.scale
        folded = replace(block, module=module)
        for kind, _ in module.get_submodule(path).named_parameters(recurse=False):
            folded = folded.times(module, f"{path}.{kind}", scale)
        module.self_attn.scale = 1.0
        return folded

    def ensures(self, before: Block, after: Block) -> None:
        assert isinstance(after.module, Head) or after.module.self_attn.scale == 1, (
            "the scale is still applied"
        )
