"""Prompts longer than one call: chunks give what one pass of the reference gives."""

import numpy as np
import pytest
import torch

from pdconvert import families
from pdconvert.errors import InputError
from pdconvert.measure import sqnr_db
from pdconvert.pipeline import build
from pdconvert.recipe import load_recipe, recipe_from_data
from pdconvert.reference import Reference
from pdconvert.runtime.manifest import read_manifest
from pdconvert.sources import open_source
from pdconvert.verify import open_prefill

FUNCTIONS = [
    {"tokens": 32},
    {"tokens": 32, "past": 64},
    {"tokens": 32, "past": 256},
    {"tokens": 1, "past": 256},
]


@pytest.fixture(scope="module", params=["rotated", "raw"])
def pair(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp(request.param)
        patch.setenv("PDCONVERT_CACHE", str(folder / "cache"))
        data = load_recipe("tiny", overrides=["passes.quantize_weights.scheme=none"]).resolved()
        data["prefill"] |= {
            "functions": FUNCTIONS,
            "outputs": "logits",
            "kv": {"rope": request.param, "storage": "io"},
        }
        recipe = recipe_from_data(data, where="test", folder=folder)
        assert build(recipe, folder / "out").verdict == "pass"
        source = open_source(recipe.source)
    family = families.get(source.config)
    reference = Reference(source, family, family.read_config(source.config))
    manifest = read_manifest(folder / "out")
    return reference, open_prefill(manifest, "mil", "fp32"), request.param


def whole_pass(reference, ids):
    """Rotated keys and values of every layer, each (1, heads, n, D), in one pass of Hugging Face."""
    state, caches = reference.embed(ids)[None], []
    for index in range(len(reference.spec.layers)):
        state, cache = reference.run(reference.layer(index), state)
        caches.append(cache)
    return caches


@torch.no_grad()
@pytest.mark.parametrize("length", [2, 31, 32, 33, 34, 63, 64, 65, 66, 97, 129, 256, 257, 288])
def test_chunks_equal_one_pass(pair, length):
    reference, prefill, form = pair
    ids = np.random.default_rng(length).integers(0, 320, length).tolist()
    got = prefill.run(ids)
    assert got.tokens == length - 1
    for index, cache in enumerate(whole_pass(reference, ids[:-1])):
        keys = torch.from_numpy(got.keys[index].astype(np.float32))
        if form == "raw":
            from pdconvert.blocks import rotate

            cos, sin = reference.rope(torch.arange(length - 1))
            keys = rotate(keys, cos[None], sin[None], axis=3)
        assert sqnr_db(cache.keys, keys) > 60
        assert sqnr_db(cache.values, torch.from_numpy(got.values[index].astype(np.float32))) > 60


def test_a_cache_grows_without_touching_the_given_one(pair):
    reference, prefill, _ = pair
    ids = list(range(100))
    first = prefill.extend(None, ids[:40])
    before = [layer.copy() for layer in first.keys]
    whole, grown = prefill.extend(None, ids), prefill.extend(first, ids[40:])
    assert all(np.array_equal(a, b) for a, b in zip(before, first.keys, strict=True))
    for a, b in zip(whole.keys + whole.values, grown.keys + grown.values, strict=True):
        assert sqnr_db(torch.from_numpy(a).float(), torch.from_numpy(b).float()) > 55


def test_a_prompt_beyond_the_context_is_refused(pair):
    _, prefill, _ = pair
    with pytest.raises(
        InputError, match="the prompt has 289 tokens, and the functions of this build hold 288"
    ):
        prefill.run([1] * 289)
