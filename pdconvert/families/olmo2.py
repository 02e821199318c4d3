"""olmo2: OLMo 2; norms behind attention and MLP, q and k normed over all heads together."""

from __future__ import annotations

from typing import Any

from pdconvert.families import _decoder as decoder
from pdconvert.families.config import flag, read_rope, refuse_unknown, rope_parameters
from pdconvert.model import ModelSpec

LAYER = "transformers.models.olmo2.modeling_olmo2:Olmo2DecoderLayer"
NORM = "transformers.models.olmo2.modeling_olmo2:Olmo2RMSNorm"
ROTARY = "transformers.models.olmo2.modeling_olmo2:Olmo2RotaryEmbedding"

COMPUTED = decoder.GEOMETRY | {"head_dim", "attention_bias"}
"""Config keys that, with the RoPE's, decide what the model computes."""

KNOWN = COMPUTED | decoder.ROPE

DEFAULTS = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05,
}

TINY = {
    "model_type": "olmo2",
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
}


def hf_config(config: dict[str, Any]) -> Any:
    """The checkpoint's config as Hugging Face's own class."""
    return decoder.make_hf_config("Olmo2Config", config, COMPUTED, rope_parameters(config))


def read_config(config: dict[str, Any]) -> ModelSpec:
    """The geometry of a olmo2 checkpoint.

    Raises:
        InputError: an unknown key, a value of the wrong type, or one that the family cannot hold.
    """
    refuse_unknown(config, KNOWN, "olmo2")
    geometry = decoder.read_geometry(config, DEFAULTS, "olmo2", free_head_dim=True)
    bias = flag(config, "attention_bias", False)
    layer = geometry.layer(attention_bias=bias, output_bias=bias, qk_norm="projection", norms="behind")
    return geometry.model("olmo2", (layer,) * geometry.layers, read_rope(hf_config(config), ROTARY))


def layer_tensors(index: int, spec: ModelSpec) -> dict[str, str]:
    """Names of layer `index` in the block and in the checkpoint."""
    return decoder.layer_names(index, spec, ("post_attention_layernorm", "post_feedforward_layernorm"))


def decode_config(config: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """The mlx-lm config of the same model, every default written out.

    Raises:
        InputError: mlx-lm would load the config and compute something else.
    """
    return {
        **decoder.decode_base(spec, "Olmo2ForCausalLM", rope_parameters(config)),
        "attention_bias": spec.layers[0].attention_bias,
        "mlp_bias": False,
        "rope_traditional": False,
    }
