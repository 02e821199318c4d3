"""Stored tensors from elsewhere as a pass: what another compilation quantized, or what was learned from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from safetensors.torch import load_file
from torch import Tensor

from pdconvert.program import Block, Pass
from pdconvert.quant.store import Stored, dequantized, load_block
from pdconvert.rewriting import rewrite, set_parameter

SCALES = "scales.safetensors"
"""Beside a block's stored tensors: the scales that scale_channels chose."""

LEARNED_FLOOR_DB = 8.0
"""Least SQNR of a block against itself before its scales were learned."""


@dataclass(frozen=True)
class FixedValues:
    """Give a block's parameters the values of stored tensors, records included.

    Attributes:
        values: by parameter name, all of them.
        floor: least SQNR against the step before, dB.
    """

    name: ClassVar[str] = "quantize_weights"
    values: Mapping[str, Stored]
    floor: float

    @property
    def floor_db(self) -> float:
        return self.floor

    def requires(self, block: Block) -> None:
        names = {name for name, _ in block.module.named_parameters()}
        assert names == set(self.values), "the block has other parameters"

    def run(self, block: Block) -> Block:
        module = rewrite(block.module, lambda part: None)
        for name, old in block.module.named_parameters():
            path, _, kind = name.rpartition(".")
            value = dequantized(self.values[name]).view(old.shape)
            set_parameter(module.get_submodule(path), kind, value)
        records = {name: value for name, value in self.values.items() if not isinstance(value, Tensor)}
        return replace(block, module=module, records=MappingProxyType(records))

    def ensures(self, before: Block, after: Block) -> None:
        assert all(after.records.keys() == side.keys() for side in (before.records, after.records) if side)


@dataclass(frozen=True)
class LearnedValues(FixedValues):
    """Values that were learned from quantized ones."""

    name: ClassVar[str] = "learn_scales"


def with_fixed(passes: Sequence[Pass], files: tuple[Path, Path]) -> tuple[Pass, ...]:
    """The passes with what they chose by calibration text replaced by what two files hold: quantized, then learned."""
    from passes.scale_channels import KnownScales

    quantized, learned = (load_block(path) for path in files)
    found: list[Pass] = []
    for item in passes:
        if item.name == "scale_channels":
            found.append(KnownScales(load_file(files[0].with_name(SCALES))))
        elif item.name != "quantize_weights":
            found.append(item)
        else:
            found.append(FixedValues(quantized, item.floor_db))
            found.append(LearnedValues(learned, LEARNED_FLOOR_DB))
    return tuple(found)
