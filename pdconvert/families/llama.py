"""llama: Llama 2 and 3.x, TinyLlama, SmolLM and SmolLM2."""

from __future__ import annotations

from typing import Any

from pdconvert.errors import InputError
from pdconvert.families import _decoder as decoder
from pdconvert.families.config import flag, read_rope, refuse_unknown, rope_parameters
from pdconvert.model import ModelSpec

LAYER = "transformers.models.llama.modeling_llama:LlamaDecoderLayer"
NORM = "transformers.models.llama.modeling_llama:LlamaRMSNorm"
ROTARY = "transformers.models.llama.modeling_llama:LlamaRotaryEmbedding"

COMPUTED = decoder.GEOMETRY | {"head_dim", "attention_bias", "mlp_bias"}
"""Config keys that, with the RoPE's, decide what the model computes."""

KNOWN = COMPUTED | decoder.ROPE | {"pretraining_tp", "is_llama_config", "rope_interleaved", "sliding_window"}

DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}

TINY = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


def hf_config(config: dict[str, Any]) -> Any:
    """The checkpoint's config as Hugging Face's own class."""
    return decoder.make_hf_config("LlamaConfig", config, COMPUTED, rope_parameters(config))


def read_config(config: dict[str, Any]) -> ModelSpec:
    """The geometry of a llama checkpoint.

    Raises:
        InputError: an unknown key, a value of the wrong type, or one that the family cannot hold.
    """
    refuse_unknown(config, KNOWN, "llama")
    if config.get("rope_interleaved"):
        raise InputError("config.json: rope_interleaved=true is not supported; only the half-split RoPE is")
    if config.get("sliding_window"):
        raise InputError(
            "config.json: sliding_window is not a llama key with an effect; remove it or set it to null"
        )
    geometry = decoder.read_geometry(config, DEFAULTS, "llama", free_head_dim=True, even_width=True)
    bias = flag(config, "attention_bias", False)
    layer = geometry.layer(attention_bias=bias, output_bias=bias, mlp_bias=flag(config, "mlp_bias", False))
    return geometry.model("llama", (layer,) * geometry.layers, read_rope(hf_config(config), ROTARY))


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
        **decoder.decode_base(spec, "LlamaForCausalLM", rope_parameters(config)),
        "attention_bias": layer.attention_bias,
        "mlp_bias": layer.mlp_bias,
        "rope_traditional": False,
    }
