"""olmo3: OLMo 3; OLMo 2 with window layers, of which only the others have a scaled RoPE."""

from __future__ import annotations

from typing import Any

from pdconvert.errors import InputError
from pdconvert.families import _decoder as decoder
from pdconvert.families import _windows as windows
from pdconvert.families.config import flag, positive_int, read_rope, refuse_unknown
from pdconvert.model import ModelSpec

LAYER = "transformers.models.olmo3.modeling_olmo3:Olmo3DecoderLayer"
NORM = "transformers.models.olmo3.modeling_olmo3:Olmo3RMSNorm"
ROTARY = "transformers.models.olmo3.modeling_olmo3:Olmo3RotaryEmbedding"

COMPUTED = decoder.GEOMETRY | {"head_dim", "attention_bias"} | windows.KEYS
"""Config keys that, with the RoPE's, decide what the model computes."""

KNOWN = COMPUTED | decoder.ROPE

WINDOW = 4096
"""Hugging Face's window where the config does not speak of one."""

THETA = 5e5
"""Hugging Face's RoPE base where the config gives none; of window layers also where it gives the other's."""

LAYERS = 32
"""Hugging Face's number of layers where the config has none."""

DEFAULTS = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05,
}

TINY = {
    "model_type": "olmo3",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 512,
    "sliding_window": 11,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_theta": 500000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1.138629436111989,
    },
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


def types_of(config: dict[str, Any], layers: int) -> tuple[str, ...]:
    """Which layers have a window: as listed, or all but every fourth."""
    default = [windows.SLIDING if (index + 1) % 4 else windows.FULL for index in range(layers)]
    return windows.layer_types(config, layers, default)


def hf_config(config: dict[str, Any]) -> Any:
    """The checkpoint's config as Hugging Face's own class."""
    layers = positive_int(config, "num_hidden_layers", LAYERS)
    listed = {**config, "layer_types": list(types_of(config, layers))}
    return decoder.make_hf_config(
        "Olmo3Config", listed, COMPUTED, windows.ropes(config, "olmo3", THETA, THETA)
    )


def read_config(config: dict[str, Any]) -> ModelSpec:
    """The geometry of an olmo3 checkpoint.

    Raises:
        InputError: an unknown key, a value of the wrong type, or one that the family cannot hold.
    """
    refuse_unknown(config, KNOWN, "olmo3")
    geometry = decoder.read_geometry(config, DEFAULTS, "olmo3", free_head_dim=True)
    types = types_of(config, geometry.layers)
    held = windows.windows(types, windows.window_size(config, WINDOW), geometry.max_positions)
    hugging_face = hf_config(config)
    kinds = {kind: read_rope(hugging_face, ROTARY, kind) for kind in sorted(set(types))}
    first = next(iter(kinds.values()))
    main, local = (kinds.get(kind, first) for kind in (windows.FULL, windows.SLIDING))
    bias = flag(config, "attention_bias", False)
    layers = tuple(
        geometry.layer(
            attention_bias=bias,
            output_bias=bias,
            qk_norm="projection",
            norms="behind",
            window=window,
            local_rope=kind == windows.SLIDING and local != main,
        )
        for kind, window in zip(types, held, strict=True)
    )
    return geometry.model("olmo3", layers, main, local_rope=local)


def layer_tensors(index: int, spec: ModelSpec) -> dict[str, str]:
    """Names of layer `index` in the block and in the checkpoint."""
    return decoder.layer_names(index, spec, ("post_attention_layernorm", "post_feedforward_layernorm"))


def decode_config(config: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """The mlx-lm config of the same model, every default written out.

    Raises:
        InputError: mlx-lm would load the config and compute something else.
    """
    kinds, types = windows.ropes(config, "olmo3", THETA, THETA), types_of(config, len(spec.layers))
    full, local = (kinds[kind]["rope_theta"] for kind in (windows.FULL, windows.SLIDING))
    if full != local:
        raise InputError(
            f"config.json: rope_theta {full:g} is not supported for olmo3: Hugging Face takes {local:g} in window "
            "layers, mlx-lm one for all, so prefill and decode would differ"
        )
    if len(set(types)) < 2:
        raise InputError(
            f"config.json: layer_types with {types[0]} alone is not supported: mlx-lm's olmo3 needs both kinds"
        )
    window = windows.window_size(config, WINDOW)
    if window is None:
        raise InputError("config.json: sliding_window must be a positive integer, not None")
    return {
        **decoder.decode_base(spec, "Olmo3ForCausalLM", kinds[windows.FULL], holds_windows=True),
        "attention_bias": spec.layers[0].attention_bias,
        "layer_types": list(types),
        "sliding_window": window,
    }
