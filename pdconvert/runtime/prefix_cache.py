"""Prefilled blocks that are kept: a prompt that begins as an earlier one did is not prefilled again from its start.

A prompt goes through the package in calls (`chunks.plan_chunks`); a *block* is what one call gave, K and V of its
tokens as the graph wrote them, and its key is a link of a hash chain:

    key of call 0 = SHA-256(seed, function, token ids)
    key of call i = SHA-256(key of call i − 1, function, token ids)

The rule of reuse follows: a block is found only by a prompt whose own plan makes the same calls, with the same
functions on the same tokens, up to and with this one. What it finds is therefore, bit for bit, what its own cold run
would compute, whichever function a chunk goes through: if a prompt's last chunk takes another function than the same
tokens take in a longer prompt, these are two blocks. Full chunks are shared by all prompts that begin alike; a last,
padded one serves a prompt that is the same to its end, which then needs no call at all.

The seed is all else that decides those bits: model, RoPE, form of K, the program in the package, and what runs it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import platform
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Protocol

import numpy as np

from pdconvert.errors import InputError
from pdconvert.runtime.manifest import Manifest
from pdconvert.runtime.pdkv_header import model_fields

DEFAULT_DISK_BYTES = 4 * 10**9
MAGIC = b"PDKVBLK1"
BLOCK_NAME = re.compile(r"[0-9a-f]{64}\.block")
WORK_NAME = re.compile(r"\.[0-9a-f]{64}\.[0-9]+-[0-9a-f]{8}\.tmp")
DIGEST_BYTES = 32
STALE_NS = 24 * 3600 * 10**9

log = logging.getLogger(__name__)


class BlockStore(Protocol):
    """Where blocks are kept: bytes by key, the least recently used ones dropped first."""

    def get(self, key: str) -> bytes | None:
        """The bytes of a block, now the most recently used one; None where it is not kept."""

    def put(self, key: str, data: bytes) -> None:
        """Keep a block, unless it alone exceeds the limit."""

    def touch(self, key: str) -> None:
        """Make a block the most recently used one, if it is kept."""


@dataclass
class PrefixCache:
    """Blocks by the history of their prompt.

    Attributes:
        seed: from `cache_seed`.
        stores: where to look, fastest first; a block found in a later one is put into those before it.
        hits, misses: blocks that were found, and that were not, so far.
    """

    seed: str
    stores: Sequence[BlockStore]
    hits: int = 0
    misses: int = 0

    def keys(self, calls: Iterable[tuple[str, Sequence[int]]]) -> list[str]:
        """The key of each call of a prompt.

        Args:
            calls: name of the function and token ids of each call, from the prompt's first token on.
        """
        keys, link = [], hashlib.sha256(self.seed.encode()).digest()
        for function, ids in calls:
            name, tokens = function.encode(), np.asarray(ids, "<i4").tobytes()
            lengths = np.asarray((len(name), len(tokens)), "<i8").tobytes()
            link = hashlib.sha256(link + lengths + name + tokens).digest()
            keys.append(link.hex())
        return keys

    def get(self, key: str, shape: tuple[int, ...]) -> np.ndarray | None:
        """A block's values, fp16 and read-only, or None where it is not kept."""
        for index, store in enumerate(self.stores):
            data = store.get(key)
            if data is not None and len(data) == 2 * int(np.prod(shape)):
                for faster in self.stores[:index]:
                    faster.put(key, data)
                self.hits += 1
                return np.frombuffer(data, "<f2").reshape(shape)
        self.misses += 1
        return None

    def put(self, key: str, block: np.ndarray) -> None:
        """Keep a copy of a block's fp16 values."""
        data = block.astype("<f2", casting="no", copy=False).tobytes()
        for store in self.stores:
            store.put(key, data)

    def touch(self, keys: Sequence[str]) -> None:
        """Mark a prompt's blocks as used, its first one last: what many prompts share shall go last."""
        for key in reversed(keys):
            for store in self.stores:
                store.touch(key)


class MemoryStore:
    """Blocks in this process's memory; threads may share it.

    Args:
        limit_bytes: what the blocks may take together.
    """

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self._blocks: OrderedDict[str, bytes] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes | None:
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
            return self._blocks.get(key)

    def put(self, key: str, data: bytes) -> None:
        if len(data) > self.limit_bytes:
            return
        with self._lock:
            self._size += len(data) - len(self._blocks.pop(key, b""))
            self._blocks[key] = data
            while self._size > self.limit_bytes:
                self._size -= len(self._blocks.popitem(last=False)[1])

    def touch(self, key: str) -> None:
        self.get(key)

    def size_bytes(self) -> int:
        """What the blocks take together."""
        return self._size


class DiskStore:
    """Blocks in a folder, one file each; any number of processes may share it.

    A file appears by a rename, whole, and goes by an unlink, which leaves it to whoever has it open. It begins with a
    checksum over its key and its bytes; one that does not match is dropped and counts as not kept. Evicting is done
    under a lock. Nothing but files of this class is ever touched. The folder belongs to its user alone, because
    blocks tell what the prompts were.

    Args:
        folder: made if it does not exist.
        limit_bytes: what the files may take together.

    Raises:
        InputError: the folder cannot be made.
    """

    def __init__(self, folder: Path, limit_bytes: int = DEFAULT_DISK_BYTES):
        self.folder = folder
        self.limit_bytes = limit_bytes
        with self._explained():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def get(self, key: str) -> bytes | None:
        path = self._path(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        begin = len(MAGIC) + DIGEST_BYTES
        if content[:begin] != _prefix(key, content[begin:]):
            log.info("%s is damaged and is dropped", path)
            path.unlink(missing_ok=True)
            return None
        self.touch(key)
        return content[begin:]

    def put(self, key: str, data: bytes) -> None:
        content = _prefix(key, data) + data
        if len(content) > self.limit_bytes:
            return
        work = self.folder / f".{key}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        with self._explained():
            try:
                work.write_bytes(content)
                _use_now(work)
                work.replace(self._path(key))
            finally:
                work.unlink(missing_ok=True)
            self._evict()

    def touch(self, key: str) -> None:
        with suppress(FileNotFoundError):
            _use_now(self._path(key))

    def size_bytes(self) -> int:
        """What the files take together."""
        return sum(size for _, _, size in self._files(BLOCK_NAME))

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.block"

    def _files(self, name: re.Pattern[str]) -> Iterator[tuple[int, str, int]]:
        """(time of last use in ns, path, bytes) of files of this class; one that vanishes meanwhile is left out."""
        with os.scandir(self.folder) as found:
            for entry in found:
                if name.fullmatch(entry.name):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield status.st_mtime_ns, entry.path, status.st_size

    def _evict(self) -> None:
        """Unlink the least recently used files until the rest is within the limit, and what killed processes left."""
        with _locked(self.folder / "lock"):
            entries = sorted(self._files(BLOCK_NAME))
            excess = sum(size for _, _, size in entries) - self.limit_bytes
            for _, path, size in entries:
                if excess <= 0:
                    break
                Path(path).unlink(missing_ok=True)
                excess -= size
            for used, path, _ in self._files(WORK_NAME):
                if used < time.time_ns() - STALE_NS:
                    Path(path).unlink(missing_ok=True)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"the prefix cache {self.folder} cannot be written ({error.strerror}); "
                "choose another --prefix-cache, or leave it out"
            ) from error


def cache_seed(manifest: Manifest, kind: str, mode: str, compute_units: str) -> str:
    """What decides the bits of a block besides its prompt, as a hash.

    Args:
        manifest: of the build.
        kind: of the executor.
        mode: arithmetic of the `mil` executor.
        compute_units: of the `coreml` executor.
    """
    program = hashlib.sha256()
    for path in sorted(path for package, _, _ in manifest.packages for path in package.rglob("*.mlmodel")):
        program.update(path.read_bytes())
    content = {
        "build": model_fields(manifest),
        "embedding_scale": manifest.embedding_scale,
        "program": program.hexdigest(),
        "executor": [kind, *_platform(kind, mode, compute_units)],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _platform(kind: str, mode: str, compute_units: str) -> list[object]:
    """What runs the package: another CPU, thread count or version may round a sum differently."""
    if kind == "coreml":
        return [compute_units, platform.machine(), platform.mac_ver()[0], metadata.version("coremltools")]
    import torch

    from pdconvert.compile import code_hash

    capability = torch.backends.cpu.get_cpu_capability()
    return [mode, platform.machine(), capability, torch.get_num_threads(), torch.__version__, code_hash()]


def _prefix(key: str, data: bytes) -> bytes:
    """Magic and checksum of a file."""
    total = hashlib.sha256(key.encode())
    total.update(data)
    return MAGIC + total.digest()


def _use_now(path: Path) -> None:
    """Set a file's time by the fine clock; the system's own stamps are milliseconds apart."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
