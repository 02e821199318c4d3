"""qwen2: Qwen2, Qwen2.5 and QwQ; q, k and v have biases."""

from __future__ import annotations

from typing import Any

from pdconvert.families import _decoder as decoder
from pdconvert.families import _windows as windows
from pdconvert.families.config import read_rope, refuse_unknown, rope_parameters
from pdconvert.model import ModelSpec

LAYER = "transformers.models.qwen2.modeling_qwen2:Qwen2DecoderLayer"
NORM = "transformers.models.qwen2.modeling_qwen2:Qwen2RMSNorm"
ROTARY = "transformers.models.qwen2.modeling_qwen2:Qwen2RotaryEmbedding"

COMPUTED = decoder.GEOMETRY
"""Config keys that, with the RoPE's, decide what the model computes."""

KNOWN = COMPUTED | decoder.ROPE | windows.SWITCHED | {"use_mrope", "head_dim"}

DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}

TINY = {
    "model_type": "qwen2",
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
    return decoder.make_hf_config("Qwen2Config", config, COMPUTED, rope_parameters(config))


def read_config(config: dict[str, Any]) -> ModelSpec:
    """The geometry of a qwen2 checkpoint.

    Raises:
        InputError: an unknown key, a value of the wrong type, or one that the family cannot hold.
    """
    refuse_unknown(config, KNOWN, "qwen2")
    decoder.require(config, {"use_mrope": False}, "qwen2")
    geometry = decoder.read_geometry(config, DEFAULTS, "qwen2", free_head_dim=False)
    types = windows.switched_types(config, geometry.layers)
    held = windows.windows(types, windows.window_size(config, 4096), geometry.max_positions)
    layers = tuple(geometry.layer(attention_bias=True, window=window) for window in held)
    return geometry.model("qwen2", layers, read_rope(hf_config(config), ROTARY))


def layer_tensors(index: int, spec: ModelSpec) -> dict[str, str]:
    """Names of layer `index` in the block and in the checkpoint."""
    return decoder.layer_names(index, spec, ("input_layernorm", "post_attention_layernorm"))


def decode_config(config: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """The mlx-lm config of the same model, every default written out.

    Raises:
        InputError: mlx-lm would load the config and compute something else.
    """
    return {
        **decoder.decode_base(spec, "Qwen2ForCausalLM", rope_parameters(config)),
        "rope_traditional": False,
    }
