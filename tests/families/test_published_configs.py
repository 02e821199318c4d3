"""Configs with the keys and values that well-known checkpoints carry: read as they are, or refused in one line."""

from typing import Any

import pytest

from pdconvert import families
from pdconvert.errors import InputError
from pdconvert.model import ModelSpec

COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.0",
    "use_cache": True,
}
NO_WINDOW = {"use_sliding_window": False, "sliding_window": None}


def sizes(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int
) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }


PHI3_MINI = {
    **sizes(3072, 8192, 32, 32, 32, 32064),
    "model_type": "phi3",
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
}
GEMMA = {
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "cache_implementation": "hybrid",
    "tie_word_embeddings": True,
}
GEMMA2 = {
    **GEMMA,
    **sizes(2304, 9216, 26, 8, 4, 256000),
    "model_type": "gemma2",
    "hidden_act": "gelu_pytorch_tanh",
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
}
GEMMA3 = {
    **GEMMA,
    **sizes(640, 2048, 18, 4, 1, 262144),
    "model_type": "gemma3_text",
    "_sliding_window_pattern": 6,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
    "max_position_embeddings": 32768,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "use_bidirectional_attention": False,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": {
        **sizes(896, 4864, 24, 14, 2, 151936),
        "model_type": "qwen2",
        "max_position_embeddings": 32768,
        "max_window_layers": 21,
        "sliding_window": 32768,
        "use_sliding_window": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "Qwen3-0.6B": {
        **sizes(1024, 3072, 28, 16, 8, 151936),
        **NO_WINDOW,
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "tie_word_embeddings": True,
    },
    "Mistral-7B-v0.3": {
        **sizes(4096, 14336, 32, 32, 8, 32768),
        "model_type": "mistral",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "Granite-3.3-2B": {
        **sizes(2048, 8192, 40, 32, 8, 49159),
        "model_type": "granite",
        "attention_bias": False,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": True,
    },
    "SmolLM3-3B": {
        **sizes(2048, 11008, 36, 16, 4, 128256),
        **NO_WINDOW,
        "model_type": "smollm3",
        "attention_bias": False,
        "layer_types": ["full_attention"] * 36,
        "max_position_embeddings": 65536,
        "max_window_layers": 28,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "pad_token_id": 128004,
        "pretraining_tp": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
    },
    "OLMo-2-1B": {
        **sizes(2048, 8192, 16, 16, 16, 100352),
        "model_type": "olmo2",
        "attention_bias": False,
        "max_position_embeddings": 4096,
        "pad_token_id": 100277,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 500000,
        "tie_word_embeddings": False,
    },
    "Phi-3-mini for short texts": {**PHI3_MINI, "max_position_embeddings": 2047},
    "Phi-4-mini": {
        **PHI3_MINI,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 36, "long_factor": [2.0] * 36},
        "sliding_window": 262144,
        "mlp_bias": False,
        "max_position_embeddings": 131072,
        "lm_head_bias": False,
        "tie_word_embeddings": True,
    },
    "Gemma-3-270M": GEMMA3,
    "Gemma-2-2B for short texts": {**GEMMA2, "max_position_embeddings": 4096},
}


def read(config: dict[str, Any]) -> ModelSpec:
    config = {**COMMON, **config}
    family = families.get(config)
    spec = family.read_config(config)
    decode = family.decode_config(config, spec)
    assert decode["rope_theta"] == config["rope_theta"]
    assert decode["tie_word_embeddings"] == spec.tied
    return spec


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_a_published_config_is_read_as_it_is(name: str) -> None:
    config = PUBLISHED[name]
    spec = read(config)
    layer = spec.layers[0]
    assert (
        spec.hidden_size,
        layer.intermediate_size,
        len(spec.layers),
        layer.heads,
        layer.kv_heads,
    ) == tuple(
        config[key]
        for key in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
        )
    )
    assert spec.rope.inv_freq[1] == pytest.approx(config["rope_theta"] ** (-2 / spec.rope.dims))
    assert spec.head_dim == config.get("head_dim", spec.hidden_size // layer.heads)


def test_what_sets_a_family_apart_is_in_its_spec() -> None:
    assert read(PUBLISHED["Qwen2.5-0.5B"]).layers[0].attention_bias
    assert read(PUBLISHED["Qwen3-0.6B"]).layers[0].qk_norm == "head"
    granite = read(PUBLISHED["Granite-3.3-2B"])
    assert (granite.embedding_scale, granite.logits_divisor) == (12.0, 8.0)
    assert (granite.layers[0].attention_scale, granite.layers[0].residual_multiplier) == (0.015625, 0.22)
    assert read(PUBLISHED["SmolLM3-3B"]).unrotated_layers == tuple(range(3, 36, 4))
    assert read(PUBLISHED["OLMo-2-1B"]).layers[0].norms == "behind"
    phi4 = read(PUBLISHED["Phi-4-mini"])
    assert (phi4.max_positions, phi4.rope.dims) == (4096, 72)
    assert phi4.rope.attention_factor == pytest.approx((1 + 5 / 12) ** 0.5)
    gemma = read(PUBLISHED["Gemma-3-270M"])
    assert gemma.embedding_scale == 25.25
    assert (gemma.window, gemma.window_layers) == (512, tuple(i for i in range(18) if i % 6 != 5))
    assert gemma.local_rope is not None and gemma.local_layers == gemma.window_layers
    assert read(PUBLISHED["Gemma-2-2B for short texts"]).layers[0].score_cap == 50.0


def test_published_models_that_need_what_is_missing_are_refused() -> None:
    with pytest.raises(InputError, match="sliding_window 2047 is not supported for phi3: .* at most 2047"):
        read(PHI3_MINI)
    with pytest.raises(InputError, match="sliding_window 4096 is not supported for gemma2: .* at most 4096"):
        read(GEMMA2)
    with pytest.raises(InputError, match="model_type 'gemma3' is not supported: it is a model with an image"):
        read({"model_type": "gemma3", "text_config": GEMMA3, "vision_config": {}})
    first_mistral = {"max_position_embeddings": 32768, "sliding_window": 4096}
    with pytest.raises(InputError, match="sliding_window 4096 is not supported for mistral"):
        read({**PUBLISHED["Mistral-7B-v0.3"], **first_mistral})
