"""A layer's tensors between the block's names and the checkpoint's, where one may hold several of the other.

A family's `layer_tensors` maps block names to checkpoint names. Block tensors that share a checkpoint name are
its rows from the top down, in the order of the mapping: q, k and v of a fused `qkv_proj`, say. Blocks hold
norms as gains; a family whose checkpoints hold less by one says so in `ModelSpec.gain_offset`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pdconvert.blocks import DecoderLayer
from pdconvert.model import LayerSpec, ModelSpec, Rope, is_gain

if TYPE_CHECKING:
    from pdconvert.quant.store import Stored


def block_shapes(spec: ModelSpec, index: int) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters of layer `index` by their names in the block."""
    layer = spec.layers[index]
    return _shapes(layer, spec.rope_of(layer))


@cache
def _shapes(layer: LayerSpec, rope: Rope) -> dict[str, tuple[int, ...]]:
    """Computed once for equal layers: a config may name thousands of them."""
    with torch.device("meta"):
        return {name: tuple(value.shape) for name, value in DecoderLayer(layer, rope).named_parameters()}


def by_checkpoint_name(family: ModuleType, index: int, spec: ModelSpec) -> dict[str, list[str]]:
    """Checkpoint name → names in the block, in the order of their rows."""
    found: dict[str, list[str]] = {}
    for name, source_name in family.layer_tensors(index, spec).items():
        found.setdefault(source_name, []).append(name)
    return found


def expected_shapes(family: ModuleType, index: int, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of layer `index` by checkpoint name."""
    shapes, expected = block_shapes(spec, index), {}
    for source_name, names in by_checkpoint_name(family, index, spec).items():
        parts = [shapes[name] for name in names]
        expected[source_name] = (sum(part[0] for part in parts), *parts[0][1:])
    return expected


def read_layer(
    read: Callable[[str], Tensor], family: ModuleType, index: int, spec: ModelSpec
) -> dict[str, Tensor]:
    """The tensors of layer `index` by block name, each checkpoint tensor read once and shared by its rows."""
    shapes: dict[str, tuple[int, ...]] | None = None
    tensors: dict[str, Tensor] = {}
    for source_name, names in by_checkpoint_name(family, index, spec).items():
        value = read(source_name)
        if len(names) == 1:
            tensors[names[0]] = value
            continue
        shapes = shapes or block_shapes(spec, index)
        rows = value.split([shapes[name][0] for name in names])
        tensors.update(zip(names, rows, strict=True))
    return {name: value + spec.gain_offset if is_gain(name) else value for name, value in tensors.items()}


def reference_state(
    tensors: Mapping[str, Tensor], family: ModuleType, index: int, spec: ModelSpec
) -> dict[str, Tensor]:
    """Block tensors by the names in Hugging Face's layer, fused where it fuses.

    What is missing or unknown is passed over or on, for the strict loading of a layer to report.
    """
    prefix, rest = f"model.layers.{index}.", dict(tensors)
    rest |= {name: value - spec.gain_offset for name, value in tensors.items() if is_gain(name)}
    state = {}
    for source_name, names in by_checkpoint_name(family, index, spec).items():
        if all(name in rest for name in names):
            parts = [rest.pop(name) for name in names]
            state[source_name.removeprefix(prefix)] = parts[0] if len(parts) == 1 else torch.cat(parts)
    return {**state, **rest}


def as_in_checkpoint(name: str, value: Stored, spec: ModelSpec) -> Stored:
    """A stored tensor as the checkpoint, and mlx-lm, have it: gains without their offset."""
    if not spec.gain_offset or not is_gain(name):
        return value
    assert isinstance(value, Tensor), f"{name}: a quantized gain"
    return (value.float() - spec.gain_offset).half()


def join_rows(parts: list[Stored]) -> Stored:
    """Stored tensors on top of each other; of records all parts, which have their own for every row."""
    if len(parts) == 1:
        return parts[0]
    plain = [part for part in parts if isinstance(part, Tensor)]
    if len(plain) == len(parts):
        return torch.cat(plain)
    assert not plain, "a fused tensor is quantized in part"
    records = [part for part in parts if not isinstance(part, Tensor)]
    every = [record.parts() for record in records]
    forms = {
        (type(record), record.bits, getattr(record, "group", 0), getattr(record, "rows", 0), *held)
        for record, held in zip(records, every, strict=True)
    }
    assert len(forms) == 1, "parts of a fused tensor differ in their grid"
    return records[0].with_parts({name: torch.cat([held[name] for held in every]) for name in every[0]})
