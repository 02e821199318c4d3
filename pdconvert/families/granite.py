"""granite: Granite 3 dense; multipliers on embedding, attention, residual branches and logits."""

from __future__ import annotations

from typing import Any

from pdconvert.families import _decoder as decoder
from pdconvert.families.config import flag, read_rope, refuse_unknown, rope_parameters
from pdconvert.model import ModelSpec

LAYER = "transformers.models.granite.modeling_granite:GraniteDecoderLayer"
NORM = "transformers.models.granite.modeling_granite:GraniteRMSNorm"
ROTARY = "transformers.models.granite.modeling_granite:GraniteRotaryEmbedding"

MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")

COMPUTED = decoder.GEOMETRY | {"attention_bias", "mlp_bias", *MULTIPLIERS}
"""Config keys that, with the RoPE's, decide what the model computes."""

KNOWN = COMPUTED | decoder.ROPE | {"head_dim"}

DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}

TINY = {
    "model_type": "granite",
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
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.125,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}


def hf_config(config: dict[str, Any]) -> Any:
    """The checkpoint's config as Hugging Face's own class."""
    return decoder.make_hf_config("GraniteConfig", config, COMPUTED, rope_parameters(config))


def read_config(config: dict[str, Any]) -> ModelSpec:
    """The geometry of a granite checkpoint.

    Raises:
        InputError: an unknown key, a value of the wrong type, or one that the family cannot hold.
    """
    refuse_unknown(config, KNOWN, "granite")
    geometry = decoder.read_geometry(config, DEFAULTS, "granite", free_head_dim=False)
    bias = flag(config, "attention_bias", False)
    layer = geometry.layer(
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=flag(config, "mlp_bias", False),
        attention_scale=decoder.number(config, "attention_multiplier", 1.0),
        residual_multiplier=decoder.number(config, "residual_multiplier", 1.0),
    )
    scales = {
        "embedding_scale": decoder.number(config, "embedding_multiplier", 1.0),
        "logits_divisor": decoder.number(config, "logits_scaling", 1.0),
    }
    return geometry.model(
        "granite", (layer,) * geometry.layers, read_rope(hf_config(config), ROTARY), **scales
    )


def layer_tensors(index: int, spec: ModelSpec) -> dict[str, str]:
    """Names of layer `index` in the block and in the checkpoint."""
    return decoder.layer_names(index, spec, ("input_layernorm", "post_attention_layernorm"))


def decode_config(config: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """The mlx-lm config of the same model, every default written out.

    Raises:
        InputError: mlx-lm would load the config and compute something else.
    """
    layer = spec.layers[0]
    return {
        **decoder.decode_base(spec, "GraniteForCausalLM", rope_parameters(config)),
        "attention_bias": layer.attention_bias,
        "mlp_bias": layer.mlp_bias,
        "attention_multiplier": layer.attention_scale,
        "residual_multiplier": layer.residual_multiplier,
        "embedding_multiplier": spec.embedding_scale,
        "logits_scaling": spec.logits_divisor,
    }
