"""Builds of a tiny model with several functions, each made once in a test run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pdconvert.pipeline import build
from pdconvert.recipe import load_recipe, recipe_from_data
from pdconvert.runtime.handoff import KeysValues
from pdconvert.runtime.manifest import Manifest, read_manifest
from pdconvert.runtime.prefill import Prefill
from pdconvert.verify import open_prefill

FUNCTIONS = (
    {"tokens": 32},
    {"tokens": 32, "past": 64},
    {"tokens": 32, "past": 256},
    {"tokens": 8, "past": 64},
    {"tokens": 1, "past": 64},
    {"tokens": 1, "past": 256},
)
LIMIT = 288
"""The longest prompt that FUNCTIONS take."""


_made: dict[tuple[str, ...], Path] = {}


def tiny_build(
    factory: pytest.TempPathFactory, form: str = "rotated", scheme: str = "none", storage: str = "io"
) -> Path:
    """A build with FUNCTIONS and logits.

    Args:
        factory: of temporary folders.
        form: of the keys, "rotated" or "raw".
        scheme: of the weights, "none" or "w8a16".
        storage: of the past, "io" or "state".
    """
    key = form, scheme, storage
    if key not in _made:
        _made[key] = _build(factory.mktemp("-".join(key)), *key)
    return _made[key]


def _build(folder: Path, form: str, scheme: str, storage: str) -> Path:
    data = load_recipe("tiny", overrides=[f"passes.quantize_weights.scheme={scheme}"]).resolved()
    kv = {"rope": form, "storage": storage}
    data["prefill"] |= {"functions": list(FUNCTIONS), "outputs": "logits", "kv": kv}
    recipe = recipe_from_data(data, where="test", folder=folder)
    assert build(recipe, folder / "build", use_cache=False).verdict == "pass"
    return folder / "build"


def tiny_prefill(folder: Path, mode: str = "fp32") -> tuple[Manifest, Prefill]:
    """A build's manifest, and its package run by the MIL executor."""
    manifest = read_manifest(folder)
    return manifest, open_prefill(manifest, "mil", mode)


def token_ids(length: int, seed: int = 0) -> list[int]:
    """Random bytes as token ids, without the special ones."""
    return np.random.default_rng((seed, length)).integers(0, 256, length).tolist()


def prompt_text(length: int, seed: int = 0) -> str:
    """A prompt of that many tokens: one for each letter."""
    return "".join(np.random.default_rng((seed, length)).choice(list("abcdefghijklmnopqrstuvwxyz "), length))


def assert_same_bits(a: KeysValues, b: KeysValues) -> None:
    """The same tokens, form and position, and every fp16 value the same to the bit."""
    assert (a.tokens, a.form, a.start) == (b.tokens, b.form, b.start)
    for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True):
        assert x.dtype == y.dtype == np.float16
        np.testing.assert_array_equal(x.view(np.uint16), y.view(np.uint16))
