"""The quantized store of a plan without its values: names, shapes, types and grids of every stored tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pdconvert.layer_tensors import block_shapes
from pdconvert.prepare import Plan, make_forms
from pdconvert.program import Block
from pdconvert.quant.grid import LutLinear, QuantizedLinear, decode_group
from pdconvert.quant.store import Stored


@dataclass(frozen=True)
class WeightlessBlock:
    """A block of the store, in the form of `pdconvert.compile.CompiledBlock` as far as writers look at it.

    Attributes:
        shapes: of the stored tensors, by name in the block.
        bits: of its matrices: 8, or 16 where they are not quantized.
        group: input channels that share a scale; 0 for all of them.
        device: "meta", or "cpu" for zeros that can be written.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    bits: int
    group: int = 0
    device: str = "meta"

    def tensors(self) -> dict[str, Stored]:
        """The stored tensors by name."""
        return {name: self._stored(shape) for name, shape in self.shapes.items()}

    def _stored(self, shape: tuple[int, ...]) -> Stored:
        if len(shape) != 2 or self.bits == 16:
            return torch.zeros(shape, dtype=torch.float16, device=self.device)
        codes = torch.zeros(shape, dtype=torch.int8, device=self.device)
        columns = shape[1] // self.group if self.group else 1
        scales = torch.ones((shape[0], columns), dtype=torch.float16, device=self.device)
        return QuantizedLinear(codes, scales, self.bits, self.group)


def weightless_blocks(plan: Plan, device: str = "meta") -> list[WeightlessBlock]:
    """Embedding, layers and head of a plan, in the order of the store."""
    spec, decode = plan.spec, plan.recipe.decode
    assert decode.embedding_bits is not None and decode.head_bits is not None, "the recipe was not resolved"
    group = decode_group(spec.hidden_size) if plan.decode_only_matrices else 0
    matrix = (spec.vocab_size, spec.hidden_size)
    head: dict[str, tuple[int, ...]] = {"norm.weight": (spec.hidden_size,), "lm_head.weight": matrix}
    if spec.head_bias:
        head["lm_head.bias"] = (spec.vocab_size,)
    bits = 8 if plan.quantized else 16
    layers = [
        WeightlessBlock(f"layers.{index}", block_shapes(spec, index), bits, device=device)
        for index in range(len(spec.layers))
    ]
    return [
        WeightlessBlock("embedding", {"weight": matrix}, decode.embedding_bits, group, device),
        *layers,
        WeightlessBlock("head", head, decode.head_bits, group, device),
    ]


@dataclass(frozen=True)
class Store:
    """Everything that a plan would store, and what of it the package holds.

    Attributes:
        blocks: embedding, layers and head.
        skeletons: the blocks of the package in their final forms.
        held: the stored tensors that these compute with, by block and name; the embedding too, if it is there.
    """

    blocks: Sequence[WeightlessBlock]
    skeletons: Sequence[Block]
    held: Mapping[str, Stored]

    @classmethod
    def of(cls, plan: Plan) -> Store:
        """The store of a plan."""
        blocks = weightless_blocks(plan)
        skeletons = make_forms(plan).skeletons(plan.interface.outputs)
        held = _graph_tensors(skeletons, blocks)
        if plan.interface.embedding == "graph":
            held["embedding.weight"] = blocks[0].tensors()["weight"]
        return cls(blocks, skeletons, held)

    @property
    def layer_matrices(self) -> list[Stored]:
        """The weights of the decoder's linears."""
        layers = (block for block in self.blocks if block.name.startswith("layers."))
        tensors = (stored for block in layers for stored in block.tensors().values())
        return [stored for stored in tensors if len(stored.shape) == 2]


def _graph_tensors(skeletons: Sequence[Block], blocks: Sequence[WeightlessBlock]) -> dict[str, Stored]:
    stored = {block.name: block for block in blocks}
    found: dict[str, Stored] = {}
    for skeleton in skeletons:
        tensors = stored[skeleton.name].tensors()
        unused = {
            f"{path}.weight"
            for path, part in skeleton.module.named_modules()
            if getattr(part, "gain_is_one", False)
        }
        for name, _ in skeleton.module.named_parameters():
            if name not in unused:
                found[f"{skeleton.name}.{name}"] = tensors[name]
    return found


def raw_bytes(stored: Stored) -> list[int]:
    """Bytes of a stored tensor: codes and scales, or fp16 values."""
    if isinstance(stored, QuantizedLinear):
        return [stored.codes.numel() * stored.bits // 8, 2 * stored.scales.numel()]
    if isinstance(stored, LutLinear):
        return [stored.codes.numel() * stored.bits // 8, 2 * stored.tables.numel()]
    return [2 * stored.numel()]
