"""mistral: Mistral 7B from version 0.2 on; every layer has the window, or none."""

from __future__ import annotations

from typing import Any

from pdconvert.families import _decoder as decoder
from pdconvert.families import _windows as windows
from pdconvert.families.config import read_rope, refuse_unknown, rope_parameters
from pdconvert.model import ModelSpec

LAYER = "transformers.models.mistral.modeling_mistral:MistralDecoderLayer"
NORM = "transformers.models.mistral.modeling_mistral:MistralRMSNorm"
ROTARY = "transformers.models.mistral.modeling_mistral:MistralRotaryEmbedding"

COMPUTED = decoder.GEOMETRY | {"head_dim", "sliding_window"}
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
    "model_type": "mistral",
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
    "sliding_window": None,
    "head_dim": 24,
}


def hf_config(config: dict[str, Any]) -> Any:
    """The checkpoint's config as Hugging Face's own class."""
    return decoder.make_hf_config("MistralConfig", config, COMPUTED, rope_parameters(config))


def read_config(config: dict[str, Any]) -> ModelSpec:
    """The geometry of a mistral checkpoint.

    Raises:
        InputError: an unknown key, a value of the wrong type, or one that the family cannot hold.
    """
    refuse_unknown(config, KNOWN, "mistral")
    geometry = decoder.read_geometry(config, DEFAULTS, "mistral", free_head_dim=True, mlx="llama")
    window = windows.window_size(config, WINDOW)
    held = windows.windows([windows.SLIDING] * geometry.layers, window, geometry.max_positions)
    layers = tuple(geometry.layer(window=window) for window in held)
    return geometry.model("mistral", layers, read_rope(hf_config(config), ROTARY))


def layer_tensors(index: int, spec: ModelSpec) -> dict[str, str]:
    """Names of layer `index` in the block and in the checkpoint."""
    return decoder.layer_names(index, spec, ("input_layernorm", "post_attention_layernorm"))


def decode_config(config: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """The mlx-lm config of the same model, every default written out.

    Raises:
        InputError: mlx-lm would load the config and compute something else.
    """
    if "sliding_window" not in config:
        windows.refuse(
            spec, "it is Hugging Face's value where the key is absent, and mlx-lm's llama has none"
        )
    return {
        **decoder.decode_base(spec, "MistralForCausalLM", rope_parameters(config), holds_windows=True),
        **windows.llama_keys(spec),
        "attention_bias": False,
        "mlp_bias": False,
        "rope_traditional": False,
    }
