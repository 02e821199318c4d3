"""How near to the end of fp16 each block comes: the largest magnitudes of a run in fp32."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdconvert.forensics import block_and_scope

if TYPE_CHECKING:
    from torch import Tensor

    from pdconvert.executors.mil.plan import OpInfo

MASK = re.compile(r"mask([._]window)?")
"""The graph's inputs that hold a mask."""


@dataclass
class Peaks:
    """The largest magnitude in every part of every block, gathered op by op; `see` is a session's `watch`.

    Scores after the mask are left out: the mask's −40,000 is there on purpose, and would hide everything else.
    """

    _found: dict[tuple[str, str], tuple[float, str, str]] = field(default_factory=dict)

    def see(self, op: OpInfo, outputs: tuple[Tensor, ...]) -> None:
        """Take in an op's outputs, as far as the program types them as fp16."""
        if any(MASK.fullmatch(name) for name in op.inputs):
            return
        for name, info, value in zip(op.outputs, op.types, outputs, strict=False):
            block, scope = block_and_scope(name)
            if block is None or info.dtype != "fp16" or not value.numel():
                continue
            key, peak = (block, _part(scope)), float(value.abs().max())
            highest = self._found.get(key, (-1.0,))[0]
            if not math.isnan(highest) and not peak <= highest:  # a NaN comes in, and stays
                self._found[key] = peak, name, op.op_type

    def rows(self) -> list[dict[str, Any]]:
        """Per block and part, in the order of the run: `block`, `part`, `peak`, and the op that has it."""
        return [
            {"block": block, "part": part, "peak": peak, "op": name, "op_type": op_type}
            for (block, part), (peak, name, op_type) in self._found.items()
        ]


def _part(scope: str) -> str:
    """The part of a block that an op belongs to, by the name of its module."""
    if "norm" in scope:
        return "norm"
    if scope.startswith("self_attn"):
        return "attention"
    return "mlp" if scope.startswith("mlp") else "residual stream"
