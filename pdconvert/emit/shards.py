"""Safetensors files written as a stream: tensors go to disk as they come, nothing is kept.

Layout of a file (the safetensors format): the length of the header as a little-endian uint64, the
header as JSON, then the tensors without gaps. The header may end in spaces, so a fixed room is left
for it in front and filled in when the file is closed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

HEADER_ROOM_BYTES = 128 * 1024
"""Room for the header of one shard: about 900 tensors."""

SHARD_BYTES = 10**9
"""Size past which a tensor begins the next shard."""

INDEX = "model.safetensors.index.json"

DTYPES: dict[str, np.dtype] = {"F16": np.dtype("<f2"), "F32": np.dtype("<f4"), "U32": np.dtype("<u4")}


class ShardWriter:
    """Writes named tensors into `model*.safetensors` files of a folder, and their index.

    A new shard begins when the limit of bytes or the room for the header is reached, or when a tensor
    would lie at an offset that its element size does not divide. One shard is named
    `model.safetensors`, several `model-00001-of-00003.safetensors` and so on, the names of Hugging Face.

    Args:
        folder: an existing folder without `model*.safetensors` files.
        limit_bytes: a tensor that would take a shard past this size begins the next one.

    Attributes:
        total_bytes: bytes of the tensors written so far.
    """

    def __init__(self, folder: Path, limit_bytes: int = SHARD_BYTES):
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._shards: list[list[str]] = []
        self._names: set[str] = set()
        self._file: BinaryIO | None = None
        self._header: dict[str, dict] = {}
        self._header_bytes = 0
        self._offset = 0
        self.total_bytes = 0

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """On an error the partial files are removed; otherwise `close` was called by then."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if error is not None:
            for number in range(1, len(self._shards) + 1):
                self._partial(number).unlink(missing_ok=True)

    def add(self, name: str, dtype: str, shape: tuple[int, ...], chunks: Iterable[np.ndarray]) -> None:
        """Appends one tensor.

        Args:
            name: its name, not used before.
            dtype: a key of `DTYPES`.
            shape: its whole shape.
            chunks: its values in order, as arrays of that dtype whose sizes add up to the shape's.

        Raises:
            ValueError: a name given twice, or values of another dtype or number.
        """
        if name in self._names:
            raise ValueError(f"tensor {name} was already written")
        kind = DTYPES[dtype]
        size_bytes = kind.itemsize * int(np.prod(shape, dtype=np.int64))
        file = self._shard_for(name, size_bytes, kind.itemsize)
        begin = self._offset
        for chunk in chunks:
            if chunk.dtype != kind:
                raise ValueError(f"tensor {name}: chunk of {chunk.dtype}, expected {kind}")
            file.write(np.ascontiguousarray(chunk).data)
            self._offset += chunk.nbytes
        if self._offset - begin != size_bytes:
            raise ValueError(
                f"tensor {name}: {self._offset - begin} bytes for shape {shape}, expected {size_bytes}"
            )
        entry = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, self._offset]}
        self._header[name] = entry
        self._header_bytes += _entry_bytes(name, entry)
        self._names.add(name)
        self._shards[-1].append(name)
        self.total_bytes += size_bytes

    def close(self, metadata: dict[str, int] | None = None) -> tuple[str, ...]:
        """Completes the files and writes `model.safetensors.index.json`.

        Args:
            metadata: figures to put beside `total_size` in the index.

        Returns:
            The names of the files written.
        """
        self._end_shard()
        names = _shard_names(len(self._shards))
        for number, name in enumerate(names, 1):
            os.replace(self._partial(number), self.folder / name)
        text = index_text(self._shards, {"total_size": self.total_bytes, **(metadata or {})})
        (self.folder / INDEX).write_text(text, "utf-8")
        return (*names, INDEX)

    def _partial(self, number: int) -> Path:
        return self.folder / f".shard-{number:05d}.partial"

    def _shard_for(self, name: str, size_bytes: int, item_bytes: int) -> BinaryIO:
        """The open file, a new one where the tensor does not fit the current one."""
        full = is_full(self._offset, self._header_bytes, name, size_bytes, item_bytes, self.limit_bytes)
        if self._file is None or full:
            self._end_shard()
            self._shards.append([])
            self._file = self._partial(len(self._shards)).open("wb")
            self._file.write(bytes(8 + HEADER_ROOM_BYTES))
        return self._file

    def _end_shard(self) -> None:
        if self._file is None:
            return
        header = {"__metadata__": {"format": "mlx"}, **self._header}
        text = json.dumps(header, separators=(",", ":")).encode().ljust(HEADER_ROOM_BYTES)
        self._file.seek(0)
        self._file.write(HEADER_ROOM_BYTES.to_bytes(8, "little"))
        self._file.write(text)
        self._file.close()
        self._file, self._header, self._header_bytes, self._offset = None, {}, 0, 0


def is_full(
    offset: int, header_bytes: int, name: str, size_bytes: int, item_bytes: int, limit_bytes: int
) -> bool:
    """Whether a shard with `offset` bytes of data and `header_bytes` of header cannot take a tensor."""
    widest = {"dtype": "F16", "shape": [2**40] * 4, "data_offsets": [2**60, 2**60]}
    header_full = header_bytes + _entry_bytes(name, widest) > HEADER_ROOM_BYTES - 1024
    return header_full or (offset > 0 and offset + size_bytes > limit_bytes) or offset % item_bytes > 0


def plan_shards(entries: Iterable[tuple[str, str, tuple[int, ...]]]) -> list[tuple[list[str], int]]:
    """Names in each shard and its bytes, as `ShardWriter` would write (name, dtype, shape) entries."""
    shards: list[tuple[list[str], int]] = []
    offset = header_bytes = 0
    for name, dtype, shape in entries:
        size_bytes = DTYPES[dtype].itemsize * math.prod(shape)
        full = is_full(offset, header_bytes, name, size_bytes, DTYPES[dtype].itemsize, SHARD_BYTES)
        if not shards or full:
            shards.append(([], 8 + HEADER_ROOM_BYTES))
            offset = header_bytes = 0
        entry = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size_bytes]}
        header_bytes += _entry_bytes(name, entry)
        offset += size_bytes
        names, total = shards[-1]
        shards[-1] = ([*names, name], total + size_bytes)
    return shards


def index_text(shards: Sequence[Sequence[str]], metadata: Mapping[str, int]) -> str:
    """Content of the index of shards that hold tensors of these names."""
    names = _shard_names(len(shards))
    where = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
    return json.dumps({"metadata": dict(metadata), "weight_map": where}, indent=2, sort_keys=True) + "\n"


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _entry_bytes(name: str, entry: dict) -> int:
    """Bytes that a tensor takes in the header."""
    return len(json.dumps({name: entry}, separators=(",", ":")))
