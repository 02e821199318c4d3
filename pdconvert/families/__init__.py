"""Model families: one file each, named after the Hugging Face `model_type`; the file is the registration.

A family module offers

* `TINY`: a config for tests, small and with every feature of the family that has one value;
* `read_config(config) -> ModelSpec`: the geometry, refusing every key it does not know;
* `LAYER, NORM, ROTARY`: Hugging Face's classes, as "module:Class", that serve as reference;
* `COMPUTED, KNOWN`: the config keys that decide the result, and all that the family accepts;
* `hf_config(config)`: the config as Hugging Face's class, eager attention, for the reference;
* `layer_tensors(index, spec) -> {name in the block: name in the checkpoint}`; block tensors that share a
  checkpoint tensor are its rows, in this order;
* `decode_config(config, spec) -> dict`: the mlx-lm config, in the old-style keys that it reads.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from types import ModuleType
from typing import Any

from pdconvert.errors import InputError

TYPING_ERROR = 0.87
"""Similarity of two names from which on one is taken for a mistyped other; mixtral and mistral are below."""

EXPERTS = "a mixture of experts, whose routing a static graph cannot hold"
RECURRENT = "state-space or other recurrent layers, which have no keys and values to hand over"
VISION = "a model with an image or audio encoder; take its text model if it is published alone"
ENCODER = "no decoder-only language model"
LATENT = "attention on compressed (latent) keys and values, which mlx-lm caches in another form, and experts"

UNSUPPORTED: dict[str, str] = {
    **dict.fromkeys(
        (
            "dbrx",
            "ernie4_5_moe",
            "flex_olmo",
            "glm4_moe",
            "gpt_oss",
            "granitemoe",
            "granitemoeshared",
            "hunyuan_v1_moe",
            "jetmoe",
            "minimax",
            "mixtral",
            "olmoe",
            "phimoe",
            "qwen2_moe",
            "qwen3_moe",
        ),
        EXPERTS,
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "longcat_flash"), LATENT),
    **dict.fromkeys(
        (
            "bamba",
            "falcon_h1",
            "falcon_mamba",
            "granitemoehybrid",
            "jamba",
            "lfm2",
            "lfm2_moe",
            "mamba",
            "mamba2",
            "nemotron_h",
            "qwen3_next",
            "recurrent_gemma",
            "rwkv",
            "xlstm",
            "zamba",
            "zamba2",
        ),
        RECURRENT,
    ),
    **dict.fromkeys(
        (
            "gemma3",
            "gemma3n",
            "idefics2",
            "idefics3",
            "internvl",
            "llama4",
            "llava",
            "llava_next",
            "mistral3",
            "mllama",
            "paligemma",
            "phi4_multimodal",
            "pixtral",
            "qwen2_5_omni",
            "qwen2_5_vl",
            "qwen2_audio",
            "qwen2_vl",
            "qwen3_vl",
            "qwen3_vl_moe",
            "smolvlm",
            "voxtral",
        ),
        VISION,
    ),
    **dict.fromkeys(("bart", "bert", "distilbert", "modernbert", "roberta", "t5", "whisper"), ENCODER),
    "gemma": "a family whose gains are 1 + weight, which is missing",
}
"""Model types that are refused, and what they are; a type that is neither here nor a family is only unknown."""


def names() -> list[str]:
    """The `model_type` of every family, sorted."""
    return sorted(
        info.name
        for info in pkgutil.iter_modules(__path__)
        if not info.name.startswith("_") and info.name != "config"
    )


def get(config: dict[str, Any]) -> ModuleType:
    """The family module of a Hugging Face config.

    Raises:
        InputError: the model type is missing or not supported.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise InputError(
            "config.json has no model_type, so its family is unknown; add it to the checkpoint's config"
        )
    refuse_unsupported(model_type)
    if model_type not in names():
        near = difflib.get_close_matches(model_type.lower(), names(), 1, TYPING_ERROR)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise InputError(f"model_type {model_type!r} is not supported{hint}; supported: {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{model_type}")


def refuse_unsupported(model_type: Any) -> None:
    """Raise InputError for a model type that is known and not supported; imports nothing heavy."""
    if isinstance(model_type, str) and model_type in UNSUPPORTED:
        raise InputError(
            f"model_type {model_type!r} is not supported: it is {UNSUPPORTED[model_type]}; supported: "
            f"{', '.join(names())}"
        )
