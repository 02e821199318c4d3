"""Safetensors files written as a stream: tensors go to disk as they come, nothing is kept.

Layout of a file (the safetensors format): the length of the header as a little-endian uint64, the
header as JSON, then the tensors without gaps. The header may end in spaces, so a fixed room is left
for it in front and filled in when the file is closed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

HEADER_ROOM_BYTES = 128 * 1024
"""Room for the header of one shard: about 900 tensors."""

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

    def __init__(self, folder: Path, limit_bytes: int = 10**9):
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
        count = len(self._shards)
        names = [
            "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            for number in range(1, count + 1)
        ]
        for number, name in enumerate(names, 1):
            os.replace(self._partial(number), self.folder / name)
        index = {
            "metadata": {"total_size": self.total_bytes, **(metadata or {})},
            "weight_map": {
                tensor: name for name, tensors in zip(names, self._shards, strict=True) for tensor in tensors
            },
        }
        index_name = "model.safetensors.index.json"
        (self.folder / index_name).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")
        return (*names, index_name)

    def _partial(self, number: int) -> Path:
        return self.folder / f".shard-{number:05d}.partial"

    def _shard_for(self, name: str, size_bytes: int, item_bytes: int) -> BinaryIO:
        """The open file, a new one where the tensor does not fit the current one."""
        widest = {"dtype": "F16", "shape": [2**40] * 4, "data_offsets": [2**60, 2**60]}
        header_full = self._header_bytes + _entry_bytes(name, widest) > HEADER_ROOM_BYTES - 1024
        data_full = self._offset > 0 and self._offset + size_bytes > self.limit_bytes
        if self._file is None or header_full or data_full or self._offset % item_bytes:
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


def _entry_bytes(name: str, entry: dict) -> int:
    """Bytes that a tensor takes in the header."""
    return len(json.dumps({name: entry}, separators=(",", ":")))
