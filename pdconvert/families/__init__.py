"""Model families: one file each, named after the Hugging Face `model_type`; the file is the registration.

A family module offers

* `TINY`: a config for tests, small and with every feature of the family that has one value;
* `read_config(config) -> ModelSpec`: the geometry, refusing every key it does not know;
* `LAYER, NORM, ROTARY`: Hugging Face's classes, as "module:Class", that serve as reference;
* `layer_tensors(index, spec) -> {name in the block: name in the checkpoint}`;
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
    if model_type not in names():
        near = difflib.get_close_matches(model_type.lower(), names(), 1, TYPING_ERROR)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise InputError(f"model_type {model_type!r} is not supported{hint}; supported: {', '.join(names())}")
    return importlib.import_module(f"{__name__}.{model_type}")
