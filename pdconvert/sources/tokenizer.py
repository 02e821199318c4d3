"""Tokenizers as files: the highest id of one, and a byte-level one for random weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pdconvert.errors import InputError
from pdconvert.sources.files import read_json, write_json


def highest_id(folder: Path) -> int:
    """The highest token id of a tokenizer, tokens that its config adds included.

    Args:
        folder: with `tokenizer.json`, or with the files of an older tokenizer.

    Raises:
        InputError: a file cannot be read, or transformers does not know the tokenizer without remote code.
    """
    path = folder / "tokenizer.json"
    ids = _fast_ids(path) if path.exists() else _slow_ids(folder)
    return max([*ids, *_added_ids(folder)], default=-1)


def _fast_ids(path: Path) -> list[int]:
    """The ids in a `tokenizer.json`: its model's vocabulary and its added tokens."""
    data = read_json(path)
    model = data.get("model")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocab, Mapping):
        ids = list(vocab.values())
    elif isinstance(vocab, list):  # unigram: (token, score) pairs in the order of their ids
        ids = list(range(len(vocab)))
    else:
        raise InputError(f"{path}: not a tokenizer file: no model.vocab")
    added = data.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, Mapping) for token in added):
        raise InputError(f"{path}: not a tokenizer file: added_tokens is not a list of tokens")
    ids += [token.get("id") for token in added]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise InputError(f"{path}: not a tokenizer file: a token's id is not a whole number")
    return ids


def _slow_ids(folder: Path) -> Iterable[int]:
    """The ids of a tokenizer that only transformers can read, such as `tokenizer.model`."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # noqa: BLE001  whatever a file makes a third party raise: `tokenizers` has no class
        raise unreadable_tokenizer(str(folder), error) from error
    return tokenizer.get_vocab().values()


def unreadable_tokenizer(label: str, error: Exception) -> InputError:
    """The error of a tokenizer whose files the libraries that read them do not understand.

    Args:
        label: names the source.
        error: what `tokenizers` or `transformers` raised.
    """
    reason = " ".join(str(error).split())[:200]
    return InputError(
        f"{label}: its tokenizer cannot be loaded: {type(error).__name__}: {reason}; download its files again, "
        "or give a tokenizer.json that the tokenizers library reads"
    )


def _added_ids(folder: Path) -> list[int]:
    """Ids that `tokenizer_config.json` and `added_tokens.json` give to added tokens."""
    ids: list[int] = []
    config = folder / "tokenizer_config.json"
    if config.exists():
        decoder = read_json(config).get("added_tokens_decoder")
        ids += [int(key) for key in decoder if key.isdecimal()] if isinstance(decoder, Mapping) else []
    added = folder / "added_tokens.json"
    if added.exists():
        ids += [value for value in read_json(added).values() if type(value) is int]
    return ids


def byte_alphabet() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte, by byte value.

    Printable bytes stand for themselves; the others take the characters from U+0100 on, in order
    (the convention of GPT-2's vocabulary).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


BYTES_AND_SPECIALS = 258
"""The least vocabulary of `write_byte_tokenizer`."""


def write_byte_tokenizer(folder: Path, size: int, bos: int, eos: int) -> None:
    """Write a tokenizer of single bytes as stock `tokenizer.json` and `tokenizer_config.json`.

    `<s>` and `</s>` have the given ids and the bytes fill the lowest others. Ids above those decode to
    their own number, so that whatever random weights produce can be shown.

    Args:
        folder: an existing folder.
        size: of the vocabulary, at least `BYTES_AND_SPECIALS`.
        bos: id of `<s>`.
        eos: id of `</s>`, another one.
    """
    plain = [i for i in range(size) if i not in (bos, eos)]
    alphabet = byte_alphabet()
    space = alphabet[ord(" ")]
    vocab = dict(zip(alphabet, plain, strict=False))
    vocab |= {f"{space}{i}": i for i in plain[256:]}
    vocab |= {"<s>": bos, "</s>": eos}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(
            ({"id": i, "content": token, **special} for token, i in (("<s>", bos), ("</s>", eos))),
            key=lambda token: token["id"],
        ),
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": dict(sorted(vocab.items(), key=lambda item: item[1])),
            "merges": [],
        },
    }
    write_json(folder / "tokenizer.json", tokenizer)
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"},
    )
