"""The passes, one per file, in their usual order; the tuple is the registration."""

from passes.eager_gqa_attention import EagerGqaAttention
from passes.fix_shapes import FixShapes
from passes.fold_attention_scale import FoldAttentionScale
from passes.fold_norm_gain import FoldNormGain
from passes.linear_to_conv2d import LinearToConv2d
from passes.quantize_weights import QuantizeWeights
from passes.rope_as_input import RopeAsInput
from passes.rotate_residual import RotateResidual
from passes.safe_rms_norm import SafeRmsNorm
from passes.scale_channels import ScaleChannels
from passes.scale_residual import ScaleResidual
from passes.split_head import SplitHead
from passes.truncate_last_layer import TruncateLastLayer

PASSES = (
    LinearToConv2d,
    EagerGqaAttention,
    SafeRmsNorm,
    RopeAsInput,
    RotateResidual,
    FoldNormGain,
    ScaleChannels,
    QuantizeWeights,
    FoldAttentionScale,
    ScaleResidual,
    TruncateLastLayer,
    SplitHead,
    FixShapes,
)
"""Every pass, in its usual order."""

AUTOMATIC = ("truncate_last_layer", "split_head", "fix_shapes")
"""Passes that the pipeline puts in itself, from the recipe's `prefill` section."""
