"""Reading small files with an error per cause, hashing large ones, copying what travels along."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pdconvert.errors import InputError

_LFS_PREFIX = b"version https://git-lfs"
_HASH_CHUNK_BYTES = 1 << 20

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that make up a tokenizer, copied byte for byte."""

_LICENSE_STEMS = ("license", "licence", "notice", "copying", "use_policy")


class MissingFile(InputError):
    """A part of a checkpoint is absent, as after an interrupted download."""


def check_content(path: Path) -> None:
    """Refuse a file that cannot hold what its name promises.

    Raises:
        MissingFile: there is no such file.
        InputError: it is empty, or a git-lfs pointer.
    """
    if not path.exists():
        broken = " (a link to a file that is gone)" if path.is_symlink() else ""
        raise MissingFile(f"{path}: no such file{broken}")
    if not path.is_file():
        raise InputError(f"{path}: not a file")
    if path.stat().st_size == 0:
        raise InputError(f"{path}: the file is empty (0 bytes); download it again")
    with path.open("rb") as file:
        if file.read(len(_LFS_PREFIX)) == _LFS_PREFIX:
            raise InputError(
                f"{path}: a git-lfs pointer, not the file itself; run `git lfs pull` in its folder"
            )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        InputError: the file is missing, empty, a git-lfs pointer, not JSON, not an object, or nested deeper
            than any file of a checkpoint is.
    """
    check_content(path)
    try:
        data = json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: not JSON: {error.msg} in line {error.lineno}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not JSON: not text in UTF-8 (byte {error.start})") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise InputError(f"{path}: damaged: {error}; download it again") from error
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def sha256_file(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def license_files(folder: Path) -> list[Path]:
    """The licence files directly in a folder, sorted by name."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and path.suffix != ".py" and path.name.lower().startswith(_LICENSE_STEMS)
    )


def license_tag(readme: Path) -> str | None:
    """The licence that a model card names in its YAML header; None where there is none."""
    if not readme.is_file():
        return None
    lines = readme.read_text(encoding="utf-8", errors="replace").splitlines()
    if not lines or lines[0].strip() != "---":
        return None
    for line in lines[1:]:
        if line.strip() == "---":
            return None
        key, colon, value = line.partition(":")
        if colon and key == "license":
            return value.strip().strip("\"'") or None
    return None


def copy_files(paths: Iterable[Path], folder: Path) -> None:
    """Copy contents, not permissions, so that a read-only source gives writable copies."""
    for path in paths:
        shutil.copyfile(path, folder / path.name)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write a JSON object the same way every time."""
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
