"""The tokenizer inside a GGUF file, as stock files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import METADATA, opened, write_gguf

from pdconvert.errors import InputError
from pdconvert.sources import Source
from pdconvert.sources.tokenizer import byte_alphabet


def byte_level(pre: str = "smollm") -> dict[str, Any]:
    """Metadata of a byte-level tokenizer with a few merges."""
    alphabet = byte_alphabet()
    space = alphabet[32]
    tokens = ["<|end|>", "<|im|>", *alphabet, "he", "ll", "hell", "hello", space * 2, f"{space}1"]
    kinds = [3, 3, *[1] * (len(tokens) - 2)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "hell o", f"{space} {space}", f"{space} 1"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}<|im|>{{ m.content }}{% endfor %}",
    }


def saved(tmp_path: Path, tokenizer: dict[str, Any]) -> tuple[Source, Any]:
    """The source of a file with a tokenizer, and the tokenizer as loaded from what the source writes."""
    from transformers import AutoTokenizer

    metadata = METADATA | tokenizer
    source = opened(write_gguf(tmp_path / "m.gguf", {"token_embd.weight": torch.zeros(320, 64)}, metadata))
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    source.write_tokenizer(folder)
    return source, AutoTokenizer.from_pretrained(str(folder))


def test_a_byte_level_tokenizer(tmp_path: Path) -> None:
    source, tokenizer = saved(tmp_path, byte_level())
    text = "hello <|im|>Zürich 👋"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(ids)[:3] == ["hello", byte_alphabet()[32], "<|im|>"]
    assert source.tokenizer_size() == len(tokenizer) == 264
    assert tokenizer.eos_token_id == 0
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "<|im|>hello"
    )
    assert source.generation_config == {"eos_token_id": 0, "bos_token_id": 1}


def test_no_trace_of_this_machine_is_written(tmp_path: Path) -> None:
    saved(tmp_path, byte_level())
    text = (tmp_path / "tokenizer" / "tokenizer_config.json").read_text()
    assert str(tmp_path) not in text
    assert '"tokenizer_class": "PreTrainedTokenizerFast"' in text
    assert {path.name for path in (tmp_path / "tokenizer").iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    }


def test_single_digits_are_cut_off_before_the_rest(tmp_path: Path) -> None:
    """With GPT-2's pattern alone, of two spaces before a digit the second would go with the digit."""
    _, tokenizer = saved(tmp_path, byte_level("smollm"))
    space = byte_alphabet()[32]
    assert tokenizer.tokenize("h  12") == ["h", space * 2, "1", "2"]


def test_gpt2_splitting_is_left_alone(tmp_path: Path) -> None:
    _, tokenizer = saved(tmp_path, byte_level("gpt-2"))
    space = byte_alphabet()[32]
    assert tokenizer.tokenize("h  12") == ["h", space, f"{space}1", "2"]


def test_a_sentencepiece_tokenizer_adds_bos_once(tmp_path: Path) -> None:
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "h",
        "i",
        "hi",
        "\u2581hi",
    ]
    kinds = [2, 3, 3, *[6] * 256, 1, 1, 1, 1, 1]
    tokenizer = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [0.0] * 259 + [-1.0, -2.0, -3.0, -4.0, -5.0],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
    }
    source, loaded = saved(tmp_path, tokenizer)
    assert loaded("hi").input_ids == [1, pieces.index("\u2581hi")]
    assert loaded.decode(loaded("hi ñ").input_ids, skip_special_tokens=True) == "hi ñ"
    assert source.tokenizer_size() == len(loaded)


def test_every_end_of_a_turn_is_an_end(tmp_path: Path) -> None:
    ends = {"tokenizer.ggml.eot_token_id": 1, "tokenizer.ggml.eom_token_id": 0}
    path = write_gguf(
        tmp_path / "m.gguf", {"token_embd.weight": torch.zeros(320, 64)}, METADATA | byte_level() | ends
    )
    assert opened(path).generation_config["eos_token_id"] == [0, 1]


def test_a_file_without_tokenizer(tmp_path: Path) -> None:
    source = opened(write_gguf(tmp_path / "m.gguf", {"token_embd.weight": torch.zeros(320, 64)}))
    assert not source.has_tokenizer
    assert source.tokenizer_size() is None
    with pytest.raises(InputError, match="no tokenizer in its metadata"):
        source.write_tokenizer(tmp_path)


def test_license_and_hashes(tmp_path: Path) -> None:
    source = opened(write_gguf(tmp_path / "m.gguf", {"token_embd.weight": torch.zeros(320, 64)}))
    assert source.license == {"tag": "mit", "files": []}
    assert set(source.hashes()) == {"m.gguf"}


@pytest.mark.parametrize("adds", [True, False])
def test_the_flag_for_bos_is_kept(tmp_path: Path, adds: bool) -> None:
    _, tokenizer = saved(tmp_path, byte_level() | {"tokenizer.ggml.add_bos_token": adds})
    assert tokenizer("hello").input_ids[:1] == ([1] if adds else tokenizer.convert_tokens_to_ids(["hello"]))
