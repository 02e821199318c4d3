"""llama: Llama 2 and 3.x, TinyLlama, SmolLM and SmolLM2."""

from __future__ import annotations

from typing import Any

from pdconvert.errors import InputError
from pdconvert.families.config import (
    MOST_LAYERS,
    flag,
    positive_int,
    read_rope,
    refuse_unknown,
    rope_parameters,
)
from pdconvert.model import LayerSpec, ModelSpec

LAYER = "transformers.models.llama.modeling_llama:LlamaDecoderLayer"
NORM = "transformers.models.llama.modeling_llama:LlamaRMSNorm"
ROTARY = "transformers.models.llama.modeling_llama:LlamaRotaryEmbedding"

COMPUTED = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
    }
)
"""Config keys that, with the RoPE's, decide what the model computes."""

KNOWN = COMPUTED | {
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "pretraining_tp",
    "is_llama_config",
    "rope_interleaved",
    "sliding_window",
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
    """The checkpoint's config as Hugging Face's own class, attention in its eager form.

    Only keys that decide the result are handed on (and the range of random weights, for who draws them), so
    that a bookkeeping key which transformers would refuse does no harm.

    Raises:
        InputError: transformers refuses a value.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import LlamaConfig

    values = {
        key: config[key] for key in sorted(COMPUTED | {"initializer_range"}) if config.get(key) is not None
    }
    values["rope_parameters"] = rope_parameters(config)
    if isinstance(values.get("rms_norm_eps"), int):
        values["rms_norm_eps"] = float(values["rms_norm_eps"])
    try:
        result = LlamaConfig(**values)
    except (TypeError, ValueError, KeyError, ArithmeticError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"config.json: transformers refuses this llama config: {reason}") from error
    result._attn_implementation = "eager"
    return result


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
    activation = config.get("hidden_act") or "silu"
    if activation != "silu":
        raise InputError(
            f"config.json: hidden_act {activation!r} is not supported: mlx-lm's llama computes silu only"
        )
    hidden = positive_int(config, "hidden_size", 4096)
    heads = positive_int(config, "num_attention_heads", 32)
    kv_heads = positive_int(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise InputError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if hidden % heads:  # transformers refuses it even with a head_dim of its own
        raise InputError(
            f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}"
        )
    head_dim = positive_int(config, "head_dim", hidden // heads)
    if head_dim % 2:
        raise InputError(f"config.json: head_dim {head_dim} is odd; RoPE needs pairs")
    eps = config.get("rms_norm_eps", 1e-6)
    if not isinstance(eps, int | float) or isinstance(eps, bool) or not 0 <= eps < 1:
        raise InputError(f"config.json: rms_norm_eps must be a number in [0, 1), not {eps!r}")
    layer = LayerSpec(
        hidden_size=hidden,
        intermediate_size=positive_int(config, "intermediate_size", 11008),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=float(eps),
        activation=activation,
        attention_scale=head_dim**-0.5,
        attention_bias=flag(config, "attention_bias", False),
        output_bias=flag(config, "attention_bias", False),
        mlp_bias=flag(config, "mlp_bias", False),
    )
    return ModelSpec(
        model_type="llama",
        hidden_size=hidden,
        vocab_size=positive_int(config, "vocab_size", 32000),
        layers=(layer,) * positive_int(config, "num_hidden_layers", 32, MOST_LAYERS),
        norm_eps=float(eps),
        tied=flag(config, "tie_word_embeddings", False),
        max_positions=positive_int(config, "max_position_embeddings", 2048),
        rope=read_rope(hf_config(config), ROTARY),
    )


def layer_tensors(index: int, spec: ModelSpec) -> dict[str, str]:
    """Names of layer `index` in the block and in the checkpoint."""
    layer = spec.layers[index]
    names = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    biased = {"q_proj": layer.attention_bias, "k_proj": layer.attention_bias, "v_proj": layer.attention_bias}
    biased["o_proj"] = layer.output_bias
    for projection, bias in biased.items():
        names += [f"self_attn.{projection}.weight"] + [f"self_attn.{projection}.bias"] * bias
    for projection in ("gate_proj", "up_proj", "down_proj"):
        names += [f"mlp.{projection}.weight"] + [f"mlp.{projection}.bias"] * layer.mlp_bias
    return {name: f"model.layers.{index}.{name}" for name in names}


def decode_config(config: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """The mlx-lm config of the same model, every default written out.

    Raises:
        InputError: mlx-lm would load the config and compute something else.
    """
    layer, rope = spec.layers[0], rope_parameters(config)
    if not layer.norm_eps:
        raise InputError(
            "config.json: rms_norm_eps is 0, which mlx-lm refuses; set it to a small number, such as 1e-6"
        )
    kind = rope["rope_type"]
    scaling = None
    if kind != "default":
        for key in ("attention_factor", "truncate", "mscale", "mscale_all_dim"):
            if rope.get(key) is not None:
                raise InputError(
                    f"config.json: rope {key}={rope[key]!r} is not read by mlx-lm's llama; decode would differ"
                )
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        if kind == "yarn":
            scaling.setdefault("original_max_position_embeddings", spec.max_positions)
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": spec.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": layer.heads,
        "num_key_value_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": layer.activation,
        "rms_norm_eps": layer.norm_eps,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions,
        "attention_bias": layer.attention_bias,
        "mlp_bias": layer.mlp_bias,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling,
        "rope_traditional": False,
        "tie_word_embeddings": spec.tied,
    }
