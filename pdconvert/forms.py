"""The blocks of a model in their plain and in their final form, with a checkpoint's weights or without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pdconvert.blocks import DecoderLayer, Head, Layout
from pdconvert.model import ModelSpec
from pdconvert.program import Block, Pass


@dataclass(frozen=True)
class Forms:
    """What decides the form of a model's blocks, weights apart.

    Attributes:
        passes, head_passes, graph_passes, raw_keys: as of `Compiler`.
    """

    spec: ModelSpec
    passes: tuple[Pass, ...]
    head_passes: tuple[Pass, ...]
    graph_passes: Mapping[str, tuple[Pass, ...]]
    raw_keys: bool

    def skeletons(self, outputs: str) -> list[Block]:
        """Weightless blocks in their final form: the layers, and the head for `logits`."""
        blocks = [
            _rewritten(plain_layer(self.spec, index, None, self.raw_keys), self.passes, self.graph_passes)
            for index in range(len(self.spec.layers))
        ]
        if outputs == "logits":
            blocks.append(_rewritten(plain_head(self.spec, None), self.head_passes, self.graph_passes))
        return blocks

    def folded_gains(self) -> frozenset[str]:
        """Names of a layer's gains that the graph leaves out, since linears hold them."""
        block = _rewritten(plain_layer(self.spec, 0, None, self.raw_keys), self.passes, {"layers.0": ()})
        parts = block.module.named_modules()
        return frozenset(f"{path}.weight" for path, part in parts if getattr(part, "gain_is_one", False))


def plain_layer(spec: ModelSpec, index: int, tensors: Mapping[str, Tensor] | None, raw_keys: bool) -> Block:
    """Layer `index` in its plain form, holding `tensors`, or weightless."""
    with torch.device("meta"):
        module = DecoderLayer(spec.layers[index], spec.rope_of(spec.layers[index]))
    block = _block(f"layers.{index}", module, tensors, spec.layers[index], Layout())
    return block.with_layout(module, raw_keys=raw_keys)


def plain_head(spec: ModelSpec, tensors: Mapping[str, Tensor] | None) -> Block:
    """Final norm and head in their plain form, holding `tensors`, or weightless."""
    with torch.device("meta"):
        module = Head.of(spec)
    return _block("head", module, tensors, spec.layers[-1], Layout())


def _rewritten(block: Block, passes: Sequence[Pass], graph_passes: Mapping[str, Sequence[Pass]]) -> Block:
    """A weightless block after all passes; there is nothing to quantize."""
    for rewrite_pass in (*passes, *graph_passes[block.name]):
        block = block if rewrite_pass.name == "quantize_weights" else rewrite_pass.run(block)
    return block


def _block(
    name: str, module: nn.Module, tensors: Mapping[str, Tensor] | None, spec: Any, layout: Layout
) -> Block:
    if tensors is not None:
        module.load_state_dict(dict(tensors), strict=True, assign=True)
    return Block(name, module.eval().requires_grad_(False), spec, layout)
