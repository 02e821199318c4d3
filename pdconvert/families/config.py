"""What families share in reading a Hugging Face config: strict keys, checked numbers, RoPE kinds."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from pdconvert.errors import InputError
from pdconvert.model import Rope

BOOKKEEPING = frozenset(
    "_name_or_path architectures auto_map attention_dropout bos_token_id chunk_size_feed_forward dtype eos_token_id "
    "id2label initializer_range is_encoder_decoder label2id model_type output_attentions output_hidden_states "
    "pad_token_id problem_type return_dict tokenizer_class torch_dtype transformers_version unsloth_version "
    "unsloth_fixed use_cache transformers.js_config".split()
)
"""Config keys that change nothing that a converted model computes."""

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def refuse_unknown(config: dict[str, Any], known: Iterable[str], family: str) -> None:
    """Raise InputError for a key that neither the family nor the bookkeeping list knows."""
    unknown = sorted(set(config) - set(known) - BOOKKEEPING)
    if unknown:
        values = ", ".join(f"{key}={config[key]!r}" for key in unknown[:4])
        raise InputError(
            f"config.json: the {family} family does not know {values}; "
            "it may change the result, so remove it if it does not, or add it to the family file"
        )


def positive_int(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """The positive integer under `key`; a null or missing value takes the default."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise InputError(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def flag(config: dict[str, Any], key: str, default: bool) -> bool:
    """The boolean under `key`; a null or missing value takes the default."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InputError(f"config.json: {key} must be true or false, not {value!r}")
    return value


def rope_parameters(config: dict[str, Any], default_theta: float = 10000.0) -> dict[str, Any]:
    """The RoPE settings in one form, from `rope_parameters` (new) or `rope_theta` + `rope_scaling` (old).

    Returns:
        A dict with `rope_type`, `rope_theta` and the parameters of that type.

    Raises:
        InputError: the type is unknown or refused, or a needed parameter is missing.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise InputError(f"config.json: rope_scaling must be an object, not {given!r}")
    settings = dict(given)
    old_kind = settings.pop("type", None)
    kind = settings.setdefault("rope_type", old_kind or "default")
    theta = settings.setdefault("rope_theta", config.get("rope_theta") or default_theta)
    if not isinstance(theta, int | float) or isinstance(theta, bool) or theta <= 0:
        raise InputError(f"config.json: rope_theta must be a positive number, not {theta!r}")
    if kind == "dynamic":
        raise InputError(
            "config.json: rope type 'dynamic' is refused: its frequencies change with the prompt's length, so a "
            "cache filled in chunks would be wrong; set rope type 'yarn' or 'linear' if the model allows it"
        )
    if kind not in ROPE_KINDS:
        raise InputError(f"config.json: rope type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    needed = {"linear": ("factor",), "yarn": ("factor",)}.get(kind, ())
    if kind == "llama3":
        needed = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    for key in needed:
        if not isinstance(settings.get(key), int | float) or isinstance(settings.get(key), bool):
            raise InputError(f"config.json: rope type {kind!r} needs a number {key}, found {settings.get(key)!r}")
    return settings


def reference_class(path: str) -> type:
    """The Hugging Face class named as "module:Class"."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


def read_rope(hf_config: Any, rotary: str) -> Rope:
    """The frequencies that Hugging Face's own rotary module computes for its config."""
    module = reference_class(rotary)(hf_config)
    return Rope(tuple(module.inv_freq.double().tolist()), float(module.attention_scaling))
