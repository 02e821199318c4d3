"""phi3: Phi-3, Phi-3.5 and Phi-4 up to their window; fused qkv and gate_up, a part of each head may rotate.

With longrope a model has two sets of RoPE factors. Hugging Face takes short_factor for texts of up to
original_max_position_embeddings tokens, and computes everything again with long_factor beyond; mlx-lm takes
long_factor always. The rule here, for both halves: short_factor, in a context that ends where Hugging Face would
change over. mlx-lm's config gets that set as its long_factor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pdconvert.errors import InputError
from pdconvert.families import _decoder as decoder
from pdconvert.families import _windows as windows
from pdconvert.families.config import (
    is_positive,
    positive_int,
    read_rope,
    refuse_unknown,
    rope_parameters,
)
from pdconvert.model import ModelSpec

LAYER = "transformers.models.phi3.modeling_phi3:Phi3DecoderLayer"
NORM = "transformers.models.phi3.modeling_phi3:Phi3RMSNorm"
ROTARY = "transformers.models.phi3.modeling_phi3:Phi3RotaryEmbedding"

FIXED = {
    "attention_bias": False,
    "mlp_bias": False,
    "lm_head_bias": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}
"""Config keys of which the family knows one value."""

LONGROPE = ("longrope", "su", "yarn")
"""Names of longrope; transformers takes the other two for it in this family."""

FACTORS = ("short_factor", "long_factor")
ORIGINAL = "original_max_position_embeddings"

COMPUTED = decoder.GEOMETRY | {"original_max_position_embeddings"}
"""Config keys that, with the RoPE's, decide what the model computes."""

KNOWN = COMPUTED | decoder.ROPE | {"sliding_window", "partial_rotary_factor", "head_dim", *FIXED}


LONGEST = 4096
"""Hugging Face's max_position_embeddings where the config has none."""

DEFAULTS = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": LONGEST,
    "rms_norm_eps": 1e-05,
}

TINY = {
    "model_type": "phi3",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "partial_rotary_factor": 0.75,
    "sliding_window": None,
}


def hf_config(config: dict[str, Any]) -> Any:
    """The checkpoint's config as Hugging Face's own class."""
    return decoder.make_hf_config("Phi3Config", config, COMPUTED, rope_of(config))


def read_config(config: dict[str, Any]) -> ModelSpec:
    """The geometry of a phi3 checkpoint.

    Raises:
        InputError: an unknown key, a value of the wrong type, or one that the family cannot hold.
    """
    refuse_unknown(config, KNOWN, "phi3")
    decoder.require(config, FIXED, "phi3")
    geometry = decoder.read_geometry(config, DEFAULTS, "phi3", free_head_dim=False)
    rope = rope_of(config)
    rotating = int(geometry.head_dim * rope["partial_rotary_factor"])
    if rotating < 2 or rotating % 2:
        raise InputError(
            f"config.json: partial_rotary_factor makes {rotating} of {geometry.head_dim} channels rotate; RoPE needs "
            "pairs"
        )
    if rope["rope_type"] == "longrope":
        for key in FACTORS:
            if (found := len(rope[key])) != rotating // 2:
                raise InputError(
                    f"config.json: rope {key} has {found} numbers, and {rotating // 2} pairs of channels rotate"
                )
        original = min(rope[ORIGINAL], geometry.max_positions)
        geometry = replace(geometry, max_positions=original)
    window = windows.window_size(config, None)
    held = windows.windows([windows.SLIDING] * geometry.layers, window, geometry.max_positions)
    layers = tuple(geometry.layer(window=window) for window in held)
    return geometry.model("phi3", layers, read_rope(hf_config(config), ROTARY))


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """The RoPE settings: plain, or longrope with both sets of factors and the length up to which the short ones hold.

    Raises:
        InputError: another kind, or a setting that mlx-lm does not read.
    """
    given: Any = next((config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)), {})
    kind = given.get("rope_type", given.get("type")) if isinstance(given, dict) else None
    if kind not in LONGROPE:
        if kind not in (None, "default"):
            raise InputError(
                f"config.json: rope type {kind!r} is not supported for phi3; supported: default, longrope"
            )
        return rope_parameters(config, partial=True)
    given = {key: value for key, value in given.items() if value is not None}
    factors = {key: given.pop(key, None) for key in FACTORS}
    for key, value in factors.items():
        if not isinstance(value, list) or not all(is_positive(item) for item in value):
            raise InputError(f"config.json: rope type {kind!r} needs a list of positive numbers {key}")
    for key in ("factor", "attention_factor", "short_mscale", "long_mscale"):
        if key in given:
            raise InputError(
                f"config.json: rope {key}={given[key]!r} is not supported for phi3: mlx-lm computes it from "
                "max_position_embeddings, so decode would differ"
            )
    original = positive_int({ORIGINAL: given.pop(ORIGINAL, config.get(ORIGINAL))}, ORIGINAL, 4096)
    plain = {**given, "rope_type": "default", "type": None}
    rest = {key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling")}
    settings = rope_parameters({**rest, "rope_parameters": plain}, partial=True)
    return {**settings, "rope_type": "longrope", **factors, ORIGINAL: original}


def layer_tensors(index: int, spec: ModelSpec) -> dict[str, str]:
    """Names of layer `index` in the block and in the checkpoint; q, k and v, gate and up are rows of one tensor."""
    fused = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    fused |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    names = decoder.layer_names(index, spec, ("input_layernorm", "post_attention_layernorm"))
    return {
        name: ".".join(fused.get(part, part) for part in source_name.split("."))
        for name, source_name in names.items()
    }


def decode_config(config: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """The mlx-lm config of the same model, every default written out.

    Raises:
        InputError: mlx-lm would load the config and compute something else.
    """
    rope = rope_of(config)
    result = {
        **decoder.decode_base(spec, "Phi3ForCausalLM", {**rope, "rope_type": "default"}),
        "partial_rotary_factor": rope["partial_rotary_factor"],
        ORIGINAL: rope.get(ORIGINAL, 4096),
        "rope_traditional": False,
    }
    if rope["rope_type"] == "longrope":
        short = rope["short_factor"]
        result["rope_scaling"] = {"type": "longrope", "short_factor": short, "long_factor": short}
        # mlx-lm takes the factor of cos and sin from the ratio of the two lengths
        result["max_position_embeddings"] = positive_int(config, "max_position_embeddings", LONGEST)
    return result
