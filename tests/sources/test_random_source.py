"""Seeded random weights: names and shapes of Hugging Face, independent of the order of reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pdconvert.errors import InputError
from pdconvert.sources.random import RandomSource

K = "model.layers.1.self_attn.k_proj.weight"


def test_loads_strictly_into_the_hugging_face_class(config: dict[str, Any]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    source = RandomSource(config, 0)
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict({name: source.read(name) for name in source.tensors()}, strict=True)
    assert source.random
    assert source.config == config


def test_a_tied_head_is_left_out(config: dict[str, Any]) -> None:
    names = RandomSource(config | {"tie_word_embeddings": True}, 0).tensors()
    assert "lm_head.weight" not in names
    assert "model.embed_tokens.weight" in names


def test_the_order_of_reading_does_not_matter(config: dict[str, Any]) -> None:
    first, second = RandomSource(config, 3), RandomSource(config, 3)
    values = {name: first.read(name) for name in first.tensors()}
    for name in reversed(list(second.tensors())):
        assert torch.equal(second.read(name), values[name])


def test_seed_and_name_decide_the_values(config: dict[str, Any]) -> None:
    source = RandomSource(config, 0)
    assert not torch.equal(source.read(K), RandomSource(config, 1).read(K))
    assert not torch.equal(source.read(K), source.read(K.replace(".1.", ".0.")))
    assert source.hashes() != RandomSource(config, 1).hashes()
    assert source.hashes() == RandomSource(dict(reversed(config.items())), 0).hashes()


def test_the_values_are_pinned(config: dict[str, Any]) -> None:
    """A change here changes every build of random weights and belongs into the changelog."""
    start = RandomSource(config, 0).read(K)[0, :3]
    assert torch.allclose(start, torch.tensor(PINNED), rtol=0, atol=1e-6)


def test_rows_equal_the_whole(config: dict[str, Any]) -> None:
    wide = config | {"vocab_size": 40000}  # more than two chunks of about a million values
    source = RandomSource(wide, 0)
    whole = source.read("model.embed_tokens.weight")
    ids = [39999, 0, 17000, 0, 16384, 16383]
    assert torch.equal(source.read_rows("model.embed_tokens.weight", ids), whole[ids])


def test_the_distributions(config: dict[str, Any]) -> None:
    source = RandomSource(config | {"attention_bias": True, "hidden_size": 1024, "head_dim": 16}, 0)
    matrix = source.read("model.layers.0.mlp.up_proj.weight")
    gain = source.read("model.norm.weight")
    bias = source.read("model.layers.0.self_attn.o_proj.bias")
    assert abs(matrix.mean()) < 1e-3
    assert matrix.std() == pytest.approx(0.02, rel=0.05)
    assert gain.mean() == pytest.approx(1, abs=0.02)
    assert gain.std() == pytest.approx(0.1, rel=0.1)
    assert bias.std() == pytest.approx(0.02, rel=0.1)


def test_the_tokenizer_takes_bytes_and_gives_them_back(config: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = RandomSource(config | {"bos_token_id": 1, "eos_token_id": 2}, 0)
    assert source.tokenizer_size() == 320
    source.write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path))
    assert len(tokenizer) == 320
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    text = "Zürich, 東京 👋\n\t\x00 two  spaces"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert set(tokenizer(bytes(range(128)).decode()).input_ids) == set(range(130)) - {1, 2}
    assert tokenizer.decode([300, 301, 2]) == " 300 301</s>"
    assert source.generation_config == {"bos_token_id": 1, "eos_token_id": 2}


def test_special_ids_default_to_those_after_the_bytes(config: dict[str, Any]) -> None:
    bare = {key: value for key, value in config.items() if not key.endswith("_token_id")}
    assert RandomSource(bare, 0).config["eos_token_id"] == 257


def test_a_small_vocabulary_has_no_tokenizer(config: dict[str, Any], tmp_path: Path) -> None:
    source = RandomSource(config | {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2}, 0)
    assert not source.has_tokenizer
    assert source.tokenizer_size() is None
    with pytest.raises(
        InputError, match="vocab_size 128 is too small for a tokenizer of bytes; give at least 258"
    ):
        source.write_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "no_such_model"}, "transformers refuses this config"),
        ({"hidden_size": "64"}, "transformers refuses this config"),
        ({"hidden_size": 65}, "transformers refuses this config"),
        ({"vocab_size": None}, "config.vocab_size: None: expected a whole number above 0"),
        ({"vocab_size": True}, "config.vocab_size: True: expected a whole number above 0"),
        ({"eos_token_id": 320}, "config.eos_token_id: 320: expected a token id below 320"),
        ({"eos_token_id": 256}, "bos_token_id and eos_token_id are both 256"),
        ({"quantization_config": {"quant_method": "awq"}}, "already quantized (awq"),
    ],
)
def test_bad_configs_are_refused(config: dict[str, Any], changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError) as caught:
        RandomSource(config | changes, 0).tensors()
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


PINNED = [0.006658580, -0.022497790, 0.002559254]
"""Of seed 0 and torch's CPU generator."""
