"""Whole models of every family after passes that rewrite weights in both halves, run by mlx-lm."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from checkpoints import MemorySource, head_block, layer_block, mlx_logits, random_source, reference_of
from drawing import draw_config, refusal

from passes import FoldNormGain, QuantizeWeights, RotateResidual, ScaleChannels
from pdconvert import families
from pdconvert.basis import Basis, into
from pdconvert.errors import InputError
from pdconvert.layer_tensors import by_checkpoint_name
from pdconvert.measure import sqnr_db
from pdconvert.model import is_gain
from pdconvert.program import Block, applied
from pdconvert.quant.calibration import Calibration
from pdconvert.reference import Reference

CASES = 3
IDS = [7 * i % 256 for i in range(19)]


def drawn(name: str, case: int) -> dict[str, Any]:
    family, draw = families.get({"model_type": name}), random.Random(f"rotated/{name}/{case}")
    config = draw_config(family, draw.choice)
    while refusal(family, config) is not None:
        config = draw_config(family, draw.choice)
    return config


def rewritten(reference: Reference, block: Block, passes: tuple, hidden: torch.Tensor) -> Block:
    nearest = QuantizeWeights(scheme="w4a16").nearest
    index = int(block.name.split(".")[1]) if block.name != "head" else 0
    calibration = Calibration([hidden], [hidden], lambda x: reference.probe(index, x), "cpu", nearest)
    for item in passes:
        item.requires(block)
        new = applied(item, block, calibration)
        item.ensures(block, new)
        block = new
    return block


def rewritten_checkpoint(
    reference: Reference, source: MemorySource, passes: tuple
) -> dict[str, torch.Tensor]:
    """All tensors by the checkpoint's names, after passes on every block."""
    spec, rotated = reference.spec, any(isinstance(item, RotateResidual) for item in passes)
    basis = Basis(spec.hidden_size, 0) if rotated else None
    tensors = {"model.embed_tokens.weight": into(source.values["model.embed_tokens.weight"], basis)}
    hidden = reference.embed(IDS)[None]
    for index in range(len(spec.layers)):
        block = rewritten(reference, layer_block(reference, index), passes, hidden)
        values = dict(block.module.named_parameters())
        values = {
            name: value - spec.gain_offset if is_gain(name) else value for name, value in values.items()
        }
        for name, parts in by_checkpoint_name(reference.family, index, spec).items():
            tensors[name] = torch.cat([values[part] for part in parts])
        hidden, _ = reference.run(reference.layer(index), hidden)
    for_head = (
        tuple(item for item in passes if not isinstance(item, ScaleChannels))
        if not spec.tied or rotated
        else ()
    )
    head = dict(rewritten(reference, head_block(reference), for_head, hidden).module.named_parameters())
    tensors["model.norm.weight"] = head["norm.weight"] - spec.gain_offset
    if not spec.tied or rotated:
        tensors |= {name: value for name, value in head.items() if name.startswith("lm_head")}
    return tensors


@torch.no_grad()
@pytest.mark.parametrize("case", range(CASES))
@pytest.mark.parametrize("name", families.names())
def test_mlx_computes_the_checkpoint_from_rewritten_weights(name: str, case: int) -> None:
    source = random_source(drawn(name, case), case)
    reference = reference_of(source)
    spec, family = reference.spec, reference.family
    before = spec.layers[0].norms == "before"
    passes = (*([RotateResidual()] if before else []), *([FoldNormGain()] * (case % 2)), ScaleChannels())
    tensors = rewritten_checkpoint(reference, source, passes)
    config = family.decode_config(source.config, replace(spec, tied=spec.tied and not before))
    hidden = reference.embed(IDS)[None]
    for index in range(len(spec.layers)):
        hidden, _ = reference.run(reference.layer(index), hidden)
    wanted = reference.logits(hidden[0], reference.head_tensors())
    assert sqnr_db(wanted, mlx_logits(config, tensors, IDS)) >= 50


@pytest.mark.parametrize("name", families.names())
def test_a_stream_that_may_not_turn_is_refused(name: str) -> None:
    layer = families.get({"model_type": name}).read_config(families.get({"model_type": name}).TINY).layers[0]
    if layer.norms == "before":
        RotateResidual().check_layer(layer)
        return
    with pytest.raises(InputError, match="norms behind attention and MLP"):
        RotateResidual().check_layer(layer)
