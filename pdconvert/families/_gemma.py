"""What the Gemma families share: gains of 1 + weight, norms on both sides, GeGLU, scaled embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pdconvert.errors import InputError
from pdconvert.families import _decoder as decoder
from pdconvert.families import _windows as windows
from pdconvert.families.config import flag, positive_int
from pdconvert.model import LayerSpec, ModelSpec

NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)

COMPUTED = (
    decoder.GEOMETRY - {"hidden_act"}
    | windows.KEYS
    | {"head_dim", "hidden_activation", "query_pre_attn_scalar", "attention_bias"}
)
"""Config keys of both families that decide what the model computes."""

FIXED = {"use_bidirectional_attention": False}
"""Config keys of which both families know one value."""

KNOWN = decoder.ROPE | {
    "hidden_act",  # Hugging Face and mlx-lm read hidden_activation
    "cache_implementation",
    "use_bidirectional_attention",
    "attn_logit_softcapping",
    "final_logit_softcapping",
}

WINDOW = 4096
"""Hugging Face's window where the config does not speak of one."""

QUERY_SCALAR = 256
"""Hugging Face's query_pre_attn_scalar where the config has none."""


def read_geometry(config: dict[str, Any], defaults: Mapping[str, Any], family: str) -> decoder.Geometry:
    """The numbers that all families have, with Gemma's activation."""
    return decoder.read_geometry(
        config,
        defaults,
        family,
        free_head_dim=True,
        even_width=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
    )


def window_size(config: dict[str, Any]) -> int:
    """The window of layers of type sliding_attention.

    Raises:
        InputError: it is no positive integer.
    """
    window = windows.window_size(config, WINDOW)
    if window is None:
        raise InputError("config.json: sliding_window must be a positive integer, not None")
    return window


def query_scalar(config: dict[str, Any]) -> int:
    """What stands under the root of the attention scale; transformers takes whole numbers only."""
    return positive_int(config, "query_pre_attn_scalar", QUERY_SCALAR)


def layer(
    config: dict[str, Any], geometry: decoder.Geometry, window: int | None, **features: Any
) -> LayerSpec:
    """A layer with norms on both sides and the config's attention scale."""
    bias = flag(config, "attention_bias", False)
    return geometry.layer(
        norms="both",
        attention_scale=query_scalar(config) ** -0.5,
        attention_bias=bias,
        output_bias=bias,
        window=window,
        **features,
    )


def rounded_scale(hidden_size: int) -> float:
    """√hidden_size in bfloat16: what Hugging Face multiplies by in the dtype that the checkpoints have, and mlx-lm
    always.

    It is 25.25 and not 25.298 for Gemma 3 270M. The whole model in fp32 would take the latter, which no machine
    that runs the published weights does.
    """
    bits = np.array([hidden_size**0.5], np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(rounded.astype(np.uint32).view(np.float32)[0])


def refuse_biases(spec: ModelSpec) -> None:
    """Raise InputError for biases, which mlx-lm's models do not have."""
    if spec.layers[0].attention_bias:
        raise InputError(
            f"config.json: attention_bias=true is not supported: mlx-lm's {spec.model_type} has no biases, so decode "
            "would fail"
        )
