"""qwen3: Qwen3 dense; q and k are normed per head, and head_dim is free."""

from __future__ import annotations

from typing import Any

from pdconvert.errors import InputError
from pdconvert.families import _decoder as decoder
from pdconvert.families import _windows as windows
from pdconvert.families.config import flag, read_rope, refuse_unknown, rope_parameters
from pdconvert.model import ModelSpec

LAYER = "transformers.models.qwen3.modeling_qwen3:Qwen3DecoderLayer"
NORM = "transformers.models.qwen3.modeling_qwen3:Qwen3RMSNorm"
ROTARY = "transformers.models.qwen3.modeling_qwen3:Qwen3RotaryEmbedding"

COMPUTED = decoder.GEOMETRY | {"head_dim", "attention_bias"}
"""Config keys that, with the RoPE's, decide what the model computes."""

KNOWN = COMPUTED | decoder.ROPE | windows.SWITCHED

DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
}

TINY = {
    "model_type": "qwen3",
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
    "head_dim": 32,
}


def hf_config(config: dict[str, Any]) -> Any:
    """The checkpoint's config as Hugging Face's own class."""
    return decoder.make_hf_config("Qwen3Config", config, COMPUTED, rope_parameters(config))


def read_config(config: dict[str, Any]) -> ModelSpec:
    """The geometry of a qwen3 checkpoint.

    Raises:
        InputError: an unknown key, a value of the wrong type, or one that the family cannot hold.
    """
    refuse_unknown(config, KNOWN, "qwen3")
    geometry = decoder.read_geometry(config, DEFAULTS, "qwen3", free_head_dim=True)
    types = windows.switched_types(config, geometry.layers)
    held = windows.windows(types, windows.window_size(config, 4096), geometry.max_positions)
    bias = flag(config, "attention_bias", False)
    features = {"attention_bias": bias, "output_bias": bias, "qk_norm": "head"}
    layers = tuple(geometry.layer(window=window, **features) for window in held)
    return geometry.model("qwen3", layers, read_rope(hf_config(config), ROTARY))


def layer_tensors(index: int, spec: ModelSpec) -> dict[str, str]:
    """Names of layer `index` in the block and in the checkpoint."""
    return decoder.layer_names(index, spec, ("input_layernorm", "post_attention_layernorm"))


def decode_config(config: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """The mlx-lm config of the same model, every default written out.

    Raises:
        InputError: mlx-lm would load the config and compute something else.
    """
    if spec.layers[0].attention_bias:
        raise InputError(
            "config.json: attention_bias=true is not supported: mlx-lm's qwen3 has no biases, so decode would fail"
        )
    return decoder.decode_base(spec, "Qwen3ForCausalLM", rope_parameters(config))
