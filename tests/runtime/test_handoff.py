"""K and V of the graph in mlx-lm's caches: both forms of K, layout, dtype, ownership."""

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx_lm.models.cache import ArraysCache, KVCache
from tiny_pair import as_graph, hf_greedy, hf_keys_values, hf_logits, make_tiny

from pdconvert.errors import InputError
from pdconvert.executors.mlx import DecodeModel
from pdconvert.measure import sqnr_db
from pdconvert.runtime.handoff import KeysValues, fill_caches

LENGTHS = [1, 2, 3, 31, 64, 127, 128]


def graph_outputs(tiny, ids: list[int], form: str, columns: int = 128) -> tuple[np.ndarray, np.ndarray]:
    """k and v of a prompt in the graph's layout, noise in the padded columns."""
    hf = tiny.hf
    positions = torch.arange(len(ids))[None]
    hidden = hf.model.embed_tokens(torch.tensor([ids]))
    mask = torch.full((len(ids), len(ids)), -4e4).triu(1)[None, None]
    layers = list(hf_keys_values(hf, hidden, hf.model.rotary_emb(hidden, positions), mask))
    keys = as_graph([raw if form == "raw" else rotated for raw, rotated, _ in layers])
    values = as_graph([values for *_, values in layers])
    noise = np.full((*keys.shape[:3], columns), 123.0, np.float32)
    padded = noise.copy(), noise.copy()
    for target, source in zip(padded, (keys, values), strict=True):
        target[..., : len(ids)] = source
    return padded


def keys_values(tiny, ids: list[int], form: str) -> KeysValues:
    layers = tiny.hf.config.num_hidden_layers
    return KeysValues.from_graph(*graph_outputs(tiny, ids, form), layers, len(ids), form)


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, 320, length).tolist()


@pytest.mark.parametrize("form", ["rotated", "raw"])
@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_tokens_equal_hugging_face(w8, form, length):
    ids = prompt(length)
    model = DecodeModel.load(w8.decode, "dequantized")
    kv = keys_values(w8, ids[:-1], form) if length > 1 else None
    cache, token, found = model.new_cache(kv), ids[-1], []
    for _ in range(8):
        logits = model.logits([token], cache)[-1]
        token = int(logits.argmax())
        found.append(token)
    assert found == hf_greedy(w8.hf, ids, 8)


@pytest.mark.parametrize("form", ["rotated", "raw"])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_both_forms_hold_for_every_kind_of_rope(tmp_path, scaling, form):
    tiny = make_tiny(tmp_path / "decode", 8, rope_scaling=scaling)
    ids = prompt(40)
    model = DecodeModel.load(tiny.decode, "dequantized")
    logits = model.logits(ids[29:], model.new_cache(keys_values(tiny, ids[:29], form)))
    assert sqnr_db(torch.from_numpy(hf_logits(tiny.hf, ids)[29:]), torch.from_numpy(logits)) > 80


def test_raw_keys_turn_at_the_position_of_their_block(w8):
    model = DecodeModel.load(w8.decode, "dequantized")
    ids = prompt(20)
    whole = keys_values(w8, ids, "raw")
    later = KeysValues(tuple(k[:, :, 8:] for k in whole.keys), whole.values, "raw", start=8)
    expected = keys_values(w8, ids, "rotated")
    for cache, keys in zip(model.new_cache(later), expected.keys, strict=True):
        np.testing.assert_allclose(np.array(cache.keys)[:, :, :12], keys[:, :, 8:], atol=2e-5)


def test_layout_and_padding():
    layers, heads, dim, columns = 3, 2, 4, 5
    keys = np.arange(layers * heads * dim * columns, dtype=np.float32).reshape(1, -1, dim, columns)
    kv = KeysValues.from_graph(keys, keys + 0.5, layers, 2, "rotated")
    assert kv.tokens == 2
    for layer in range(layers):
        for head in range(heads):
            for token in range(2):
                expected = keys[0, layer * heads + head, :, token]
                np.testing.assert_array_equal(kv.keys[layer][0, head, token], expected)
                np.testing.assert_array_equal(kv.values[layer][0, head, token], expected + 0.5)


@pytest.mark.parametrize(
    ("tokens", "capacity", "columns"), [(1, 0, 256), (127, 129, 256), (127, 400, 512), (256, 0, 256)]
)
def test_buffers_have_whole_steps_and_the_offset_of_the_tokens(w8, tokens, capacity, columns):
    model = DecodeModel.load(w8.decode)
    block = np.ones((1, 2, tokens, 16), np.float32)
    for cache in model.new_cache(KeysValues((block, block), (block, block)), capacity):
        assert cache.offset == tokens
        assert cache.keys.shape == cache.values.shape == (1, 2, columns, 16)
        assert np.array(cache.keys)[:, :, tokens:].sum() == 0


def test_decoding_within_the_capacity_grows_nothing(w8):
    model = DecodeModel.load(w8.decode)
    cache = model.new_cache(keys_values(w8, prompt(100), "rotated"), capacity=108)
    for token in range(8):
        model.logits([token], cache)
    assert cache[0].keys.shape[2] == 256
    assert cache[0].offset == 108


def test_decoding_leaves_the_given_block_alone(w8):
    model = DecodeModel.load(w8.decode)
    kv = keys_values(w8, prompt(30), "rotated")
    before = [array.copy() for array in (*kv.keys, *kv.values)]
    first = model.new_cache(kv)
    logits = model.logits([5, 6, 7], first)
    for old, now in zip(before, (*kv.keys, *kv.values), strict=True):
        np.testing.assert_array_equal(old, now)
    np.testing.assert_array_equal(model.logits([5, 6, 7], model.new_cache(kv)), logits)


@pytest.mark.parametrize("form", ["rotated", "raw"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_the_cache_takes_the_models_dtype(w8, dtype, form):
    model = DecodeModel.load(w8.decode).model
    model.set_dtype(dtype)
    block = np.ones((1, 2, 3, 16), np.float16)
    caches = fill_caches(model, KeysValues((block, block), (block, block), form), dtype)
    assert {cache.keys.dtype for cache in caches} == {cache.values.dtype for cache in caches} == {dtype}
    assert model(mx.array([[1]]), cache=caches).dtype == dtype


def test_a_cache_without_state_tuples_is_enough(w8, monkeypatch):
    """Older and newer mlx-lm disagree about `state`; the hand-off must not use it."""

    def refuse(self, *_):
        raise AssertionError("state was used")

    monkeypatch.setattr(KVCache, "state", property(refuse, refuse))
    model = DecodeModel.load(w8.decode)
    cache = model.new_cache(keys_values(w8, prompt(10), "rotated"))
    assert np.isfinite(model.logits([1], cache)).all()


def test_refuses_other_layers_and_other_caches(w8, monkeypatch):
    model = DecodeModel.load(w8.decode)
    block = np.ones((1, 2, 3, 16), np.float32)
    with pytest.raises(InputError, match="K and V of 1 layers, and decode/ has 2|decode/ has 2"):
        model.new_cache(KeysValues((block,), (block,)))
    monkeypatch.setattr(type(model.model), "make_cache", lambda _: [ArraysCache(2)] * 2)
    with pytest.raises(InputError, match="with a ArraysCache, which the hand-off cannot fill$"):
        model.new_cache()
