"""The reference, layer by layer, against Hugging Face's whole model."""

from typing import Any

import pytest
import torch
from checkpoints import MemorySource, one_thread, random_source, reference_of
from transformers import LlamaForCausalLM

from pdconvert import reference as module
from pdconvert.compile import unrotate
from pdconvert.families import llama
from pdconvert.measure import sqnr_db
from pdconvert.program import Probe
from pdconvert.reference import Capture

__all__ = ["one_thread"]

CONFIGS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
}


def whole_model(source: MemorySource) -> LlamaForCausalLM:
    model = LlamaForCausalLM(llama.hf_config(source.config)).eval()
    missing, unexpected = model.load_state_dict(source.values, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def config(name: str) -> dict[str, Any]:
    changes = {key: dict(value) if isinstance(value, dict) else value for key, value in CONFIGS[name].items()}
    return {**llama.TINY, "hidden_size": 32, "intermediate_size": 48, **changes}


@pytest.mark.parametrize("name", list(CONFIGS))
def test_greedy_tokens_are_those_of_generate(name: str) -> None:
    source = random_source(config(name))
    prompts = [[1, 5, 9], [7], list(range(20))]
    found = reference_of(source).generate(prompts, 6)
    model = whole_model(source)
    for prompt, continuation in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        given = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert continuation.token_ids == given[0, len(prompt) :].tolist()
        logits = model(given[:, :-1]).logits[0, len(prompt) - 1 :]
        margins = logits.topk(2).values.diff().neg().flatten()
        assert continuation.margins == pytest.approx(margins.tolist(), abs=1e-3)


def test_a_call_after_another_equals_one_call_on_both() -> None:
    reference = reference_of(random_source(config("yarn")))
    hidden = reference.embed(range(10))[None]
    layer = reference.layer(1)
    whole, cache = reference.run(layer, hidden)
    first, past = reference.run(layer, hidden[:, :6])
    rest, past = reference.run(layer, hidden[:, 6:], 6, past)
    assert sqnr_db(whole, torch.cat((first, rest), 1)) > 100
    assert sqnr_db(cache.keys, past.keys) > 100 and past.keys.shape == (1, 2, 10, 8)


def test_a_capture_starts_empty_and_appends() -> None:
    cache = Capture()
    with pytest.raises(AssertionError, match="the layer has not run"):
        _ = cache.keys
    one = torch.ones(1, 2, 3, 4)
    keys, values = cache.update(one, 2 * one, 0)
    assert torch.equal(keys, one) and torch.equal(values, 2 * one)
    keys, _ = cache.update(3 * one, one, layer_idx=0)
    assert keys.shape == (1, 2, 6, 4) and torch.equal(keys[:, :, 3:], 3 * one)


@pytest.mark.parametrize("name", ["untied", "yarn"])
def test_unrotated_keys_are_what_the_projection_gave(name: str) -> None:
    reference = reference_of(random_source(config(name)))
    hidden = reference.embed(range(9))[None]
    layer = reference.layer(0)
    _, cache = reference.run(layer, hidden)
    with torch.no_grad():
        raw = layer.self_attn.k_proj(layer.input_layernorm(hidden)).view(1, 9, 2, 8).transpose(1, 2)
    positions = torch.arange(9)
    cos, sin = reference.rope(positions)
    probe = Probe(hidden, positions, cos[0], sin[0])
    assert sqnr_db(raw, unrotate(cache.keys, probe, reference.spec.rope.attention_factor)) > 120


def count_reads(source: MemorySource, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    read: list[str] = []
    original = MemorySource.read
    monkeypatch.setattr(MemorySource, "read", lambda self, name: read.append(name) or original(self, name))
    return read


@pytest.mark.parametrize(("limit", "times"), [(1 << 30, 1), (100, 3)])
def test_layers_stay_in_memory_only_where_all_of_them_fit(
    limit: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEEP_BYTES", limit)
    source = random_source(config("untied"))
    reference = reference_of(source)
    read = count_reads(source, monkeypatch)
    for _ in range(3):
        reference.layer(0)
    assert read.count("model.layers.0.mlp.up_proj.weight") == times
    reference.release()
    reference.layer(0)
    assert read.count("model.layers.0.mlp.up_proj.weight") == times + 1


def test_a_layer_shares_the_tensors_it_is_given() -> None:
    reference = reference_of(random_source(config("untied")))
    tensors = reference.read_layer(0)
    layer = reference.module(0, tensors)
    assert layer.mlp.up_proj.weight.data_ptr() == tensors["mlp.up_proj.weight"].data_ptr()
    assert not any(parameter.requires_grad for parameter in layer.parameters())


def test_a_tensor_too_few_is_an_error() -> None:
    reference = reference_of(random_source(config("untied")))
    tensors = reference.read_layer(0)
    del tensors["mlp.up_proj.weight"]
    with pytest.raises(RuntimeError, match="up_proj"):
        reference.module(0, tensors)
