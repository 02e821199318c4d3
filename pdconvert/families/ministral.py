"""ministral: Ministral; layers with a window and layers without."""

from __future__ import annotations

from typing import Any

from pdconvert.families import _decoder as decoder
from pdconvert.families import _windows as windows
from pdconvert.families.config import positive_int, read_rope, refuse_unknown, rope_parameters
from pdconvert.model import ModelSpec

LAYER = "transformers.models.ministral.modeling_ministral:MinistralDecoderLayer"
NORM = "transformers.models.ministral.modeling_ministral:MinistralRMSNorm"
ROTARY = "transformers.models.ministral.modeling_ministral:MinistralRotaryEmbedding"

COMPUTED = decoder.GEOMETRY | {"head_dim"} | windows.KEYS
"""Config keys that, with the RoPE's, decide what the model computes."""

KNOWN = COMPUTED | decoder.ROPE

WINDOW = 4096
"""Hugging Face's window where the config does not speak of one; null means none."""

DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}

TINY = {
    "model_type": "ministral",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "sliding_window": 11,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "head_dim": 24,
}


def hf_config(config: dict[str, Any]) -> Any:
    """The checkpoint's config as Hugging Face's own class."""
    hidden = config.get("hidden_size") or DEFAULTS["hidden_size"]
    heads = config.get("num_attention_heads") or DEFAULTS["num_attention_heads"]
    written = {**config, "head_dim": config.get("head_dim") or hidden // heads}  # yarn fails on a null one
    layers = positive_int(config, "num_hidden_layers", DEFAULTS["num_hidden_layers"])
    written = windows.with_types_of(written, layers)
    return decoder.make_hf_config("MinistralConfig", written, COMPUTED, rope_parameters(config))


def read_config(config: dict[str, Any]) -> ModelSpec:
    """The geometry of a ministral checkpoint.

    Raises:
        InputError: an unknown key, a value of the wrong type, or one that the family cannot hold.
    """
    refuse_unknown(config, KNOWN, "ministral")
    geometry = decoder.read_geometry(config, DEFAULTS, "ministral", free_head_dim=True, mlx="llama")
    types = windows.layer_types(config, geometry.layers, [windows.SLIDING] * geometry.layers)
    held = windows.windows(types, windows.window_size(config, WINDOW), geometry.max_positions)
    layers = tuple(geometry.layer(window=window) for window in held)
    return geometry.model("ministral", layers, read_rope(hf_config(config), ROTARY))


def layer_tensors(index: int, spec: ModelSpec) -> dict[str, str]:
    """Names of layer `index` in the block and in the checkpoint."""
    return decoder.layer_names(index, spec, ("input_layernorm", "post_attention_layernorm"))


def decode_config(config: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """The mlx-lm config of the same model, every default written out.

    Raises:
        InputError: mlx-lm would load the config and compute something else.
    """
    return {
        **decoder.decode_base(spec, "LlamaForCausalLM", rope_parameters(config), holds_windows=True),
        **windows.llama_keys(spec),
        "model_type": "llama",  # mlx-lm has no file of its own for it
        "attention_bias": False,
        "mlp_bias": False,
        "rope_traditional": False,
    }
