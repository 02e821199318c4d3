"""Peak memory of a build: a fixed part for what is imported, and a part by geometry.

The stages hold what the code keeps: fp32 layers of the reference, the embedding with the copies that quantizing it
makes, de-quantized weights of the MIL executor, the decode weights that MLX loads, logits. The factors were fitted to
peaks of nine builds on Linux (x86-64, resident size by stage), which they give within 17 %: docs/plan.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdconvert.executors.mil.weights import default_cache_bytes
from pdconvert.forecast.weightless import Store
from pdconvert.layer_tensors import block_shapes
from pdconvert.prepare import Plan
from pdconvert.reference import KEEP_BYTES

IMPORTS_BYTES = 450 * 10**6
"""torch, transformers, coremltools, MLX and the interpreter: what a build of two tiny layers takes."""

LAYER_COPIES = 4.0
"""fp32 copies of a layer while it is compiled: the checkpoint's, the rewritten one, the stored one, a temporary."""

MATRIX_COPIES = 3.1
"""fp32 copies of the embedding, or of the head, while it is quantized."""

PROBE_LOGITS = 5.0
"""fp32 copies of the probe's logits."""

WINDOW_LOGITS = 14.0
"""fp32 copies of the logits of half a window of held-out text, in fp32 and fp64, of pair, MLX and reference."""

CACHES = 2.0
"""Weights of the executor in fp32: of the replayed functions, and of the pair that is then measured."""

FP32_BYTES = 4


@dataclass(frozen=True)
class Memory:
    """Peak resident bytes of a build's stages.

    Attributes:
        stages: bytes by stage.
    """

    stages: dict[str, int]

    @property
    def peak(self) -> int:
        return max(self.stages.values())

    @property
    def peak_in(self) -> str:
        """The stage with the peak."""
        return max(self.stages, key=lambda stage: self.stages[stage])


def forecast_memory(plan: Plan, store: Store, decode_bytes: int) -> Memory:
    """Peak memory of a plan's build, nothing of it cached from an earlier one.

    Args:
        decode_bytes: of the decode weights.
    """
    spec = plan.spec
    layers = [
        FP32_BYTES * sum(math.prod(shape) for shape in block_shapes(spec, index).values())
        for index in range(len(spec.layers))
    ]
    layer = max(layers)
    kept = sum(layers) if sum(layers) <= KEEP_BYTES else layer
    matrix = FP32_BYTES * spec.vocab_size * spec.hidden_size
    chunk = max(shape.tokens for shape in plan.shapes if not shape.past)
    row = FP32_BYTES * spec.vocab_size
    graph = FP32_BYTES * sum(math.prod(stored.shape) for stored in store.held.values())
    cache = min(default_cache_bytes(), graph)
    stages = {
        "layers": LAYER_COPIES * layer + (kept if kept != layer else 0),
        "head": kept + MATRIX_COPIES * matrix + PROBE_LOGITS * chunk * row,
        "replay": cache,
    }
    if not plan.source.random:
        longest = max(shape.past for shape in plan.shapes)
        rows = 2 * chunk if longest >= chunk else chunk
        stages["pair"] = CACHES * cache + decode_bytes + WINDOW_LOGITS * rows * row
    return Memory({stage: IMPORTS_BYTES + round(size) for stage, size in stages.items()})
