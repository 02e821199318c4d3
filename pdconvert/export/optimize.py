"""Graph optimization of an exported model by ONNX Runtime, one step after the other.

Each step reads the model that the one before wrote and writes standard ONNX ops only. Codes under a DequantizeLinear
stay codes; weights from lookup tables, which are made of constants, become dense float32. No Softmax may disappear
into another node, since tools for NPUs look for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdconvert.errors import CheckFailed
from pdconvert.export.session import open_session

STEPS = ("fold", "fuse")
"""`fold`: what is made of constants is computed, equal parts are joined. `fuse`: neighbouring nodes become one."""

BEYOND_FOLDING = (
    "Level1_RuleBasedTransformer",
    "ConstantSharing",
    "DoubleQDQPairsRemover",
    "EnsureUniqueDQForNodeUnit",
    "GeluFusionL1",
    "LayerNormFusionL1",
    "MatMulAddFusion",
    "QDQPropagationTransformer",
    "ReshapeFusion",
    "TransposeOptimizer",
    "WeightBiasQuantization",
)
"""ONNX Runtime's optimizers of its basic level that do more than `fold` may."""


def optimize(model: Path, step: str) -> Path:
    """Run one of `STEPS`.

    Args:
        model: an exported model, or one that this function wrote.

    Returns:
        The new model, `<stem>.<step>.onnx` beside the old one; its weights are in `<stem>.<step>.data`.

    Raises:
        CheckFailed: a Softmax is gone, or a node is of no standard op.
    """
    import onnx
    import onnxruntime

    target = model.with_name(f"{model.stem}.{step}.onnx")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(target)
    entry = "session.optimized_model_external_initializers_file_name"
    options.add_session_config_entry(entry, f"{target.stem}.data")
    open_session(model, options, disabled_optimizers=list(BEYOND_FOLDING) if step == "fold" else [])

    before, after = (onnx.load(path, load_external_data=False) for path in (model, target))
    used = {node.domain for node in after.graph.node}
    if used != {""}:
        raise CheckFailed(
            f"{target}: step {step} wrote ops of {', '.join(sorted(used - {''}))}; leave it out"
        )
    if softmaxes(before) != softmaxes(after):
        raise CheckFailed(
            f"{target}: step {step} left {softmaxes(after)} of {softmaxes(before)} Softmax nodes; leave it out"
        )
    kept = [item for item in after.opset_import if item.domain in used]
    del after.opset_import[:]
    after.opset_import.extend(kept)
    onnx.save(after, target)
    return target


def softmaxes(model: Any) -> int:
    """Softmax nodes of a model."""
    return sum(node.op_type == "Softmax" for node in model.graph.node)
