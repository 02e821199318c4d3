"""What `config.json` would say, read from the metadata of a GGUF file.

GGUF says some things in its own way: biases by their tensors, llama3's RoPE scaling by a tensor of
divisors, fp32 for numbers that were short decimals. A metadata key of the architecture that is not
listed here is refused, since it may change what the model computes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdconvert.errors import InputError
from pdconvert.families import EXPERTS, UNSUPPORTED
from pdconvert.sources.gguf_header import GgufTensor


@dataclass(frozen=True)
class Architecture:
    """How one `general.architecture` corresponds to a Hugging Face model type.

    Attributes:
        model_type: of the config.
        class_name: for `architectures`.
        interleaved: whether llama.cpp stores the rows of q and k with RoPE pairs side by side, which
            reading has to undo.
        bias_flags: whether the config has `attention_bias` and `mlp_bias`.
        activation: its key in the config, and its value.
        norms: Hugging Face's names of a layer's norms on the residual stream.
        stored_gains: whether llama.cpp adds 1 to norm weights, which Hugging Face's model does itself.
        keys: metadata keys that only this architecture has.
    """

    model_type: str
    class_name: str
    interleaved: bool
    bias_flags: bool
    activation: tuple[str, str] = ("hidden_act", "silu")
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    stored_gains: bool = False
    keys: frozenset[str] = frozenset()


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", interleaved=True, bias_flags=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", interleaved=False, bias_flags=False),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", interleaved=False, bias_flags=False),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        interleaved=False,
        bias_flags=False,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        norms=(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        stored_gains=True,
        keys=frozenset({"attention.sliding_window", "rope.freq_base_swa"}),
    ),
}

REFUSED = {
    "bert": "bert",
    "dbrx": "dbrx",
    "deepseek2": "deepseek_v2",
    "ernie4_5-moe": "ernie4_5_moe",
    "falcon-h1": "falcon_h1",
    "gemma3n": "gemma3n",
    "glm4moe": "glm4_moe",
    "gpt-oss": "gpt_oss",
    "granitehybrid": "granitemoehybrid",
    "granitemoe": "granitemoe",
    "hunyuan-moe": "hunyuan_v1_moe",
    "jamba": "jamba",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2_moe",
    "llama4": "llama4",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "modern-bert": "modernbert",
    "nemotron_h": "nemotron_h",
    "olmoe": "olmoe",
    "phimoe": "phimoe",
    "qwen2moe": "qwen2_moe",
    "qwen2vl": "qwen2_vl",
    "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next",
    "qwen3vl": "qwen3_vl",
    "qwen3vlmoe": "qwen3_vl_moe",
    "rwkv6": "rwkv",
    "rwkv7": "rwkv",
    "t5": "t5",
}
"""Architectures that are refused in every form, by the model type that `families` has a reason for."""

_GEMMA3_27B_LAYERS = 62
"""The one Gemma 3 whose scores are scaled by hidden_size / heads and not by head_dim; GGUF does not say so."""

_PLAIN_KEYS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_OTHER_KEYS = frozenset(
    {"vocab_size", "rope.dimension_count", "rope.freq_base", "attention.key_length", "attention.value_length"}
)
_YARN_KEYS = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
_SCALING_KEYS = frozenset({"type", "factor", "original_context_length", "finetuned", *_YARN_KEYS})

_LLAMA3_ORIGINAL_LENGTHS = (8192, 4096, 16384, 32768)
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0


def architecture_of(label: str, metadata: Mapping[str, Any]) -> tuple[str, Architecture]:
    """The architecture's GGUF name and its correspondence.

    Raises:
        InputError: there is none, or it is not supported.
    """
    name = str(metadata.get("general.architecture"))
    refuse_architecture(label, metadata)
    if name not in ARCHITECTURES:
        raise InputError(
            f"{label}: general.architecture {name!r} is not supported as GGUF ({', '.join(ARCHITECTURES)}); "
            "take the Hugging Face form of the model"
        )
    return name, ARCHITECTURES[name]


def refuse_architecture(label: str, metadata: Mapping[str, Any]) -> None:
    """Raise InputError for an architecture that is refused in every form.

    Args:
        metadata: of the file, at least what `read_architecture` gives.
    """
    name = str(metadata.get("general.architecture"))
    experts = metadata.get(f"{name}.expert_count")
    reason = EXPERTS if experts else UNSUPPORTED.get(REFUSED.get(name, ""))
    if reason is not None:
        raise InputError(f"{label}: general.architecture {name!r} is not supported: it is {reason}")


def build_config(
    label: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, GgufTensor],
    rope_divisors: Sequence[float] | None,
) -> dict[str, Any]:
    """The config of a GGUF file.

    Args:
        label: names the file in errors.
        metadata: of the file.
        tensors: of the file, by GGUF name.
        rope_divisors: the values of `rope_freqs.weight`; None where there is no such tensor.

    Raises:
        InputError: a needed key is absent, has another type, or one is present that is not supported.
    """
    prefix, architecture = architecture_of(label, metadata)
    own = {
        key.removeprefix(f"{prefix}."): value
        for key, value in metadata.items()
        if key.startswith(f"{prefix}.")
    }
    _check_known(label, prefix, own, architecture.keys)
    own.setdefault("attention.head_count_kv", own.get("attention.head_count"))
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "architectures": [architecture.class_name],
    }
    for key, name in _PLAIN_KEYS.items():
        config[name] = _number(label, f"{prefix}.{key}", own.get(key))
    if config["num_hidden_layers"] > len(tensors):
        layers = config["num_hidden_layers"]
        raise InputError(
            f"{label}: {prefix}.block_count is {layers}, but the file has {len(tensors)} tensors"
        )
    config["head_dim"] = _head_dim(label, prefix, own, config)
    if "token_embd.weight" not in tensors:
        raise InputError(f"{label}: no tensor token_embd.weight; the file is not a whole model")
    config["vocab_size"] = own.get("vocab_size", tensors["token_embd.weight"].shape[0])
    config["rope_theta"] = _shortest(own.get("rope.freq_base", 10000.0))
    scaling = _rope_scaling(label, prefix, own, rope_divisors, config)
    if scaling:
        config["rope_scaling"] = scaling
    config[architecture.activation[0]] = architecture.activation[1]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    if architecture.bias_flags:
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    if prefix == "gemma3":
        config |= _gemma3_keys(label, own, config)
    for key, name in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        if (value := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{name}_token_id"] = value
    return config


def _gemma3_keys(label: str, own: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Windows and scales; what GGUF leaves out is what every Gemma 3 has."""
    large = config["num_hidden_layers"] == _GEMMA3_27B_LAYERS
    width = config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"]
    window = own.get("attention.sliding_window")
    return {
        "sliding_window": _number(label, "gemma3.attention.sliding_window", window),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": _shortest(own.get("rope.freq_base_swa", 10000.0)),
        "query_pre_attn_scalar": width,
    }


def build_generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """BOS, and every id that ends a text or a turn."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = [metadata[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in metadata]
    ends = list(dict.fromkeys(ends))
    config = {"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {}
    if "tokenizer.ggml.bos_token_id" in metadata:
        config["bos_token_id"] = metadata["tokenizer.ggml.bos_token_id"]
    return config


def _check_known(label: str, prefix: str, own: Mapping[str, Any], more: frozenset[str]) -> None:
    for key, value in own.items():
        scaling = key.removeprefix("rope.scaling.") if key.startswith("rope.scaling.") else None
        known = key in _PLAIN_KEYS or key in _OTHER_KEYS | more or scaling in _SCALING_KEYS
        if not known and value not in (0, False):
            shown = f"{value!r}" if not isinstance(value, list) else f"{len(value)} values"
            raise InputError(
                f"{label}: {prefix}.{key} ({shown}) is not supported; take the Hugging Face form of the model"
            )


def _number(label: str, key: str, value: Any) -> int | float:
    """A positive number: a float only under the keys that hold one."""
    kinds = (int, float) if key.endswith(("epsilon", "factor")) else (int,)
    if type(value) not in kinds or not value > 0:
        shown = "absent" if value is None else f"{value!r:.60}"
        raise InputError(f"{label}: {key}: {shown}; expected one number for all layers, above 0")
    return _shortest(value) if isinstance(value, float) else value


def _shortest(value: float) -> float:
    """The shortest decimal that fp32 rounds to the same value: 9.99999974738e-06 is 1e-05."""
    for digits in range(1, 10):
        candidate = float(f"{value:.{digits}g}")
        if struct.pack("<f", candidate) == struct.pack("<f", value):
            return candidate
    return value


def _head_dim(label: str, prefix: str, own: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """The size of a head, which keys, values and RoPE must share."""
    default = own.get("rope.dimension_count", config["hidden_size"] // config["num_attention_heads"])
    head_dim = int(_number(label, f"{prefix}.attention.key_length", own.get("attention.key_length", default)))
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise InputError(
                f"{label}: {prefix}.{key} is {own[key]}, but the head size is {head_dim}; heads whose "
                "values or RoPE have another size are not supported as GGUF"
            )
    return head_dim


def _rope_scaling(
    label: str,
    prefix: str,
    own: Mapping[str, Any],
    divisors: Sequence[float] | None,
    config: Mapping[str, Any],
) -> dict[str, Any] | None:
    """The `rope_scaling` of the config; None for plain RoPE."""
    kind = own.get("rope.scaling.type", "none")
    if divisors is not None:
        if kind != "none":
            raise InputError(f"{label}: both {prefix}.rope.scaling.type {kind!r} and rope_freqs.weight")
        return _llama3_scaling(label, divisors, config)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise InputError(f"{label}: {prefix}.rope.scaling.type {kind!r} is not supported (linear, yarn)")
    scaling: dict[str, Any] = {"rope_type": kind}
    scaling["factor"] = _number(label, f"{prefix}.rope.scaling.factor", own.get("rope.scaling.factor"))
    if kind == "yarn":
        original = own.get("rope.scaling.original_context_length")
        key = f"{prefix}.rope.scaling.original_context_length"
        scaling["original_max_position_embeddings"] = _number(label, key, original)
        for gguf_key, name in _YARN_KEYS.items():
            if (value := own.get(f"rope.scaling.{gguf_key}")) is not None:
                scaling[name] = _shortest(value)
    return scaling


def _llama3_scaling(label: str, divisors: Sequence[float], config: Mapping[str, Any]) -> dict[str, Any]:
    """The llama3 parameters that give a file's divisors of the RoPE frequencies.

    llama.cpp stores only the divisors. The factor is their maximum; the rest is found by trying the
    original lengths in use, and proved by computing the divisors again.

    Raises:
        InputError: no known parameters give these divisors.
    """
    factor = float(f"{max(divisors):.5g}")
    for original in _LLAMA3_ORIGINAL_LENGTHS:
        expected = _llama3_divisors(factor, original, config["rope_theta"], config["head_dim"])
        if len(expected) == len(divisors) and all(
            math.isclose(a, b, rel_tol=1e-5) for a, b in zip(expected, divisors, strict=True)
        ):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LLAMA3_LOW,
                "high_freq_factor": _LLAMA3_HIGH,
                "original_max_position_embeddings": original,
            }
    raise InputError(
        f"{label}: rope_freqs.weight is not the llama3 scaling of any known original length; "
        "take the Hugging Face form of the model"
    )


def _llama3_divisors(factor: float, original: int, theta: float, head_dim: int) -> list[float]:
    """Divisors of the RoPE frequencies under llama3 scaling (Hugging Face: `_compute_llama3_parameters`)."""
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / head_dim)
        if wavelength < original / _LLAMA3_HIGH:
            divisors.append(1.0)
        elif wavelength > original / _LLAMA3_LOW:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors
