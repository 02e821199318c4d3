"""A file that is distributed in consecutive pieces, read as one without being joined on disk."""

from __future__ import annotations

import hashlib
import io
import shutil
import tempfile
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, cast

from pdconvert.sources.files import check_content, sha256_file

_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class Pieces:
    """A file in one piece or more.

    Attributes:
        paths: of the pieces, in order.
        name: of the whole file.
    """

    paths: tuple[Path, ...]
    name: str

    def __str__(self) -> str:
        return str(self.paths[0]) if len(self.paths) == 1 else f"{self.paths[0]} and what follows it"

    @property
    def size(self) -> int:
        """Bytes of the whole."""
        return sum(path.stat().st_size for path in self.paths)

    def check(self) -> None:
        """Refuse a piece that is missing, empty or a git-lfs pointer.

        Raises:
            InputError: naming it.
        """
        for path in self.paths:
            check_content(path)

    def open(self) -> BinaryIO:
        """The whole, open for reading."""
        if len(self.paths) == 1:
            return self.paths[0].open("rb")
        return cast(BinaryIO, io.BufferedReader(_Chain(self.paths)))

    def sha256(self) -> str:
        """Hash of the whole."""
        if len(self.paths) == 1:
            return sha256_file(self.paths[0])
        with self.open() as file:
            return hashlib.file_digest(cast(io.BufferedReader, file), "sha256").hexdigest()

    @contextmanager
    def joined(self) -> Iterator[Path]:
        """The whole as one file, for programs that want one: a temporary copy where it is in pieces."""
        if len(self.paths) == 1:
            yield self.paths[0]
            return
        with tempfile.TemporaryDirectory(prefix="pdconvert-") as folder:
            whole = Path(folder) / self.name
            with self.open() as source, whole.open("wb") as target:
                shutil.copyfileobj(source, target, _COPY_BYTES)
            yield whole


class _Chain(io.RawIOBase):
    """Files one behind the other, each opened when reading comes to it."""

    def __init__(self, paths: tuple[Path, ...]) -> None:
        self._paths = paths
        self._starts = [0, *accumulate(path.stat().st_size for path in paths)]
        self._position = 0
        self._open: tuple[int, BinaryIO] | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._starts[-1]}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self._position >= self._starts[-1]:
            return 0
        index = bisect_right(self._starts, self._position) - 1
        file = self._piece(index)
        file.seek(self._position - self._starts[index])
        data = file.read(min(len(buffer), self._starts[index + 1] - self._position))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _piece(self, index: int) -> BinaryIO:
        if self._open is None or self._open[0] != index:
            self._close_piece()
            self._open = index, self._paths[index].open("rb", buffering=0)
        return self._open[1]

    def _close_piece(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def close(self) -> None:
        self._close_piece()
        super().close()
