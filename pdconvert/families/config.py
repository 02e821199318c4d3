"""What families share in reading a Hugging Face config: strict keys, checked numbers, RoPE kinds."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from typing import Any

from pdconvert.errors import InputError
from pdconvert.model import Rope

BOOKKEEPING = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "attention_dropout",
        "bos_token_id",
        "chunk_size_feed_forward",
        "compression_config",  # as the next two: null or empty here, since sources refuse what is quantized
        "quantization",
        "quantization_config",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "unsloth_version",
        "unsloth_fixed",
        "use_cache",
        "transformers.js_config",
    }
)
"""Config keys that change nothing that a converted model computes."""

LARGEST_SIZE = 1 << 24
"""More than any model's vocabulary, width or context: a larger number is a damaged config."""

MOST_LAYERS = 1 << 12
"""More than any model's layers."""

ROPE_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
}
"""RoPE kinds, each with the parameters that it needs and those that it may have."""


def refuse_unknown(config: dict[str, Any], known: Iterable[str], family: str) -> None:
    """Raise InputError for a key that neither the family nor the bookkeeping list knows."""
    unknown = sorted(set(config) - set(known) - BOOKKEEPING)
    if unknown:
        values = ", ".join(f"{key}={config[key]!r}" for key in unknown[:4])
        raise InputError(
            f"config.json: the {family} family does not know {values}; "
            "it may change the result, so remove it if it does not, or add it to the family file"
        )


def positive_int(
    config: dict[str, Any], key: str, default: int | None = None, most: int = LARGEST_SIZE
) -> int:
    """The positive integer under `key`, at most `most`; a null or missing value takes the default."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise InputError(f"config.json: {key} must be a positive integer, not {value!r}")
    if value > most:
        raise InputError(
            f"config.json: {key} {value} is more than any model has (at most {most}); the config is damaged"
        )
    return value


def flag(config: dict[str, Any], key: str, default: bool) -> bool:
    """The boolean under `key`; a null or missing value takes the default."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InputError(f"config.json: {key} must be true or false, not {value!r}")
    return value


def rope_parameters(
    config: dict[str, Any], default_theta: float = 10000.0, *, partial: bool = False
) -> dict[str, Any]:
    """The RoPE settings in one form, from `rope_parameters` (new) or `rope_theta` + `rope_scaling` (old).

    Args:
        partial: whether a part of each head may rotate; then `partial_rotary_factor` is among the settings.

    Returns:
        A dict with `rope_type`, `rope_theta` and the parameters of that type that are not null.

    Raises:
        InputError: the type is unknown or refused, or a parameter is missing, unknown or not a positive number.
    """
    settings = _rope_settings(config)
    old_kind = settings.pop("type", None)
    kind = settings.setdefault("rope_type", old_kind or "default")
    if settings.get("rope_theta") is None:
        settings["rope_theta"] = default_theta if config.get("rope_theta") is None else config["rope_theta"]
    if not is_positive(settings["rope_theta"]):
        raise InputError(f"config.json: rope_theta must be a positive number, not {settings['rope_theta']!r}")
    if kind == "dynamic":
        raise InputError(
            "config.json: rope type 'dynamic' is refused: its frequencies change with the prompt's length, so a "
            "cache filled in chunks would be wrong; set rope type 'yarn' or 'linear' if the model allows it"
        )
    if not isinstance(kind, str) or kind not in ROPE_KINDS:
        raise InputError(
            f"config.json: rope type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}"
        )
    share = settings.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1) and not partial:
        raise InputError(
            "config.json: rope partial_rotary_factor is not supported: all channels of a head rotate"
        )
    if share is not None and not (is_positive(share) and share <= 1):
        raise InputError(f"config.json: partial_rotary_factor must be a number in (0, 1], not {share!r}")
    needed, optional = ROPE_KINDS[kind]
    settings = {key: value for key, value in settings.items() if value is not None}
    unknown = sorted(set(settings) - {"rope_type", "rope_theta", *needed, *optional})
    if unknown:
        raise InputError(f"config.json: rope type {kind!r} has no parameter {unknown[0]}; remove it")
    for key in needed:
        if not is_positive(settings.get(key)):
            raise InputError(
                f"config.json: rope type {kind!r} needs a positive number {key}, found {settings.get(key)!r}"
            )
    if kind == "llama3" and settings["low_freq_factor"] >= settings["high_freq_factor"]:
        raise InputError("config.json: rope low_freq_factor must be below high_freq_factor")
    for key in ("original_max_position_embeddings", "beta_fast", "beta_slow"):
        if key in settings and not is_positive(settings[key]):
            raise InputError(f"config.json: rope {key} must be a positive number, not {settings[key]!r}")
    return {**settings, "partial_rotary_factor": float(share or 1)} if partial else settings


def _rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    """A copy of whichever of the two RoPE objects is there."""
    found: list[dict[str, Any]] = []
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if value is not None and not isinstance(value, dict):
            raise InputError(f"config.json: {key} must be an object, not {value!r}")
        if value:
            found.append(value)
    if len(found) == 2 and found[0] != found[1]:
        raise InputError("config.json: rope_parameters and rope_scaling are both there and differ; keep one")
    return dict(found[0]) if found else {}


def is_positive(value: Any) -> bool:
    """Whether a value is a number above zero, neither NaN nor infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def reference_class(path: str) -> type:
    """The Hugging Face class named as "module:Class"."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


def read_rope(hf_config: Any, rotary: str, layer_type: str = "") -> Rope:
    """The frequencies that Hugging Face's own rotary module computes for its config.

    Args:
        layer_type: of the layers, where their types have a RoPE each.

    Raises:
        InputError: they are not finite.
    """
    module, prefix = reference_class(rotary)(hf_config), f"{layer_type}_" if layer_type else ""
    frequencies = getattr(module, f"{prefix}inv_freq").double().tolist()
    rope = Rope(tuple(frequencies), float(getattr(module, f"{prefix}attention_scaling")))
    if not all(map(math.isfinite, (*rope.inv_freq, rope.attention_factor))):
        raise InputError("config.json: the RoPE parameters give frequencies that are not finite")
    return rope
