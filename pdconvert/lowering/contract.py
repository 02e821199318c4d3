"""The graph's contract: names, shapes and axes of what a function takes and gives (docs/contracts.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pdconvert.blocks import Head, KeysValuesLayer
from pdconvert.model import LayerSpec, ModelSpec
from pdconvert.program import Block

STATES = ("k_cache", "v_cache")
"""Names of the states."""

STATE_STEP = 32
"""Axes of a state that are a multiple of this are known to work (coremltools#2631: 270 fails, 256 works)."""


@dataclass(frozen=True)
class FunctionShape:
    """One static entry point: `tokens` new tokens on up to `past` cached ones."""

    tokens: int
    past: int = 0

    @property
    def name(self) -> str:
        if not self.past:
            return f"prefill_{self.tokens}"
        return f"decode_1_ctx{self.past}" if self.tokens == 1 else f"extend_{self.tokens}_ctx{self.past}"

    @property
    def keys(self) -> int:
        """Number of key positions: past and new."""
        return self.past + self.tokens


@dataclass(frozen=True)
class Port:
    """A graph input, output or state. Dtypes are Core ML's names: "fp16" or "int32"."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    dtype: str = "fp16"
    role: str = ""

    @classmethod
    def of(cls, role: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> Port:
        """A port that is named after its role; Core ML's names have no dots."""
        return cls(role.replace(".", "_"), shape, axes, role=role)

    @property
    def key(self) -> str:
        """What the contract calls it."""
        return self.role or self.name

    def manifest(self) -> dict[str, Any]:
        """The port as the manifest lists it; the role is the name unless several ports share one, or it has a dot."""
        axes, shape = list(self.axes), list(self.shape)
        return {"name": self.name, "role": self.key, "shape": shape, "dtype": self.dtype, "axes": axes}


@dataclass(frozen=True)
class Part:
    """A run of decoder layers in one package; the first part takes the embedding, the last one ends the model.

    Attributes:
        first, last: layers first … last − 1.
        starts, ends: whether it is the first, the last part.
    """

    first: int
    last: int
    starts: bool = True
    ends: bool = True

    @classmethod
    def whole(cls, spec: ModelSpec) -> Part:
        """The one part of a model that is not split."""
        return cls(0, len(spec.layers))


@dataclass(frozen=True)
class Interface:
    """What decides a package's ports besides geometry and function shape.

    Attributes:
        embedding: "host" or "graph".
        outputs: "kv" or "logits".
        logits: "row" or "all".
        state_columns: tokens that the states hold; 0 where the past is an input.
        head_limit: most token ids of one output of logits.
    """

    embedding: str = "host"
    outputs: str = "kv"
    logits: str = "row"
    state_columns: int = 0
    head_limit: int = 16384


def vocabulary_parts(vocabulary: int, limit: int) -> tuple[tuple[int, int], ...]:
    """Runs of token ids, (first, one beyond the last), as few and as equal as the limit allows."""
    size = -(-vocabulary // -(-vocabulary // limit))
    return tuple((first, min(first + size, vocabulary)) for first in range(0, vocabulary, size))


def state_columns(shapes: Sequence[FunctionShape]) -> int:
    """Tokens that states need for these functions, as a multiple that the Neural Engine takes for a last axis."""
    longest = max(shape.keys for shape in shapes)
    return -(-longest // STATE_STEP) * STATE_STEP


def attention_roles(layer: LayerSpec) -> tuple[str, str, str]:
    """Roles of the inputs that a layer's attention takes: cos, sin and mask."""
    local, window = ".local" if layer.local_rope else "", ".window" if layer.window else ""
    return f"rope_cos{local}", f"rope_sin{local}", f"mask{window}"


def input_ports(
    spec: ModelSpec, shape: FunctionShape, interface: Interface, part: Part | None = None
) -> list[Port]:
    """The inputs of a function, in the order of the contract: RoPE tables and masks as its layers take them."""
    part = part or Part.whole(spec)
    tokens, past = shape.tokens, shape.past
    if interface.embedding == "graph" and part.starts:
        ports = [Port("token_ids", (1, tokens), ("1", "token"), "int32")]
    else:
        ports = [Port("hidden", (1, spec.hidden_size, 1, tokens), ("1", "hidden", "1", "token"))]
    layers = spec.layers[part.first : part.last]
    for layer in sorted(
        {layer.local_rope: layer for layer in layers}.values(), key=lambda one: one.local_rope
    ):
        rope = (1, 1, spec.rope_of(layer).dims, tokens), ("1", "1", "rope_dim", "token")
        ports += [Port.of(role, *rope) for role in attention_roles(layer)[:2]]
    masks = sorted({attention_roles(layer)[2] for layer in layers})
    ports += [Port.of(role, (1, 1, shape.keys, tokens), ("1", "1", "key", "token")) for role in masks]
    if interface.state_columns:
        ports.append(Port("write", (1, 1, tokens, interface.state_columns), ("1", "1", "token", "column")))
    elif past:
        cache = (1, (part.last - part.first) * spec.kv_heads, spec.head_dim, past)
        axes = ("1", "layer*kv_head", "head_dim", "past_token")
        ports += [Port("past_k", cache, axes), Port("past_v", cache, axes)]
    if interface.outputs == "logits" and interface.logits == "row" and part.ends:
        ports.append(Port("row", (1, 1, tokens, 1), ("1", "1", "token", "1")))
    return ports


def output_ports(
    spec: ModelSpec, shape: FunctionShape, interface: Interface, part: Part | None = None
) -> list[Port]:
    """The outputs of a function, in the order of the contract; a part before the last gives `next_hidden` too."""
    part = part or Part.whole(spec)
    cache = (1, (part.last - part.first) * spec.kv_heads, spec.head_dim, shape.tokens)
    axes = ("1", "layer*kv_head", "head_dim", "token")
    ports = [Port("k", cache, axes), Port("v", cache, axes)]
    if not part.ends:
        ports.append(
            Port("next_hidden", (1, spec.hidden_size, 1, shape.tokens), ("1", "hidden", "1", "token"))
        )
    elif interface.outputs == "logits":
        ports += _logits_ports(spec, shape, interface)
    return ports


def _logits_ports(spec: ModelSpec, shape: FunctionShape, interface: Interface) -> list[Port]:
    """`logits`, or `logits_1`, `logits_2` and so on where the vocabulary is cut."""
    rows, axis = (1, "1") if interface.logits == "row" else (shape.tokens, "token")
    axes = ("1", "vocabulary", "1", axis)
    parts = vocabulary_parts(spec.vocab_size, interface.head_limit)
    names = ["logits"] if len(parts) == 1 else [f"logits_{number + 1}" for number in range(len(parts))]
    return [
        Port(name, (1, end - first, 1, rows), axes, role="logits")
        for name, (first, end) in zip(names, parts, strict=True)
    ]


def state_ports(spec: ModelSpec, interface: Interface) -> list[Port]:
    """The states of every function: the keys and the values of all tokens so far; none where the past is an input.

    Layers first, then the channels of all heads: every axis but the first is one that the Neural Engine takes, for
    any number of layers and heads.
    """
    if not interface.state_columns:
        return []
    shape = len(spec.layers), spec.kv_heads * spec.head_dim, 1, interface.state_columns
    return [Port(name, shape, ("layer", "kv_head*head_dim", "1", "column")) for name in STATES]


class ContractForm(nn.Module):
    """A block with the contract's inputs and outputs, whatever form the passes left it in.

    A fully adapted block passes through unchanged; for one that lacks a pass the layout changes are put
    around it, so that a recipe may leave the pass out.
    """

    def __init__(self, block: Block):
        super().__init__()
        self.block = block.module
        self.layout = block.layout
        self.is_head = isinstance(block.module, Head)
        self.keys_alone = isinstance(block.module, KeysValuesLayer)

    def forward(self, hidden: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """hidden (1, H, 1, S); rope_cos, rope_sin (1, 1, D, S); mask (1, 1, K, S); past_k, past_v (1, h, D, C)."""
        if not self.layout.channels_first:
            hidden = hidden.squeeze(2).transpose(1, 2)
        if self.is_head:
            pieces = self.block.pieces(hidden)
            return (
                pieces
                if self.layout.channels_first
                else tuple(x.transpose(1, 2).unsqueeze(2) for x in pieces)
            )
        rest = tuple(rest) if self.layout.heads_first else tuple(part.transpose(2, 3) for part in rest)
        rope, mask, past = rest[:2], rest[2:3], rest[3:]
        if self.keys_alone:
            keys, values = self.block(hidden, rope)
            return self.cache(keys), self.cache(values)
        hidden, keys, values = self.block(hidden, rope, *mask, tuple(past) or None)
        if not self.layout.channels_first:
            hidden = hidden.transpose(1, 2).unsqueeze(2)
        return hidden, self.cache(keys), self.cache(values)

    def cache(self, x: Tensor) -> Tensor:
        return x if self.layout.heads_first else x.transpose(2, 3)


def example_inputs(block: Block, rope_dims: int, shape: FunctionShape) -> tuple[Tensor, ...]:
    """Inputs of `ContractForm` on the meta device; distinct tensors, since export takes equal objects for one input."""
    spec = block.spec

    def meta(*size: int) -> Tensor:
        return torch.empty(size, device="meta")

    hidden = meta(1, spec.hidden_size, 1, shape.tokens)
    if isinstance(block.module, Head):
        return (hidden,)
    rope = [meta(1, 1, rope_dims, shape.tokens) for _ in range(2)]
    if isinstance(block.module, KeysValuesLayer):
        return (hidden, *rope)
    past = [meta(1, spec.kv_heads, spec.head_dim, shape.past) for _ in range(2 * bool(shape.past))]
    return (hidden, *rope, meta(1, 1, shape.keys, shape.tokens), *past)
