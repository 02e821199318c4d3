"""smollm3: SmolLM3; every fourth layer, or those that the config names, has no RoPE."""

from __future__ import annotations

from typing import Any

from pdconvert.errors import InputError
from pdconvert.families import _decoder as decoder
from pdconvert.families import _windows as windows
from pdconvert.families.config import flag, positive_int, read_rope, refuse_unknown, rope_parameters
from pdconvert.model import ModelSpec

LAYER = "transformers.models.smollm3.modeling_smollm3:SmolLM3DecoderLayer"
NORM = "transformers.models.smollm3.modeling_smollm3:SmolLM3RMSNorm"
ROTARY = "transformers.models.smollm3.modeling_smollm3:SmolLM3RotaryEmbedding"

COMPUTED = decoder.GEOMETRY | {
    "head_dim",
    "attention_bias",
    "mlp_bias",
    "no_rope_layers",
    "no_rope_layer_interval",
    *windows.SWITCHED,
}
"""Config keys that, with the RoPE's, decide what the model computes."""

KNOWN = COMPUTED | decoder.ROPE | {"pretraining_tp"}

THETA = 2e6
"""Hugging Face's RoPE base where the config gives none."""

DEFAULTS = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}

TINY = {
    "model_type": "smollm3",
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
    "no_rope_layers": [1, 0, 1],
}


def hf_config(config: dict[str, Any]) -> Any:
    """The checkpoint's config as Hugging Face's own class."""
    layers = positive_int(config, "num_hidden_layers", DEFAULTS["num_hidden_layers"])
    written = windows.with_types_of(config, layers)
    return decoder.make_hf_config("SmolLM3Config", written, COMPUTED, rope_parameters(config, THETA))


def read_config(config: dict[str, Any]) -> ModelSpec:
    """The geometry of a smollm3 checkpoint.

    Raises:
        InputError: an unknown key, a value of the wrong type, or one that the family cannot hold.
    """
    refuse_unknown(config, KNOWN, "smollm3")
    geometry = decoder.read_geometry(config, DEFAULTS, "smollm3", free_head_dim=True)
    rotary = rotary_layers(config, geometry.layers)
    without = [windows.FULL if turns else windows.SLIDING for turns in rotary]  # Hugging Face's default
    types = windows.switched_types(config, geometry.layers, without)
    held = windows.windows(types, windows.window_size(config, None), geometry.max_positions)
    bias = flag(config, "attention_bias", False)
    features = {
        "attention_bias": bias,
        "output_bias": bias,
        "mlp_bias": flag(config, "mlp_bias", False),
    }
    layers = tuple(
        geometry.layer(rotary=turns, window=window, **features)
        for turns, window in zip(rotary, held, strict=True)
    )
    return geometry.model("smollm3", layers, read_rope(hf_config(config), ROTARY))


def rotary_layers(config: dict[str, Any], layers: int) -> tuple[bool, ...]:
    """Which layers have RoPE: 1 in `no_rope_layers`, despite its name, or all but every n-th one."""
    stated = config.get("no_rope_layers")
    if stated is None:
        interval = positive_int(config, "no_rope_layer_interval", 4)
        return tuple((index + 1) % interval != 0 for index in range(layers))
    if not isinstance(stated, list) or len(stated) < layers or not all(value in (0, 1) for value in stated):
        raise InputError(
            f"config.json: no_rope_layers must hold 1 (RoPE) or 0 (none) for each of {layers} layers, not "
            f"{stated!r:.80}"
        )
    return tuple(bool(value) for value in stated[:layers])


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
        **decoder.decode_base(spec, "SmolLM3ForCausalLM", rope_parameters(config, THETA), holds_windows=True),
        **windows.llama_keys(spec),
        "attention_bias": layer.attention_bias,
        "mlp_bias": layer.mlp_bias,
        "no_rope_layers": [int(layer.rotary) for layer in spec.layers],
        "no_rope_layer_interval": 4,
        "rope_traditional": False,
    }
