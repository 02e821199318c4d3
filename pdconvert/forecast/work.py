"""What each function and each decoded token computes and moves, from shapes alone.

Only products count as arithmetic, two operations for each multiply-and-add, as in `pdconvert inspect`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pdconvert.blocks import DecoderLayer, Head
from pdconvert.forecast.sizes import decode_read_bytes
from pdconvert.forecast.weightless import Store, raw_bytes
from pdconvert.lowering.contract import FunctionShape
from pdconvert.model import LayerSpec
from pdconvert.prepare import Plan
from pdconvert.program import Block
from pdconvert.quant.grid import LutLinear
from pdconvert.quant.store import Stored

FP16_BYTES = 2


@dataclass(frozen=True)
class FunctionWork:
    """One call of a function.

    Attributes:
        flops: of its products.
        weight_bytes: as stored.
        expanded_bytes: the same with integers in fp16, for an engine that expands them first.
        io_bytes: of K and V that it takes and gives, hidden states and mask.
    """

    name: str
    tokens: int
    past: int
    flops: int
    weight_bytes: int
    expanded_bytes: int
    io_bytes: int


@dataclass(frozen=True)
class DecodeWork:
    """One token through the MLX half, and a prompt through it without the package.

    Attributes:
        weight_bytes: read for every token: the linears, the norms, the head.
        linear_flops: of a token in all layers.
        attention_flops: of a token for each earlier one.
        kv_layers: per layer, bytes of K and V of one token, fp16, and how many tokens it keeps (None: all).
    """

    weight_bytes: int
    linear_flops: int
    attention_flops: int
    kv_layers: tuple[tuple[int, int | None], ...]

    @property
    def kv_bytes(self) -> int:
        """K and V of one token in all layers."""
        return self.cache_bytes(1)

    def cache_bytes(self, tokens: int) -> int:
        """The whole cache after so many tokens."""
        return sum(size * min(tokens, window or tokens) for size, window in self.kv_layers)

    def prompt_flops(self, tokens: int) -> float:
        """Operations of a causal prefill of so many tokens."""
        return tokens * (self.linear_flops + self.attention_flops * (tokens + 1) / 2)


def function_works(plan: Plan, store: Store) -> list[FunctionWork]:
    """The work of every function of a plan's package."""
    return [_function_work(plan, shape, store) for shape in plan.shapes]


def _function_work(plan: Plan, shape: FunctionShape, store: Store) -> FunctionWork:
    spec, tokens, held = plan.spec, shape.tokens, store.held
    one_row = plan.interface.outputs == "logits" and plan.interface.logits == "row"
    flops = 2 * tokens * spec.hidden_size if one_row else 0
    for skeleton in store.skeletons:
        columns = 1 if isinstance(skeleton.module, Head) and one_row else tokens
        flops += 2 * columns * _matrix_elements(skeleton, held)
        if isinstance(skeleton.module, DecoderLayer):
            flops += tokens * shape.keys * _attention_flops(skeleton.spec)
    cache = len(spec.layers) * spec.kv_heads * spec.head_dim * 2
    flops += 2 * cache * tokens * plan.interface.state_columns  # states place new columns by a product
    values = cache * (shape.past + tokens) + spec.hidden_size * tokens + shape.keys * tokens
    # Of an embedding in the graph only the rows of the tokens are read.
    read = [stored for name, stored in held.items() if name != "embedding.weight"]
    return FunctionWork(
        name=shape.name,
        tokens=tokens,
        past=shape.past,
        flops=flops,
        weight_bytes=sum(sum(raw_bytes(stored)) for stored in read),
        expanded_bytes=sum(map(_expanded_bytes, read)),
        io_bytes=FP16_BYTES * values,
    )


def _expanded_bytes(stored: Stored) -> int:
    """Bytes where integers are expanded to fp16 first; tables are not."""
    return sum(raw_bytes(stored)) if isinstance(stored, LutLinear) else FP16_BYTES * math.prod(stored.shape)


def _matrix_elements(skeleton: Block, held: Mapping[str, Stored]) -> int:
    prefix = f"{skeleton.name}."
    shapes = [tuple(stored.shape) for name, stored in held.items() if name.startswith(prefix)]
    return sum(math.prod(shape) for shape in shapes if len(shape) == 2)


def _attention_flops(layer: LayerSpec) -> int:
    """Operations of one query token for each key: the scores, and the sum of values."""
    return 4 * layer.heads * layer.head_dim


def decode_work(plan: Plan, store: Store) -> DecodeWork:
    """The work of the MLX half. A row of the embedding is next to nothing; the head is read whole."""
    layers = plan.spec.layers
    return DecodeWork(
        weight_bytes=decode_read_bytes(plan, store),
        linear_flops=2 * sum(math.prod(stored.shape) for stored in store.layer_matrices),
        attention_flops=sum(map(_attention_flops, layers)),
        kv_layers=tuple((2 * FP16_BYTES * layer.kv_heads * layer.head_dim, layer.window) for layer in layers),
    )
