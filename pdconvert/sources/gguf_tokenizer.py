"""The tokenizer inside a GGUF file, written as stock Hugging Face files through transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pdconvert.errors import InputError
from pdconvert.sources.files import read_json, write_json
from pdconvert.sources.tokenizer import unreadable_tokenizer

_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
"""`tokenizer.ggml.pre` values that put every digit apart before GPT-2's pattern; transformers does not."""

_AS_TRANSFORMERS = frozenset(
    {
        "default",
        "gpt-2",
        "olmo",
        "mpt",
        "llama3",
        "llama-v3",
        "llama-bpe",
        "falcon3",
        "tekken",
        "qwen2",
        "smaug-bpe",
    }
    | {"deepseek-r1-qwen", "gpt-4o", "llama4"}
)
"""`tokenizer.ggml.pre` values that transformers splits as llama.cpp does."""

_SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token")
_LOCAL_KEYS = ("is_local", "local_files_only", "backend", "name_or_path")


def check_tokenizer(label: str, metadata: Mapping[str, Any]) -> None:
    """Refuse a tokenizer whose text splitting is not known to be reproduced.

    Raises:
        InputError: `tokenizer.ggml.model` or `tokenizer.ggml.pre` is not supported.
    """
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if model not in ("gpt2", "llama"):
        raise InputError(f"{label}: tokenizer.ggml.model {model!r} is not supported (gpt2, llama)")
    if model == "gpt2" and pre not in _SINGLE_DIGITS | _AS_TRANSFORMERS:
        raise InputError(
            f"{label}: tokenizer.ggml.pre {pre!r} is not supported; take the Hugging Face form of the model"
        )


def save_tokenizer(path: Path, metadata: Mapping[str, Any], folder: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and the chat template.

    Args:
        path: the GGUF file.
        metadata: of the file.
        folder: an existing folder.

    Raises:
        InputError: tokens, merges and special tokens of the file do not fit together.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        with _quiet():
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name)
    except Exception as error:  # noqa: BLE001  whatever a file makes a third party raise: `tokenizers` has no class
        raise unreadable_tokenizer(str(path), error) from error
    tokenizer.save_pretrained(str(folder))
    tokens = metadata["tokenizer.ggml.tokens"]
    splits_digits = (
        metadata["tokenizer.ggml.model"] == "gpt2" and metadata.get("tokenizer.ggml.pre") in _SINGLE_DIGITS
    )
    _correct_tokenizer(folder / "tokenizer.json", len(tokens), splits_digits)
    _correct_config(folder / "tokenizer_config.json", set(tokens))


def _correct_tokenizer(path: Path, size: int, splits_digits: bool) -> None:
    """Take out tokens that transformers adds above the file's own; put digits apart where the model does."""
    data = read_json(path)
    data["added_tokens"] = [token for token in data["added_tokens"] if token["id"] < size]
    if splits_digits:
        data["pre_tokenizer"] = {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            ],
        }
    path.write_text(json.dumps(data, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _correct_config(path: Path, tokens: set[str]) -> None:
    """Take out paths of this machine and special tokens that the file does not have."""
    config = {
        key: value
        for key, value in read_json(path).items()
        if key not in _LOCAL_KEYS and (key not in _SPECIAL_KEYS or value in tokens)
    }
    write_json(path, {**config, "tokenizer_class": "PreTrainedTokenizerFast"})


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' remarks about a GGUF file for a while."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
