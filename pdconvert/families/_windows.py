"""Sliding windows: which layers see only the last tokens, and what mlx-lm can hold of that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdconvert.errors import InputError
from pdconvert.families.config import flag, rope_parameters
from pdconvert.model import ModelSpec

FULL, SLIDING = "full_attention", "sliding_attention"

KEYS = frozenset({"sliding_window", "layer_types"})
"""Config keys that decide which layers see a window only."""

SWITCHED = KEYS | {"use_sliding_window", "max_window_layers"}
"""The same where a switch turns windows on."""


def window_size(config: dict[str, Any], default: int | None) -> int | None:
    """The number of tokens that a layer with a window sees; null means none, as far as a family allows it.

    Raises:
        InputError: it is neither a positive integer nor null.
    """
    window = config.get("sliding_window", default)
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window <= 0):
        raise InputError(f"config.json: sliding_window must be a positive integer or null, not {window!r}")
    return window


def with_types_of(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The config with as many layer types as layers: transformers refuses more, which some checkpoints have."""
    types = config.get("layer_types")
    return {**config, "layer_types": types[:layers]} if isinstance(types, list) else config


def layer_types(config: dict[str, Any], layers: int, default: Sequence[str]) -> tuple[str, ...]:
    """Which layers have a window, as the config lists them, or by default.

    Raises:
        InputError: the list does not name one of the two kinds for each layer.
    """
    types = config.get("layer_types")
    if types is None:
        return tuple(default)
    kinds = (FULL, SLIDING)
    if not isinstance(types, list) or len(types) < layers or not all(kind in kinds for kind in types):
        raise InputError(
            f"config.json: layer_types must name {FULL} or {SLIDING} for each of the {layers} layers, not {types!r:.80}"
        )
    return tuple(types[:layers])


def switched_types(
    config: dict[str, Any], layers: int, default: Sequence[str] | None = None
) -> tuple[str, ...]:
    """The same for families in which `use_sliding_window` says whether there are windows at all.

    Args:
        default: where the switch is on and the config lists no types; without one, layers from
            `max_window_layers` on have the window.

    Raises:
        InputError: the keys are malformed, or contradict each other.
    """
    on = flag(config, "use_sliding_window", False)
    first = 28 if config.get("max_window_layers") is None else config["max_window_layers"]
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise InputError(f"config.json: max_window_layers must be a whole number, not {first!r}")
    if default is None:
        default = [SLIDING if index >= first else FULL for index in range(layers)]
    types = layer_types(config, layers, default if on else [FULL] * layers)
    if SLIDING in types and not on:
        raise InputError(
            "config.json: layer_types has sliding_attention, but use_sliding_window is false; make them agree"
        )
    return types


def windows(types: Sequence[str], window: int | None, max_positions: int) -> tuple[int | None, ...]:
    """The window of each layer; None also where it is not shorter than the context and so hides no token."""
    hides = window is not None and window < max_positions
    return tuple(window if kind == SLIDING and hides else None for kind in types)


def ropes(config: dict[str, Any], family: str, theta: float, local_theta: float) -> dict[str, dict[str, Any]]:
    """The RoPE settings of layers without and with a window, by their type.

    Args:
        theta, local_theta: bases where the config gives none. The old form has the settings of layers without a
            window at its top; the new form has an object for each type.

    Raises:
        InputError: they are malformed, or the windows' RoPE is scaled, which mlx-lm cannot hold.
    """
    given = config.get("rope_parameters")
    if isinstance(given, dict) and given and given.keys() <= {FULL, SLIDING}:
        parts = [{"rope_parameters": given.get(kind)} for kind in (FULL, SLIDING)]
    else:
        parts = [dict(config), {}]
    full, local = rope_parameters(parts[0], theta), rope_parameters(parts[1], local_theta)
    if local["rope_type"] != "default":
        raise InputError(
            f"config.json: rope type {local['rope_type']!r} in window layers is not supported: mlx-lm's {family} "
            "scales the RoPE of the other layers only"
        )
    return {FULL: full, SLIDING: local}


def config_keys(spec: ModelSpec) -> dict[str, Any]:
    """The windows of a model in the keys of Hugging Face and mlx-lm."""
    types = [SLIDING if layer.window else FULL for layer in spec.layers]
    return {"sliding_window": spec.window, "layer_types": types}


def refuse(spec: ModelSpec, why: str) -> None:
    """Raise InputError for a model with windows, which mlx-lm cannot hold."""
    if spec.window:
        raise InputError(
            f"config.json: sliding_window {spec.window} is not supported for {spec.model_type}: {why}; set "
            f"max_position_embeddings to at most {spec.window} to convert it for texts of that length"
        )


def llama_keys(spec: ModelSpec) -> dict[str, Any]:
    """The windows in the keys of mlx-lm's llama.

    Raises:
        InputError: every layer has a window.
    """
    if all(layer.window for layer in spec.layers):
        refuse(spec, "mlx-lm's llama, which decodes it, cannot have a window in every layer")
    return config_keys(spec)
