"""A residual stream that fits fp16: scaled by a power of two, which changes no mantissa."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from pdconvert.errors import InputError
from pdconvert.program import Block
from pdconvert.quant.grid import FP16_MAX
from pdconvert.ranges import Ranges
from pdconvert.rewriting import rewrite

HEADROOM = 4.0
"""By how much other text may exceed the measured peak: two bits."""


@dataclass(frozen=True)
class ScaleResidual:
    """Multiply the residual stream by a power of two, in the graph alone.

    Before: h ← h + o_proj(…), norm(h) with eps.
    After:  c·h ← c·h + (c·o_proj)(…), norm(c·h) with c²·eps: the same values out of every norm. In a layer with
            post-norms, c is in their gains, and 1/c in the linears that read the stream itself.

    The embedding is multiplied through the manifest's `embedding.scale`. The weights that write into the
    stream are multiplied when the package is written, so codes stay those of the store; the MLX half,
    whose activations are not fp16 on a Mac or have room, keeps the weights as stored.

    Attributes:
        factor: the power of two, or `auto`: the largest that leaves two bits above the measured peak.
    """

    name: ClassVar[str] = "scale_residual"
    graph_only: ClassVar[bool] = True
    floor_db: ClassVar[float] = 80.0
    factor: Literal["auto"] | float = "auto"

    def resolve(self, ranges: Ranges) -> tuple[ScaleResidual | None, str]:
        """The pass with its factor chosen, or None where none is needed, and why."""
        peak, where = ranges.residual_peak, ranges.residual_where
        if not math.isfinite(peak):
            raise InputError(f"scale_residual: the residual stream in {where} is not finite, in fp32 already")
        exponent = math.ceil(math.log2(max(peak, 1.0) * HEADROOM / FP16_MAX))
        measured = f"the residual stream peaks at {peak:,.0f} in {where}"
        if exponent <= 0:
            return None, f"{measured}, more than a factor of {HEADROOM:g} below {FP16_MAX:,.0f}: not needed"
        return ScaleResidual(2.0**-exponent), f"{measured}: scaled by 1/{2**exponent}"

    def requires(self, block: Block) -> None:
        if self.factor == "auto":
            raise InputError("scale_residual: `auto` was not resolved; measure the ranges first")
        if self.factor <= 0 or math.frexp(self.factor)[0] != 0.5:
            raise InputError(
                f"scale_residual: factor {self.factor} is not a power of two; use 0.5, 0.25, 0.125, …"
            )
        if block.layout.residual != 1:
            raise InputError("scale_residual is listed twice in the recipe")

    def run(self, block: Block) -> Block:
        factor = float(self.factor)
        module = rewrite(block.module, lambda part: None)
        scaled = replace(block, module=module)
        for path in module.residual_writers:
            for kind, _ in module.get_submodule(path).named_parameters(recurse=False):
                scaled = scaled.times(module, f"{path}.{kind}", factor)
        for path in module.residual_linears:
            scaled = scaled.times(module, f"{path}.weight", 1 / factor)
        for path in module.residual_readers:
            module.get_submodule(path).eps *= factor**2
        return scaled.with_layout(module, residual=factor)

    def ensures(self, before: Block, after: Block) -> None:
        for path in after.module.residual_readers:
            eps = before.module.get_submodule(path).eps * float(self.factor) ** 2
            assert after.module.get_submodule(path).eps == eps, f"{path} keeps its eps"
