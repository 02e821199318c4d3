"""Attention without transposes and without repeated K and V, on heads as (heads, D, S)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pdconvert.blocks import Attention, Head, RMSNorm
from pdconvert.errors import InputError
from pdconvert.program import Block
from pdconvert.rewriting import rewrite


class GroupedAttention(Attention):
    """Eager attention on channels-first input; every KV head serves its group of query heads by broadcast.

    With q as (kv_heads, group, D, S) and k as (kv_heads, 1, D, K): scores = kᵀ·q is (…, K, S), softmax runs
    over the key axis, v·w is (…, D, S) and reshapes to (1, heads·D, 1, S). Nothing is transposed in memory.
    """

    dim_axis = 2

    def split(self, x: Tensor, heads: int) -> Tensor:
        """A projection's output (1, heads·D, 1, S) as (1, heads, D, S)."""
        return x.reshape(1, heads, self.spec.head_dim, x.shape[3])

    def forward(
        self, hidden: Tensor, rope: tuple[Tensor, ...], mask: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        raw_keys, new_keys, new_values = self.keys_values(hidden, rope)
        queries = self.queries(hidden, rope)
        queries = queries if self.scale == 1 else queries * self.scale
        keys = new_keys if past is None else torch.cat((past[0], new_keys), 3)
        values = new_values if past is None else torch.cat((past[1], new_values), 3)
        attended = self.attend(queries, keys, values, mask)
        output = self.o_proj(attended.reshape(1, self.spec.heads * self.spec.head_dim, 1, hidden.shape[3]))
        return output, raw_keys if self.layout.raw_keys else new_keys, new_values

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """queries (1, heads, D, S), keys and values (1, kv_heads, D, K), mask (1, 1, K, S) → (…, D, S)."""
        spec, length = self.spec, queries.shape[3]
        grouped = queries.reshape(spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim, length)
        keys = keys.reshape(spec.kv_heads, 1, spec.head_dim, keys.shape[3])
        values = values.reshape(spec.kv_heads, 1, spec.head_dim, values.shape[3])
        weights = torch.softmax(self.capped(keys.transpose(2, 3) @ grouped) + mask, 2)
        return values @ weights


class SingleHeadAttention(GroupedAttention):
    """The same, one query head at a time: many small products, as some engines schedule better."""

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """queries (1, heads, D, S), keys and values (1, kv_heads, D, K), mask (1, 1, K, S) → (1, heads·D, 1, S)."""
        group = self.spec.heads // self.spec.kv_heads
        outputs = []
        for head in range(self.spec.heads):
            key, value = keys.narrow(1, head // group, 1), values.narrow(1, head // group, 1)
            scores = self.capped(key.transpose(2, 3) @ queries.narrow(1, head, 1))
            weights = torch.softmax(scores + mask, 2)
            outputs.append(value @ weights)
        return torch.cat(outputs, 1)


@dataclass(frozen=True)
class EagerGqaAttention:
    """Replace the attention by its eager, grouped form.

    Before: q, k, v as (B, heads, S, D), K and V repeated for the query heads, mask (1, 1, S, K).
    After:  q, k, v as (1, heads, D, S), K and V broadcast to their group, mask (1, 1, K, S); norms of heads
            run along D where it is.

    Attributes:
        heads: `grouped` (one broadcast product for all heads) or `single` (one head at a time).

    Source: Apple's engine rules 11 and 14 (softmax along the key axis, no materialised repeat).
    """

    name: ClassVar[str] = "eager_gqa_attention"
    floor_db: ClassVar[float] = 80.0
    heads: Literal["grouped", "single"] = "grouped"

    def requires(self, block: Block) -> None:
        if block.layout.heads_first:
            raise InputError("eager_gqa_attention is listed twice in the recipe")
        if not block.layout.channels_first:
            raise InputError(
                "eager_gqa_attention needs channels-first blocks; list linear_to_conv2d before it"
            )

    def run(self, block: Block) -> Block:
        form = GroupedAttention if self.heads == "grouped" else SingleHeadAttention

        def change(part):
            if type(part) is Attention:
                part.__class__ = form
            if isinstance(part, RMSNorm) and part.per_head:
                part.channel_axis = form.dim_axis
            return None

        if isinstance(block.module, Head):
            return block
        return block.with_layout(rewrite(block.module, change), heads_first=True)

    def ensures(self, before: Block, after: Block) -> None:
        assert not any(type(part) is Attention for part in after.module.modules()), (
            "a plain attention is left"
        )
