"""Layers with a sliding window, from the graph's masks to mlx-lm's ring caches, around the window's length."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_build import assert_same_bits, token_ids

from pdconvert import families
from pdconvert.errors import InputError
from pdconvert.executors.mlx import DecodeModel
from pdconvert.families import gemma3_text, ministral
from pdconvert.measure import sqnr_db
from pdconvert.pipeline import build
from pdconvert.recipe import load_recipe, recipe_from_data
from pdconvert.reference import Reference
from pdconvert.runtime.handoff import KeysValues
from pdconvert.runtime.manifest import read_manifest
from pdconvert.runtime.mask import MASKED, causal_mask
from pdconvert.runtime.package_decode import PackageDecoder, decode_functions
from pdconvert.runtime.pdkv import read_pdkv, write_pdkv
from pdconvert.runtime.pdkv_header import Header
from pdconvert.runtime.prefix_cache import MemoryStore, PrefixCache, cache_seed
from pdconvert.sources import open_source
from pdconvert.verify import open_prefill

WINDOW = 11
LENGTHS = [2, 9, 10, 11, 12, 13, 16, 17, 28, 40, 65, 80]
"""Prompt lengths below, at and beyond the window, and at the ends of calls of 16 tokens."""

FORMS = [("ministral", "rotated"), ("ministral", "raw"), ("gemma3_text", "rotated"), ("gemma3_text", "raw")]


@pytest.fixture(scope="module", params=FORMS, ids="-".join)
def pair(request, tmp_path_factory):
    """A build with window layers: its manifest, prefill, MLX weights and the reference on them."""
    name, form = request.param
    family = {"ministral": ministral, "gemma3_text": gemma3_text}[name]
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp(name)
        patch.setenv("PDCONVERT_CACHE", str(folder / "cache"))
        data = load_recipe("tiny", overrides=["passes.quantize_weights.scheme=none"]).resolved()
        data["source"] = {"random": {"seed": 1, "config": {**family.TINY, "sliding_window": WINDOW}}}
        data["prefill"] |= {
            "functions": [{"tokens": 16}, {"tokens": 16, "past": 64}, {"tokens": 1, "past": 64}],
            "outputs": "logits",
            "kv": {"rope": form, "storage": "io"},
        }
        data["decode"] |= {"embedding_bits": 16, "head_bits": 16}
        recipe = recipe_from_data(data, where="test", folder=folder)
        assert build(recipe, folder / "out").verdict == "pass"
        source = open_source(recipe.source)
    reference = Reference(source, family, family.read_config(source.config))
    manifest = read_manifest(folder / "out")
    model = DecodeModel.load(manifest.decode, "dequantized")
    prefill = open_prefill(manifest, "mil", "fp32")
    return SimpleNamespace(reference=reference, manifest=manifest, prefill=prefill, model=model)


@torch.no_grad()
def whole_pass(reference, ids):
    """Rotated keys and values of every layer, each (1, heads, n, D), in one pass of Hugging Face."""
    state, caches = reference.embed(ids)[None], []
    for index in range(len(reference.spec.layers)):
        state, cache = reference.run(reference.layer(index), state)
        caches.append(cache)
    return caches


def test_the_layers_differ(pair):
    assert {layer.window for layer in pair.reference.spec.layers} == {None, WINDOW}
    assert pair.manifest.window == WINDOW
    function = pair.manifest.functions["extend_16_ctx64"]
    roles = {port.role: port for port in function.inputs}
    assert roles["mask.window"].name == "mask_window"
    assert roles["mask.window"].shape == roles["mask"].shape == (1, 1, 80, 16)
    local = pair.reference.spec.local_rope is not None
    assert ("rope_cos.local" in roles) == ("rope_sin.local" in roles) == local


@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_equal_one_pass(pair, length):
    ids = token_ids(length)
    got = pair.prefill.run(ids)
    caches = pair.model.new_cache(got)
    for index, cache in enumerate(whole_pass(pair.reference, ids[:-1])):
        values = torch.from_numpy(got.values[index].astype(np.float32))
        assert sqnr_db(cache.values, values) > 50
        columns = min(length - 1, WINDOW) if pair.reference.spec.layers[index].window else length - 1
        held = torch.from_numpy(np.array(caches[index].keys))[:, :, :columns]
        assert sqnr_db(cache.keys[:, :, -columns:], held) > 50
        assert caches[index].offset == length - 1


@pytest.mark.parametrize("length", LENGTHS)
def test_the_pair_says_what_mlx_alone_says(pair, length):
    ids, fed = token_ids(length), token_ids(15, seed=1)
    pair_logits = pair.model.logits([ids[-1], *fed], pair.model.new_cache(pair.prefill.run(ids)))
    alone = pair.model.logits([*ids, *fed], pair.model.new_cache())[length - 1 :]
    assert sqnr_db(torch.from_numpy(alone), torch.from_numpy(pair_logits)) > 45


@pytest.mark.parametrize("length", [1, 5, 10, 11, 12, 22, 23, 40])
@pytest.mark.parametrize("capacity", [0, 300])
def test_a_ring_filled_from_exact_values_is_exact(pair, length, capacity):
    """What mlx-lm itself would hold after the prompt: one token at a time, then several together, then one."""
    ids, fed = token_ids(length), token_ids(30, seed=2)
    layers = whole_pass(pair.reference, ids)
    kv = KeysValues(
        tuple(cache.keys.numpy() for cache in layers), tuple(cache.values.numpy() for cache in layers)
    )
    ours, theirs = pair.model.new_cache(kv, capacity), pair.model.new_cache()
    pair.model.logits(ids, theirs)
    for part in (*([token] for token in fed[:14]), fed[14:20], fed[20:21], fed[21:]):
        a, b = (torch.from_numpy(pair.model.logits(part, cache)) for cache in (theirs, ours))
        assert sqnr_db(a, b) > 60


def test_a_ring_holds_no_more_than_the_window(pair):
    kv = pair.prefill.run(token_ids(60))
    caches = pair.model.new_cache(kv, capacity=1000)
    for cache, layer in zip(caches, pair.reference.spec.layers, strict=True):
        assert cache.keys.shape[2] == (WINDOW if layer.window else 1024)
        assert cache.offset == 59


@pytest.mark.parametrize("length", [1, 10, 12, 40, 50])
def test_the_package_decodes_as_mlx_does(pair, length):
    decoder = PackageDecoder(pair.prefill, decode_functions(pair.manifest.functions.values()), {})
    ids, fed = token_ids(length), token_ids(14, seed=1)
    kv = pair.prefill.run(ids)
    ours = decoder.logits([ids[-1], *fed], decoder.new_cache(kv))
    theirs = pair.model.logits([ids[-1], *fed], pair.model.new_cache(kv))
    assert sqnr_db(torch.from_numpy(theirs), torch.from_numpy(ours)) > 45


def test_a_prefix_from_the_cache_has_the_same_bits(pair):
    cold = pair.prefill.run(token_ids(60))
    pair.prefill.cache = PrefixCache(cache_seed(pair.manifest, "mil", "fp32", "all"), [MemoryStore(1 << 24)])
    try:
        for _ in range(2):
            assert_same_bits(cold, pair.prefill.run(token_ids(60)))
        assert pair.prefill.cached_tokens == 59
    finally:
        pair.prefill.cache, pair.prefill.cached_tokens = None, 0


def test_a_hand_off_file_holds_all_tokens_and_names_the_window(pair, tmp_path):
    ids = token_ids(60)
    kv = pair.prefill.run(ids)
    header = Header.of(pair.manifest, ids, kv.tokens)
    write_pdkv(tmp_path / "kv.pdkv", header, kv)
    found, again = read_pdkv(tmp_path / "kv.pdkv", pair.manifest, ids)
    assert found.window == WINDOW
    assert_same_bits(kv, again)
    with pytest.raises(InputError, match="window is 11, and .* has 12; prefill the prompt with the build"):
        read_pdkv(tmp_path / "kv.pdkv", replace(pair.manifest, window=12))
    changed = replace(pair.manifest, window=12)
    assert len({cache_seed(item, "mil", "fp32", "all") for item in (pair.manifest, changed)}) == 2


def test_keys_and_values_in_states_see_the_same_windows(tmp_path, monkeypatch):
    monkeypatch.setenv("PDCONVERT_CACHE", str(tmp_path / "cache"))
    data = load_recipe("tiny").resolved()
    data["source"] = {"random": {"seed": 1, "config": gemma3_text.TINY}}
    functions = [{"tokens": 16}, {"tokens": 16, "past": 48}, {"tokens": 1, "past": 63}]
    found = []
    for storage in ("io", "state"):
        data["prefill"] |= {"functions": functions, "outputs": "logits"}
        data["prefill"]["kv"] = {"rope": "rotated", "storage": storage}
        recipe = recipe_from_data(data, where="test", folder=tmp_path)
        assert build(recipe, tmp_path / storage).verdict == "pass"
        found.append(open_prefill(read_manifest(tmp_path / storage), "mil", "fp32").run(token_ids(50)))
    for ours, theirs in zip(*((*kv.keys, *kv.values) for kv in found), strict=True):
        assert sqnr_db(torch.from_numpy(theirs).float(), torch.from_numpy(ours).float()) > 55


def test_parts_take_the_masks_and_tables_of_their_own_layers(tmp_path, monkeypatch):
    monkeypatch.setenv("PDCONVERT_CACHE", str(tmp_path / "cache"))
    data = load_recipe("tiny").resolved()
    data["source"] = {"random": {"seed": 1, "config": gemma3_text.TINY}}
    found = []
    for parts in (None, {"parts": 3}):
        data["prefill"] |= {"functions": [{"tokens": 16}, {"tokens": 16, "past": 64}]}
        if parts:
            data["prefill"]["split_model"] = parts
        recipe = recipe_from_data(data, where="test", folder=tmp_path)
        folder = tmp_path / f"parts-{bool(parts)}"
        assert build(recipe, folder).verdict == "pass"
        manifest = read_manifest(folder)
        found.append(open_prefill(manifest, "mil", "fp32").run(token_ids(50)))
    assert_same_bits(*found)
    taken = [
        set(part.inputs) - {"hidden", "past_k", "past_v"} for part in manifest.parts_of("extend_16_ctx64")
    ]
    local = {"rope_cos_local", "rope_sin_local", "mask_window"}
    assert taken == [local, {"rope_cos", "rope_sin", "mask"}, local]


def test_the_mask_of_a_window():
    for past, capacity, new, tokens, window in itertools.product((0, 3, 6), (6, 8), (2, 4), (4,), (1, 3, 20)):
        mask = causal_mask(past, capacity, new, tokens, window=window)[0, 0]
        assert mask.shape == (capacity + tokens, tokens)
        for key, query in np.ndindex(mask.shape):
            position = key if key < capacity else past + key - capacity
            real = key < past or key >= capacity
            seen = real and past + query - window < position <= past + query
            assert mask[key, query] == np.float16(0 if seen else MASKED)


def test_a_model_with_a_window_in_every_layer_is_refused():
    family = families.get({"model_type": "ministral"})
    config = {**family.TINY, "layer_types": ["sliding_attention"] * 3}
    with pytest.raises(InputError, match="mlx-lm's llama, which decodes it, cannot have a window in every"):
        family.decode_config(config, family.read_config(config))
