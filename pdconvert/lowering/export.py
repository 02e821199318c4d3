"""torch.export of a block on the meta device: no weights, one graph per distinct signature."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from pdconvert.blocks import Head
from pdconvert.errors import InputError
from pdconvert.lowering.contract import ContractForm, FunctionShape, example_inputs
from pdconvert.program import Block
from pdconvert.rewriting import rewrite, set_parameter

PREFIX = "block."


@dataclass(frozen=True)
class BlockGraph:
    """An exported block.

    Attributes:
        graph: the FX graph of aten ops.
        parameters: placeholder name → parameter name in the block.
        inputs: names of the remaining placeholders, in the contract's order.
    """

    graph: torch.fx.Graph
    parameters: dict[str, str]
    inputs: tuple[str, ...]


def signature(block: Block, shape: FunctionShape) -> tuple[Any, ...]:
    """Equal for two blocks whose graphs are equal but for the weights; which mask and RoPE come in is no matter."""
    parts = tuple((name, type(part).__name__, _numbers(part)) for name, part in block.module.named_modules())
    parameters = tuple((name, tuple(value.shape)) for name, value in block.module.named_parameters())
    spec = replace(block.spec, window=None, local_rope=False)
    return spec, block.layout, shape, parts, parameters


def _numbers(part: nn.Module) -> tuple[Any, ...]:
    """What of a part becomes a literal of the graph, or decides its ops."""
    names = ("eps", "gain_is_one", "scale", "parts", "divisor", "cap")
    return tuple(getattr(part, name, None) for name in names)


def export_block(block: Block, rope_dims: int, shape: FunctionShape) -> BlockGraph:
    """Export a block's contract form for one function shape.

    Raises:
        InputError: the block still computes its RoPE from positions, which no graph input gives.
    """
    if not (block.layout.rope_inputs or isinstance(block.module, Head)):
        raise InputError(f"block {block.name} takes positions, the graph gives rope_cos; list rope_as_input")

    def to_meta(part: nn.Module) -> None:
        for name, value in part._parameters.items():
            if value is not None:
                set_parameter(part, name, torch.empty_like(value, device="meta"))

    skeleton = rewrite(block.module, to_meta)
    for part in skeleton.modules():
        part.training = False
    form = ContractForm(block)
    form.block = skeleton
    with torch.no_grad():
        program = torch.export.export(form.eval(), example_inputs(block, rope_dims, shape))
    program.graph.eliminate_dead_code()  # rotated keys, say, where raw ones are the output
    names = program.graph_signature.inputs_to_parameters
    parameters = {placeholder: name.removeprefix(PREFIX) for placeholder, name in names.items()}
    return BlockGraph(program.graph, parameters, tuple(program.graph_signature.user_inputs))
