"""gemma3_text: Gemma 3 270M and 1B, and other Gemma 3 as text; window layers have a RoPE of their own."""

from __future__ import annotations

from typing import Any

from pdconvert.errors import InputError
from pdconvert.families import _decoder as decoder
from pdconvert.families import _gemma as gemma
from pdconvert.families import _windows as windows
from pdconvert.families.config import positive_int, read_rope, refuse_unknown
from pdconvert.model import ModelSpec

LAYER = "transformers.models.gemma3.modeling_gemma3:Gemma3DecoderLayer"
NORM = "transformers.models.gemma3.modeling_gemma3:Gemma3RMSNorm"
ROTARY = "transformers.models.gemma3.modeling_gemma3:Gemma3RotaryEmbedding"

COMPUTED = gemma.COMPUTED
"""Config keys that, with the RoPE's, decide what the model computes."""

PATTERN = "sliding_window_pattern"
KNOWN = COMPUTED | gemma.KNOWN | {"rope_local_base_freq", PATTERN, f"_{PATTERN}"}

FIXED = {
    **gemma.FIXED,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
"""Config keys of which the family knows one value."""

GLOBAL_THETA, LOCAL_THETA = 1e6, 1e4
"""Hugging Face's RoPE bases where the config gives none."""

DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}

TINY = {
    "model_type": "gemma3_text",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 512,
    "query_pre_attn_scalar": 24,
    "attention_bias": False,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_theta": 20000.0,
    "rope_local_base_freq": 500.0,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


def ropes(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The RoPE settings of both kinds of layers."""
    local = decoder.number(config, "rope_local_base_freq", LOCAL_THETA)
    return windows.ropes(config, "gemma3_text", GLOBAL_THETA, local)


def types_of(config: dict[str, Any], layers: int) -> tuple[str, ...]:
    """Which layers have a window: as listed, or all but every n-th, 6 by default."""
    key = next((name for name in (PATTERN, f"_{PATTERN}") if config.get(name) is not None), PATTERN)
    pattern = positive_int(config, key, 6)
    default = [windows.FULL if (index + 1) % pattern == 0 else windows.SLIDING for index in range(layers)]
    return windows.layer_types(config, layers, default)


def hf_config(config: dict[str, Any]) -> Any:
    """The checkpoint's config as Hugging Face's own class."""
    layers = positive_int(config, "num_hidden_layers", DEFAULTS["num_hidden_layers"])
    listed = {**config, "layer_types": list(types_of(config, layers))}
    return decoder.make_hf_config("Gemma3TextConfig", listed, COMPUTED, ropes(config))


def read_config(config: dict[str, Any]) -> ModelSpec:
    """The geometry of a gemma3_text checkpoint.

    Raises:
        InputError: an unknown key, a value of the wrong type, or one that the family cannot hold.
    """
    refuse_unknown(config, KNOWN, "gemma3_text")
    decoder.require(config, FIXED, "gemma3_text")
    geometry = gemma.read_geometry(config, DEFAULTS, "gemma3_text")
    types = types_of(config, geometry.layers)
    held = windows.windows(types, gemma.window_size(config), geometry.max_positions)
    layers = tuple(
        gemma.layer(config, geometry, window, qk_norm="head", local_rope=kind == windows.SLIDING)
        for kind, window in zip(types, held, strict=True)
    )
    hugging_face = hf_config(config)
    kinds = {kind: read_rope(hugging_face, ROTARY, kind) for kind in set(types)}
    any_kind = next(iter(kinds.values()))
    return geometry.model(
        "gemma3_text",
        layers,
        kinds.get(windows.FULL, any_kind),
        local_rope=kinds.get(windows.SLIDING, any_kind),
        embedding_scale=gemma.rounded_scale(geometry.hidden_size),
        gain_offset=1.0,
    )


def layer_tensors(index: int, spec: ModelSpec) -> dict[str, str]:
    """Names of layer `index` in the block and in the checkpoint."""
    return decoder.layer_names(index, spec, gemma.NORMS)


def decode_config(config: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """The mlx-lm config of the same model, every default written out.

    Raises:
        InputError: mlx-lm would load the config and compute something else.
    """
    layer, kinds = spec.layers[0], ropes(config)
    gemma.refuse_biases(spec)
    return {
        **decoder.decode_base(spec, "Gemma3ForCausalLM", kinds[windows.FULL], holds_windows=True),
        "rope_local_base_freq": kinds[windows.SLIDING]["rope_theta"],
        "query_pre_attn_scalar": gemma.query_scalar(config),
        "hidden_activation": layer.activation,
        "sliding_window": gemma.window_size(config),
        PATTERN: pattern_of(spec),
    }


def pattern_of(spec: ModelSpec) -> int:
    """n, where every n-th layer is one without a window: all that mlx-lm can say.

    Raises:
        InputError: the layers follow no such rule, or none of them is without a window.
    """
    full = [index for index, layer in enumerate(spec.layers) if not layer.local_rope]
    if not full or full != list(range(full[0], len(spec.layers), full[0] + 1)):
        raise InputError(
            f"config.json: layers {full} of type full_attention are not supported: mlx-lm's gemma3_text wants every "
            "n-th layer to be one, and at least one of them"
        )
    return full[0] + 1
