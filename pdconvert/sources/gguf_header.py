"""The header of a GGUF file: metadata and the table of tensors, without tensor data.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): `GGUF`, version, counts, key-value
pairs, tensor entries, padding, data. The reader of the `gguf` package makes an array object of every
token and takes seconds; this one reads a vocabulary of 50,000 in about a tenth of one.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, BinaryIO

from pdconvert.errors import InputError
from pdconvert.sources.pieces import Pieces

_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF value type -> struct code; 8 is a string, 9 an array."""
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the tensor table.

    Attributes:
        shape: in the order of torch, rows first.
        type_name: the ggml type, such as `Q4_1`.
        offset: of its first byte, from the start of the file.
        row_bytes: of one row (the last dimension).
    """

    shape: tuple[int, ...]
    type_name: str
    offset: int
    row_bytes: int

    @property
    def rows(self) -> int:
        """Rows, all dimensions but the last together."""
        return math.prod(self.shape[:-1])


@dataclass(frozen=True)
class GgufHeader:
    """Metadata by key, and tensors by their GGUF name."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """Reads little-endian values one after another.

    Args:
        file: open for reading.
        path: to name in errors.
        size: of the file, bytes.
    """

    def __init__(self, file: BinaryIO, path: Pieces, size: int) -> None:
        self._file = file
        self._path = path
        self._size = size

    def position(self) -> int:
        return self._file.tell()

    def take(self, count: int) -> bytes:
        if count > self._size:
            raise InputError(f"{self._path}: damaged: its header asks for {count} bytes of {self._size}")
        data = self._file.read(count)
        if len(data) != count:
            raise InputError(f"{self._path}: truncated inside its header; download it again")
        return data

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        raw = self.take(self.number("Q"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{self._path}: damaged: a string of its header is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise InputError(f"{self._path}: damaged: its header has a value of unknown type {kind}")
        element, count = self.number("I"), self.number("Q")
        if element == _ARRAY:
            raise InputError(f"{self._path}: its header has an array of arrays, which is not supported")
        if element in _SCALARS:
            width = struct.calcsize(f"<{_SCALARS[element]}")
            return list(struct.unpack(f"<{count}{_SCALARS[element]}", self.take(count * width)))
        if count > self._size:
            raise InputError(f"{self._path}: damaged: its header has an array of {count} values")
        return [self.value(element) for _ in range(count)]


def read_header(path: Pieces) -> GgufHeader:
    """Read the header of a GGUF file and check it against the file's size.

    Raises:
        InputError: the file is missing, empty, not GGUF, of another version or byte order, truncated,
            one part of several, or holds a type that the `gguf` package does not know.
    """
    path.check()
    size = path.size
    with path.open() as file:
        cursor = _Cursor(file, path, size)
        tensor_count, pair_count = _read_counts(cursor, path, size)
        metadata = dict(_pairs(cursor, pair_count))
        parts = metadata.get("split.count", 0)
        if parts not in (0, 1):
            raise InputError(f"{path}: one part of {parts}; join them with `llama-gguf-split --merge`")
        entries = [_read_entry(cursor, path) for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise InputError(f"{path}: damaged: general.alignment is {alignment!r}")
        data_start = -(-cursor.position() // alignment) * alignment
    tensors = {
        name: _placed(path, size, name, shape, kind, data_start + at) for name, shape, kind, at in entries
    }
    return GgufHeader(metadata, tensors)


def read_architecture(path: Pieces) -> dict[str, Any]:
    """The metadata before the tokenizer's: what it is, and its sizes. Takes milliseconds, whatever the vocabulary.

    Raises:
        InputError: as of `read_header`, as far as is read.
    """
    path.check()
    with path.open() as file:
        cursor = _Cursor(file, path, path.size)
        _, count = _read_counts(cursor, path, path.size)
        return dict(takewhile(lambda pair: not pair[0].startswith("tokenizer."), _pairs(cursor, count)))


def _read_counts(cursor: _Cursor, path: Pieces, size: int) -> tuple[int, int]:
    """How many tensors and how many key-value pairs the file says that it has."""
    if size < 24 or cursor.take(4) != b"GGUF":
        raise InputError(f"{path}: not a GGUF file (it does not start with GGUF)")
    version = cursor.number("I")
    if version not in _VERSIONS:
        order = " in big-endian order" if version in (v << 24 for v in _VERSIONS) else ""
        raise InputError(f"{path}: GGUF version {version}{order}; expected 2 or 3, little-endian")
    return cursor.number("Q"), cursor.number("Q")


def _pairs(cursor: _Cursor, count: int) -> Iterator[tuple[str, Any]]:
    """Key-value pairs, each read when it is asked for."""
    for _ in range(count):
        key = cursor.string()
        yield key, cursor.value(cursor.number("I"))


def _read_entry(cursor: _Cursor, path: Pieces) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape in the order of torch, type number, offset in the data)."""
    name = cursor.string()
    dimensions = cursor.number("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise InputError(f"{path}: damaged: {name} has {dimensions} dimensions")
    shape = tuple(reversed([cursor.number("Q") for _ in range(dimensions)]))
    return name, shape, cursor.number("I"), cursor.number("Q")


def _placed(path: Pieces, size: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    """A tensor entry with its type's name and row size."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        ggml_type = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[ggml_type]
    except (ValueError, KeyError) as error:
        raise InputError(
            f"{path}: {name} has the unknown ggml type {kind}; a newer gguf package may know it"
        ) from error
    if shape[-1] % block:
        raise InputError(f"{path}: damaged: {name} has rows of {shape[-1]} values in blocks of {block}")
    tensor = GgufTensor(shape, ggml_type.name, offset, shape[-1] // block * block_bytes)
    end = offset + tensor.rows * tensor.row_bytes
    if end > size:
        raise InputError(f"{path}: truncated: {size} bytes, but {name} ends at {end}; download it again")
    return tensor
