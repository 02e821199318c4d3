"""seed_oss: Seed-OSS; biases of q, k and v apart from the output's, and head_dim is free."""

from __future__ import annotations

from typing import Any

from pdconvert.families import _decoder as decoder
from pdconvert.families.config import flag, positive_int, read_rope, refuse_unknown, rope_parameters
from pdconvert.model import ModelSpec

LAYER = "transformers.models.seed_oss.modeling_seed_oss:SeedOssDecoderLayer"
NORM = "transformers.models.seed_oss.modeling_seed_oss:SeedOssRMSNorm"
ROTARY = "transformers.models.seed_oss.modeling_seed_oss:SeedOssRotaryEmbedding"

COMPUTED = decoder.GEOMETRY | {"head_dim", "attention_bias", "attention_out_bias", "mlp_bias"}
"""Config keys that, with the RoPE's, decide what the model computes."""

KNOWN = COMPUTED | decoder.ROPE | {"pretraining_tp", "residual_dropout"}

DEFAULTS = {
    "vocab_size": 155136,
    "hidden_size": 4096,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
}

TINY = {
    "model_type": "seed_oss",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "attention_bias": True,
    "attention_out_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


def hf_config(config: dict[str, Any]) -> Any:
    """The checkpoint's config as Hugging Face's own class."""
    return decoder.make_hf_config("SeedOssConfig", with_head_dim(config), COMPUTED, rope_parameters(config))


def with_head_dim(config: dict[str, Any]) -> dict[str, Any]:
    """The config with a null head_dim written out: Hugging Face derives it, but takes 128 where it is missing."""
    if "head_dim" not in config or config["head_dim"] is not None:
        return config
    hidden = positive_int(config, "hidden_size", DEFAULTS["hidden_size"])
    heads = positive_int(config, "num_attention_heads", DEFAULTS["num_attention_heads"])
    return {**config, "head_dim": hidden // heads}


def read_config(config: dict[str, Any]) -> ModelSpec:
    """The geometry of a seed_oss checkpoint.

    Raises:
        InputError: an unknown key, a value of the wrong type, or one that the family cannot hold.
    """
    refuse_unknown(config, KNOWN, "seed_oss")
    geometry = decoder.read_geometry(with_head_dim(config), DEFAULTS, "seed_oss", free_head_dim=True)
    layer = geometry.layer(
        attention_bias=flag(config, "attention_bias", True),
        output_bias=flag(config, "attention_out_bias", False),
        mlp_bias=flag(config, "mlp_bias", False),
    )
    return geometry.model("seed_oss", (layer,) * geometry.layers, read_rope(hf_config(config), ROTARY))


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
        **decoder.decode_base(spec, "SeedOssForCausalLM", rope_parameters(config)),
        "attention_bias": layer.attention_bias,
        "attention_out_bias": layer.output_bias,
        "mlp_bias": layer.mlp_bias,
        "rope_traditional": False,
    }
