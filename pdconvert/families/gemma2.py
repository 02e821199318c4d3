"""gemma2: Gemma 2 up to its window; scores and logits are capped."""

from __future__ import annotations

from typing import Any

from pdconvert.errors import InputError
from pdconvert.families import _decoder as decoder
from pdconvert.families import _gemma as gemma
from pdconvert.families import _windows as windows
from pdconvert.families.config import read_rope, refuse_unknown, rope_parameters
from pdconvert.model import ModelSpec

LAYER = "transformers.models.gemma2.modeling_gemma2:Gemma2DecoderLayer"
NORM = "transformers.models.gemma2.modeling_gemma2:Gemma2RMSNorm"
ROTARY = "transformers.models.gemma2.modeling_gemma2:Gemma2RotaryEmbedding"

COMPUTED = gemma.COMPUTED | {"attn_logit_softcapping", "final_logit_softcapping"}
"""Config keys that, with the RoPE's, decide what the model computes."""

KNOWN = COMPUTED | gemma.KNOWN

CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
"""Hugging Face's caps where the config does not speak of them; null means none."""

DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}

TINY = {
    "model_type": "gemma2",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 512,
    "query_pre_attn_scalar": 20,
    "attention_bias": False,
    "sliding_window": 512,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


def hf_config(config: dict[str, Any]) -> Any:
    """The checkpoint's config as Hugging Face's own class."""
    result = decoder.make_hf_config("Gemma2Config", config, COMPUTED, rope_parameters(config))
    for key in CAPS:
        setattr(result, key, cap(config, key))
    return result


def cap(config: dict[str, Any], key: str) -> float | None:
    """The softcap under `key`; null means none."""
    return decoder.number(config, key, CAPS[key]) if config.get(key, CAPS[key]) is not None else None


def read_config(config: dict[str, Any]) -> ModelSpec:
    """The geometry of a gemma2 checkpoint.

    Raises:
        InputError: an unknown key, a value of the wrong type, or one that the family cannot hold.
    """
    refuse_unknown(config, KNOWN, "gemma2")
    decoder.require(config, gemma.FIXED, "gemma2")
    geometry = gemma.read_geometry(config, DEFAULTS, "gemma2")
    default = [windows.FULL if index % 2 else windows.SLIDING for index in range(geometry.layers)]
    types = windows.layer_types(config, geometry.layers, default)
    held = windows.windows(types, gemma.window_size(config), geometry.max_positions)
    score_cap = cap(config, "attn_logit_softcapping")
    layers = tuple(gemma.layer(config, geometry, window, score_cap=score_cap) for window in held)
    return geometry.model(
        "gemma2",
        layers,
        read_rope(hf_config(config), ROTARY),
        embedding_scale=geometry.hidden_size**0.5,
        logits_cap=cap(config, "final_logit_softcapping"),
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
    layer, rope = spec.layers[0], rope_parameters(config)
    gemma.refuse_biases(spec)
    for key, value in zip(CAPS, (layer.score_cap, spec.logits_cap), strict=True):
        if value is None:
            raise InputError(f"config.json: {key} null is not supported: mlx-lm's gemma2 always caps")
    if not spec.tied:
        raise InputError(
            "config.json: tie_word_embeddings false is not supported: mlx-lm's gemma2 has no head of its own"
        )
    if rope["rope_type"] != "default":
        raise InputError(
            f"config.json: rope type {rope['rope_type']!r} is not supported for gemma2: mlx-lm's gemma2 reads "
            "rope_theta only, so decode would differ"
        )
    return {
        **decoder.decode_base(spec, "Gemma2ForCausalLM", rope),
        "query_pre_attn_scalar": gemma.query_scalar(config),
        "attn_logit_softcapping": layer.score_cap,
        "final_logit_softcapping": spec.logits_cap,
        "hidden_activation": layer.activation,
        "rope_traditional": False,
    }
