"""RMSNorm that does not overflow fp16 when it squares a large residual stream."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pdconvert.blocks import RMSNorm
from pdconvert.errors import InputError
from pdconvert.program import Block
from pdconvert.quant.grid import FP16_MAX
from pdconvert.ranges import Ranges
from pdconvert.rewriting import rewrite

SMALLEST_MAXIMUM = 2.0**-13
"""Rows below this maximum are scaled by it instead: eps / max² stays finite in fp16, zero rows stay zero."""

LARGEST_ROOT = 128.0
"""√eps / max is kept below it, whatever eps is, so that its square fits fp16 too."""


class RowMaxRMSNorm(RMSNorm):
    """RMSNorm of x / max|x|, with eps / max|x|² so that eps keeps its meaning."""

    def forward(self, x: Tensor) -> Tensor:
        axis = self.channel_axis
        smallest = max(SMALLEST_MAXIMUM, math.sqrt(self.eps) / LARGEST_ROOT)
        peak = x.abs().amax(axis, keepdim=True).clamp_min(smallest)
        scaled = x / peak
        root_eps = math.sqrt(self.eps) / peak
        mean_square = (scaled * scaled).mean(axis, keepdim=True) + root_eps * root_eps
        return self.with_gain(scaled * torch.rsqrt(mean_square))


class LayerNormRMSNorm(RMSNorm):
    """RMSNorm as the layer norm of [x, −x]: its mean is zero and its variance the mean square of x."""

    def forward(self, x: Tensor) -> Tensor:
        if self.channel_axis == 1:
            doubled = torch.cat((x, -x), 1).permute(0, 2, 3, 1)
            normal = torch.nn.functional.layer_norm(doubled, doubled.shape[-1:], eps=self.eps)
            return self.with_gain(normal.permute(0, 3, 1, 2).narrow(1, 0, x.shape[1]))
        if self.channel_axis == 2:
            doubled = torch.cat((x, -x), 2).transpose(2, 3)
            normal = torch.nn.functional.layer_norm(doubled, doubled.shape[-1:], eps=self.eps)
            return self.with_gain(normal.transpose(2, 3).narrow(2, 0, x.shape[2]))
        doubled = torch.cat((x, -x), -1)
        normal = torch.nn.functional.layer_norm(doubled, doubled.shape[-1:], eps=self.eps)
        return self.with_gain(normal.narrow(-1, 0, x.shape[-1]))


HEADROOM = 2.0
"""By how much other text may exceed the measured peak before a square overflows."""

FORMS = {"row_max": RowMaxRMSNorm, "layer_norm": LayerNormRMSNorm}


@dataclass(frozen=True)
class SafeRmsNorm:
    """Replace RMSNorm by a form whose squares fit fp16.

    Before: x · rsqrt(mean(x²) + eps) · w; x² overflows fp16 from |x| = 256 on.
    After:  with m = max|x|: x/m · rsqrt(mean((x/m)²) + (√eps/m)²) · w.

    Attributes:
        method: `row_max`, or `layer_norm` (the layer norm of [x, −x], one fused op; whether its inside
            overflows depends on the engine, and the executor here computes it in fp32), or `auto`: row_max
            where the squares of the measured residual stream, or of another norm's input, come near the end of
            fp16, else none.
    """

    name: ClassVar[str] = "safe_rms_norm"
    floor_db: ClassVar[float] = 80.0
    method: Literal["row_max", "layer_norm", "auto"] = "row_max"

    def resolve(self, ranges: Ranges) -> tuple[SafeRmsNorm | None, str]:
        """The pass with its method chosen, or None where a plain norm is safe, and why."""
        limit = math.sqrt(FP16_MAX) / HEADROOM
        peak = max(ranges.residual_peak, ranges.norm_peak)
        measured = f"the residual stream peaks at {ranges.residual_peak:,.0f} in {ranges.residual_where}"
        if ranges.norm_peak > ranges.residual_peak:
            measured = f"the input of a norm peaks at {ranges.norm_peak:,.0f} in {ranges.norm_where}"
        if peak < limit:
            return None, f"{measured}, and squares are safe up to {limit:.0f}: not needed"
        return SafeRmsNorm("row_max"), f"{measured}, and squares are safe only up to {limit:.0f}: row_max"

    def requires(self, block: Block) -> None:
        if self.method == "auto":
            raise InputError("safe_rms_norm: `auto` was not resolved; measure the ranges first")
        if any(type(part) in FORMS.values() for part in block.module.modules()):
            raise InputError("safe_rms_norm is listed twice in the recipe")

    def run(self, block: Block) -> Block:
        form = FORMS[self.method]

        def change(part):
            if type(part) is RMSNorm:
                part.__class__ = form
            return None

        return block.with_layout(rewrite(block.module, change))

    def ensures(self, before: Block, after: Block) -> None:
        assert not any(type(part) is RMSNorm for part in after.module.modules()), "a plain RMSNorm is left"
