"""The hand-off file: the K and V of a prompt, from the machine that prefills to the one that decodes.

    prefix      48 bytes: magic, schema (major, minor), length and SHA-256 of the header
    header      JSON, filled with spaces up to a multiple of 64 bytes
    frames      one for each block of 128 tokens: 64 bytes, then the block's K and then its V

Every array begins at a multiple of 64 bytes, so that a reader may map it; the file's size follows from its
header, so that one that is cut off, or has something behind its end, is noticed before anything is read. Each
frame has a SHA-256 over its own numbers and its arrays. docs/handoff.md is the specification.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from pdconvert.errors import InputError
from pdconvert.plain_files import replacing
from pdconvert.runtime.handoff import KeysValues
from pdconvert.runtime.layouts import pack, unpack
from pdconvert.runtime.manifest import Manifest
from pdconvert.runtime.pdkv_header import (
    ALIGNMENT,
    FRAME,
    MAGIC,
    MAX_HEADER_BYTES,
    PREFIX,
    SCHEMA,
    Header,
    seal,
)

MARK = b"KVBL"
"""Beginning of a frame."""


def encode(header: Header, kv: KeysValues | None) -> Iterator[bytes]:
    """The file's bytes, in pieces of at most one block.

    Args:
        header: what it is about.
        kv: the keys and values of `header.tokens` tokens, fp16; None for no tokens.

    Raises:
        ValueError: `kv` is not what the header says.
    """
    if (kv.tokens if kv else 0) != header.tokens or (kv and kv.form != header.key_form):
        raise ValueError("the keys and values are not those of the header")
    yield header.encode()
    if kv is None:
        return
    for index in range(header.blocks):
        start, tokens = header.block(index)
        body = b"".join(
            _array_bytes(header, [layer[:, :, start : start + tokens] for layer in part], tokens)
            for part in (kv.keys, kv.values)
        )
        yield seal(FRAME, (MARK, index, start, tokens, len(body)), body) + body


def write_pdkv(path: Path, header: Header, kv: KeysValues | None) -> int:
    """Write a hand-off file; it appears whole or not at all, and replaces an older hand-off file.

    Returns:
        Its size in bytes.

    Raises:
        InputError: something else is there, or the folder does not exist.
    """
    check_output(path)
    with replacing(path) as file:
        return sum(file.write(piece) for piece in encode(header, kv))


def check_output(path: Path) -> None:
    """Refuse a place for a hand-off file, before any work is done.

    Raises:
        InputError: something else than a hand-off file is there, or the folder does not exist.
    """
    if not path.parent.is_dir():
        raise InputError(f"{path.parent} is not a folder; make it, or choose another --out")
    if not os.path.lexists(path):
        return
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                return
    raise InputError(f"{path} exists and is no hand-off file; choose another --out")


class PdkvReader:
    """Reads a hand-off file front to back, a block at a time; a pipe will do.

    Attributes:
        header: its header.
    """

    def __init__(self, file: BinaryIO, name: str):
        """Read the header.

        Args:
            file: open for reading, at its beginning.
            name: of the file, for messages.

        Raises:
            InputError: no hand-off file, a newer one, or one that is cut off or damaged.
        """
        self._file, self._name = file, name
        prefix = file.read(PREFIX.size)
        if prefix[: len(MAGIC)] != MAGIC:
            raise InputError(
                f"{name}: magic is not that of a hand-off file; write one with `pdconvert prefill`"
            )
        if len(prefix) < PREFIX.size:
            raise self._cut_off("its prefix")
        _, major, minor, length, _ = PREFIX.unpack(prefix)
        if major != SCHEMA[0]:
            raise InputError(
                f"{name}: schema is {major}.{minor}, and this version reads {SCHEMA[0]}.{SCHEMA[1]}; "
                "use the pdconvert that wrote it, or prefill the prompt again"
            )
        if length > MAX_HEADER_BYTES or (PREFIX.size + length) % ALIGNMENT:
            raise InputError(
                f"{name}: header length is {length} bytes, which none has; prefill the prompt again"
            )
        text = file.read(length)
        if len(text) < length:
            raise self._cut_off("its header")
        if prefix != seal(PREFIX, (MAGIC, major, minor, length), text):
            raise InputError(f"{name}: header checksum does not match; prefill the prompt again")
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{name}: its header is not JSON ({error}); prefill the prompt again") from error
        self.header = Header.from_json(values, name, newer=(major, minor) > SCHEMA)
        self._check_size(len(prefix) + len(text))

    def blocks(self) -> Iterator[KeysValues]:
        """The blocks in order, each checked before it is given; to be called once.

        Raises:
            InputError: a block is damaged or cut off, or there is something behind the last one.
        """
        for index in range(self.header.blocks):
            yield self._block(index)
        if self._file.read(1):
            raise InputError(f"{self._name}: trailing bytes after its last block; prefill the prompt again")

    def _block(self, index: int) -> KeysValues:
        header, where = self.header, f"block {index}"
        start, tokens = header.block(index)
        size = header.array_bytes(tokens)
        frame, body = self._file.read(FRAME.size), self._file.read(2 * size)
        if len(frame) + len(body) < header.frame_bytes(tokens):
            raise self._cut_off(where)
        *numbers, _ = FRAME.unpack(frame)
        wanted = (MARK, index, start, tokens, 2 * size)
        for key, have, want in zip(
            ("mark", "index", "start", "tokens", "bytes"), numbers, wanted, strict=True
        ):
            if have != want:
                raise InputError(
                    f"{self._name}: {where} {key} is {have!r}, expected {want!r}; prefill the prompt again"
                )
        if frame != seal(FRAME, wanted, body):
            raise InputError(f"{self._name}: {where} checksum does not match; prefill the prompt again")
        shape = header.array_shape(tokens)
        arrays = (
            np.frombuffer(body, "<f2", int(np.prod(shape)), offset).reshape(shape) for offset in (0, size)
        )
        keys, values = (unpack(array, header.layout, header.layers) for array in arrays)
        return KeysValues(keys, values, header.key_form, start)

    def _check_size(self, begin: int) -> None:
        """Compare a regular file's size with what its header says."""
        try:
            status = os.fstat(self._file.fileno())
        except OSError:
            return  # a stream that is no file: its end shows
        if not stat.S_ISREG(status.st_mode):
            return
        size = begin + self.header.frames_bytes
        if status.st_size < size:
            raise self._cut_off(f"size {status.st_size} of {size} bytes")
        if status.st_size > size:
            raise InputError(
                f"{self._name}: trailing bytes: size is {status.st_size}, its header says {size}; "
                "prefill the prompt again"
            )

    def _cut_off(self, where: str) -> InputError:
        return InputError(f"{self._name} is truncated ({where}); copy it again, or prefill the prompt again")


def read_pdkv(
    path: Path, manifest: Manifest, prompt: Sequence[int] | None = None
) -> tuple[Header, KeysValues | None]:
    """Read a hand-off file for a build.

    Args:
        path: the file.
        manifest: of the build that decodes.
        prompt: the tokens that the file should be about, where they are known.

    Returns:
        The header, and the keys and values of its tokens; None where it has none (a prompt of one token).

    Raises:
        InputError: not a hand-off file, a damaged one, or one that the build cannot go on with.
    """
    with path.open("rb") as file:
        reader = PdkvReader(file, str(path))
        reader.header.check(manifest, str(path), prompt)
        return reader.header, joined(list(reader.blocks()))


def joined(blocks: Sequence[KeysValues]) -> KeysValues | None:
    """Consecutive blocks as one run of tokens; None for none."""
    if not blocks:
        return None
    keys, values = (
        tuple(np.concatenate(layers, 2) for layers in zip(*parts, strict=True))
        for parts in ([block.keys for block in blocks], [block.values for block in blocks])
    )
    return KeysValues(keys, values, blocks[0].form, blocks[0].start)


def _array_bytes(header: Header, native: Sequence[np.ndarray], tokens: int) -> bytes:
    packed = pack(native, header.layout)
    if packed.dtype != np.float16 or packed.shape != header.array_shape(tokens):
        raise ValueError(f"K or V is {packed.dtype} {packed.shape}, not fp16 {header.array_shape(tokens)}")
    return packed.astype("<f2", copy=False).tobytes().ljust(header.array_bytes(tokens), b"\0")
