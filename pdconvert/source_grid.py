"""The MLX half on the checkpoint's own grid: nothing is quantized a second time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdconvert.errors import InputError
from pdconvert.layer_tensors import by_checkpoint_name

if TYPE_CHECKING:
    from pdconvert.compile import StoredBlock
    from pdconvert.prepare import Plan
    from pdconvert.quant.store import DecodeStored
    from pdconvert.sources.base import Source

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True)
class SourceBlock:
    """A block as the checkpoint stores it: matrices on their grids, norms and biases in fp16.

    Attributes:
        name: of the block.
        names: of its tensors in the checkpoint.
    """

    source: Source
    name: str
    names: tuple[str, ...]

    def tensors(self) -> dict[str, DecodeStored]:
        """The tensors by checkpoint name.

        Raises:
            InputError: a value that fp16, or a matrix that MLX, does not hold.
        """
        from passes.quantize_weights import to_fp16

        infos = self.source.tensors()
        return {
            name: self.source.read_grid(name)
            if len(infos[name].shape) == 2
            else to_fp16(self.source.read(name), name)
            for name in self.names
        }


def source_blocks(plan: Plan, blocks: Sequence[StoredBlock]) -> list[StoredBlock | SourceBlock]:
    """The blocks of the MLX half: the checkpoint's own, but for an embedding or head that cannot stay as it is."""
    names: dict[str, tuple[str, ...]] = {
        f"layers.{index}": tuple(by_checkpoint_name(plan.family, index, plan.spec))
        for index in range(len(plan.spec.layers))
    }
    if keeps_grid(plan, EMBEDDING):
        names["embedding"] = (EMBEDDING,)
    if not plan.tied and keeps_grid(plan, HEAD):
        names["head"] = (NORM, HEAD, *(["lm_head.bias"] if plan.spec.head_bias else []))
    return [
        SourceBlock(plan.source, block.name, names[block.name]) if block.name in names else block
        for block in blocks
    ]


def keeps_grid(plan: Plan, name: str) -> bool:
    """Whether a matrix stays as the checkpoint has it: of what both halves hold, the decoder's linears alone."""
    info = plan.source.tensors().get(name)
    if plan.recipe.decode.grid != "source" or info is None or len(info.shape) != 2:
        return False
    own = name.startswith("model.layers.") or plan.decode_only_matrices
    return own and info.dtype in plan.source.grids


def check_source_grid(plan: Plan) -> None:
    """Whether MLX can hold the types of all of the decoder's linears.

    Raises:
        InputError: it cannot; the tensor is named.
    """
    infos = plan.source.tensors()
    for index in range(len(plan.spec.layers)):
        for name in by_checkpoint_name(plan.family, index, plan.spec):
            if len(infos[name].shape) == 2 and not keeps_grid(plan, name):
                raise InputError(
                    f"recipe: decode.grid source: {plan.source.label} stores {name} as {infos[name].dtype}; MLX holds "
                    "only a GGUF file's Q4_0, Q4_1, Q8_0 and F16 as they are; use own or shared"
                )
