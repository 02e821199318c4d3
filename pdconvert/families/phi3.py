"""phi3: Phi-3 without longrope, up to its window; fused qkv and gate_up, a part of each head may rotate."""

from __future__ import annotations

from typing import Any

from pdconvert.errors import InputError
from pdconvert.families import _decoder as decoder
from pdconvert.families import _windows as windows
from pdconvert.families.config import read_rope, refuse_unknown, rope_parameters
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

COMPUTED = decoder.GEOMETRY | {"original_max_position_embeddings"}
"""Config keys that, with the RoPE's, decide what the model computes."""

KNOWN = COMPUTED | decoder.ROPE | {"sliding_window", "partial_rotary_factor", "head_dim", *FIXED}


DEFAULTS = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
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
    return decoder.make_hf_config("Phi3Config", config, COMPUTED, rope_parameters(config, partial=True))


def read_config(config: dict[str, Any]) -> ModelSpec:
    """The geometry of a phi3 checkpoint.

    Raises:
        InputError: an unknown key, a value of the wrong type, or one that the family cannot hold.
    """
    refuse_unknown(config, KNOWN, "phi3")
    decoder.require(config, FIXED, "phi3")
    geometry = decoder.read_geometry(config, DEFAULTS, "phi3", free_head_dim=False)
    refuse_scaling(config)
    rotating = int(geometry.head_dim * rope_parameters(config, partial=True)["partial_rotary_factor"])
    if rotating < 2 or rotating % 2:
        raise InputError(
            f"config.json: partial_rotary_factor makes {rotating} of {geometry.head_dim} channels rotate; RoPE needs "
            "pairs"
        )
    window = windows.window_size(config, None)
    held = windows.windows([windows.SLIDING] * geometry.layers, window, geometry.max_positions)
    layers = tuple(geometry.layer(window=window) for window in held)
    return geometry.model("phi3", layers, read_rope(hf_config(config), ROTARY))


def refuse_scaling(config: dict[str, Any]) -> None:
    """Raise InputError for any scaled RoPE: of those that transformers reads here, mlx-lm computes none alike."""
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = settings.get("rope_type", settings.get("type")) if isinstance(settings, dict) else None
    if kind in ("longrope", "su", "yarn"):  # transformers takes the other two names for longrope
        raise InputError(
            f"config.json: rope type {kind!r} is not supported for phi3: Hugging Face computes short prompts with "
            "short_factor, mlx-lm every prompt with long_factor, so prefill and decode would differ"
        )
    if kind not in (None, "default"):
        raise InputError(f"config.json: rope type {kind!r} is not supported for phi3; supported: default")


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
    rope = rope_parameters(config, partial=True)
    return {
        **decoder.decode_base(spec, "Phi3ForCausalLM", rope),
        "partial_rotary_factor": rope["partial_rotary_factor"],
        "original_max_position_embeddings": 4096,
        "rope_traditional": False,
    }
