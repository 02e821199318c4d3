"""The quantized store of a plan without its values: names, shapes, types and grids of every stored tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from pdconvert.layer_tensors import block_shapes
from pdconvert.prepare import Plan, make_forms
from pdconvert.program import Block, Pass
from pdconvert.quant.grid import QuantizedLinear
from pdconvert.quant.store import DecodeStored, Stored
from pdconvert.recipe.passes import quantizer_of

if TYPE_CHECKING:
    from passes import QuantizeWeights


@dataclass(frozen=True)
class WeightlessBlock:
    """A block of the store, in the form of `pdconvert.compile.CompiledBlock` as far as writers look at it.

    Attributes:
        shapes: of the stored tensors, by name in the block.
        quantizer: decides the form of its matrices.
        device: "meta", or "cpu" for zeros that can be written.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    quantizer: QuantizeWeights
    device: str = "meta"

    def tensors(self) -> dict[str, Stored]:
        """The stored tensors by name."""
        return {name: self._stored(name, shape) for name, shape in self.shapes.items()}

    def _stored(self, name: str, shape: tuple[int, ...]) -> Stored:
        if len(shape) != 2 or self.quantizer.scheme == "none":
            return torch.zeros(shape, dtype=torch.float16, device=self.device)
        return self.quantizer.blank(f"{self.name}.{name}", (shape[0], shape[1]), self.device)


def weightless_blocks(
    plan: Plan, device: str = "meta", passes: Sequence[Pass] | None = None
) -> list[WeightlessBlock]:
    """Embedding, layers and head of a plan, in the order of the store.

    Args:
        passes: of the layers, the quantizer among them; those of both halves by default.
    """
    from passes import QuantizeWeights

    spec, decode = plan.spec, plan.recipe.decode
    chosen = plan.shared_passes if passes is None else passes
    quantizer = quantizer_of(chosen)

    def matrices(bits: int | None) -> QuantizeWeights:
        """Of embedding or head."""
        granularity: Literal["per_group", "per_channel"] = (
            "per_group" if plan.decode_only_matrices else "per_channel"
        )
        return QuantizeWeights(scheme="none" if bits == 16 else "w8a16", granularity=granularity)

    matrix = (spec.vocab_size, spec.hidden_size)
    head: dict[str, tuple[int, ...]] = {"norm.weight": (spec.hidden_size,), "lm_head.weight": matrix}
    if spec.head_bias:
        head["lm_head.bias"] = (spec.vocab_size,)
    layers = [
        WeightlessBlock(f"layers.{index}", block_shapes(spec, index), quantizer, device)
        for index in range(len(spec.layers))
    ]
    return [
        WeightlessBlock("embedding", {"weight": matrix}, matrices(decode.embedding_bits), device),
        *layers,
        WeightlessBlock("head", head, matrices(decode.head_bits), device),
    ]


@dataclass(frozen=True)
class Store:
    """Everything that a plan would store, and what of it the package holds.

    Attributes:
        blocks: embedding, layers and head.
        decode_blocks: the same in the form of the MLX half, where it has a grid of its own.
        skeletons: the blocks of the package in their final forms.
        held: the stored tensors that these compute with, by block and name; the embedding too, if it is there.
    """

    blocks: Sequence[WeightlessBlock]
    decode_blocks: Sequence[WeightlessBlock]
    skeletons: Sequence[Block]
    held: Mapping[str, Stored]

    @classmethod
    def of(cls, plan: Plan) -> Store:
        """The store of a plan."""
        blocks = weightless_blocks(plan)
        skeletons = make_forms(plan).skeletons(plan.interface.outputs)
        held = _graph_tensors(skeletons, blocks)
        whole_head = "head.lm_head.weight" in held and plan.spec.vocab_size <= plan.interface.head_limit
        if plan.interface.embedding == "graph" and not (plan.tied and whole_head):  # else the two share
            held["embedding.weight"] = blocks[0].tensors()["weight"]
        own = plan.recipe.decode.grid == "own"
        decode_blocks = weightless_blocks(plan, passes=plan.decode_passes) if own else blocks
        return cls(blocks, decode_blocks, skeletons, held)

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


def on_source_grid(matrix: DecodeStored, bits: int) -> Stored:
    """A matrix in the form of its checkpoint: codes in groups of 32, whose biases MLX stores for any grid, or fp16."""
    rows, columns = matrix.shape
    if bits == 16:
        return torch.zeros((rows, columns), dtype=torch.float16, device="meta")
    codes = torch.zeros((rows, columns), dtype=torch.int8, device="meta")
    scales = torch.ones((rows, columns // 32), dtype=torch.float16, device="meta")
    return QuantizedLinear(codes, scales, bits, 32)


def raw_bytes(stored: Stored) -> list[int]:
    """Bytes of a stored tensor: the parts of a record, or fp16 values."""
    if isinstance(stored, torch.Tensor):
        return [2 * stored.numel()]
    return [math.ceil(bits / 8) for bits in stored.part_bits().values()]
