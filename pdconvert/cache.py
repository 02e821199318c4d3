"""Work that is reused between builds: a directory of entries by content hash, with a size limit.

    <cache>/entries/<first two letters>/<key>/      entry.json and the files it lists
    <cache>/tmp/                                    entries that are being written or removed
    <cache>/lock                                    held while an entry appears or goes

An entry appears by a rename, so it is there whole or not at all. Its `entry.json` holds the size and
SHA-256 of every file; an entry that does not match is dropped. Whoever uses an entry holds a shared
lock on its `entry.json`, and eviction leaves locked entries alone, so any number of processes may
share one cache.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from pdconvert.errors import InputError, PdconvertError
from pdconvert.process import is_plain_text, write_refusal

DEFAULT_LIMIT_BYTES = 20 * 10**9
SCHEMA = 1
STALE_SECONDS = 24 * 3600
KEY = re.compile(r"[0-9a-z][0-9a-z._-]{2,127}")
INSTEAD = "set PDCONVERT_CACHE to another folder, or use --no-cache"
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def content_key(*inputs: object) -> str:
    """The key of work that depends on these inputs: plain data, or values whose `str` says all of them."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()


class Cache:
    """A directory of entries, least recently used first out.

    Use it as a context manager: entries that were got or put stay until it is closed.

    Args:
        folder: where the entries lie; made when the first entry is written.
        limit_bytes: what the entries that nobody uses may take together.
        temporary: whether it lies in a folder of the caller's, who then reports what the system refuses.
    """

    def __init__(
        self, folder: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES, *, temporary: bool = False
    ) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._temporary = temporary
        self._held: dict[str, int] = {}

    def __enter__(self) -> "Cache":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def get(self, key: str) -> Path | None:
        """Find an entry and check its files.

        Args:
            key: a content hash: 3 to 128 characters of a-z, 0-9, `.`, `_`, `-`.

        Returns:
            The entry's folder, to read from until the cache is closed; None where there is no entry.
            A damaged entry is removed and counts as none.
        """
        path = self._path(key)
        if key not in self._held:
            try:
                descriptor = _open_shared(path / "entry.json")
            except (FileNotFoundError, NotADirectoryError):
                self._drop_damaged(path)
                return None
            if not _intact(path):
                os.close(descriptor)
                self._drop_damaged(path)
                return None
            self._held[key] = descriptor
        if os.access(path / "entry.json", os.W_OK):  # a cache that others wrote may be there to be read only
            os.utime(path / "entry.json")
        return path

    def put(self, key: str, writer: Callable[[Path], None]) -> Path:
        """Write an entry, unless another process was faster.

        Args:
            key: as for `get`.
            writer: writes the entry's files into the empty folder it is given.

        Returns:
            The entry's folder, as `get` gives it.

        Raises:
            InputError: the cache directory cannot be written.
        """
        path = self._path(key)
        if (found := self.get(key)) is not None:
            return found
        with self._scratch() as work:
            try:
                writer(work)
                record = {"schema": SCHEMA, "files": _describe(work)}
                (work / "entry.json").write_text(json.dumps(record), encoding="utf-8")
            except PdconvertError:
                raise
            except Exception as error:
                refusal = None if self._temporary else write_refusal(error, self.folder)
                if refusal:
                    raise InputError(f"{refusal}, {INSTEAD}") from error
                raise
            # Locked before it can be seen, so that no other process evicts it in between.
            descriptor = _open_shared(work / "entry.json")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise _unwritable(self.folder, error) from error
            while self.get(key) is None:
                try:
                    with _exclusive(self.folder / "lock"):
                        work.rename(path)
                except OSError as error:
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                        os.close(descriptor)
                        raise
                else:
                    self._held[key] = descriptor
                    break
            else:
                os.close(descriptor)
        self.evict()
        return path

    def size_bytes(self) -> int:
        """The size of all entries together."""
        return sum(size for _, size, _ in self._entries())

    def evict(self) -> None:
        """Remove the least recently used entries until the rest is within the limit."""
        if not self.folder.is_dir() or not os.access(self.folder, os.W_OK):
            return
        with _exclusive(self.folder / "lock"):
            entries = sorted(self._entries())
            total = sum(size for _, size, _ in entries)
            for _, size, path in entries:
                if total <= self.limit_bytes:
                    break
                if self._remove_unused(path):
                    total -= size
            self._remove_stale_scratch()

    def close(self) -> None:
        """Let go of the entries in use, and keep to the limit."""
        for descriptor in self._held.values():
            os.close(descriptor)
        if self._held:
            self._held = {}
            self.evict()

    def _path(self, key: str) -> Path:
        if not KEY.fullmatch(key):
            raise ValueError(f"not a cache key: {key!r}")
        return self.folder / "entries" / key[:2] / key

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """Give (time of last use, bytes, folder) of every entry; one that vanishes meanwhile is left out."""
        for record in self.folder.glob("entries/*/*/entry.json"):
            try:
                used = record.stat().st_mtime
                size = sum(path.stat().st_size for path in record.parent.rglob("*") if path.is_file())
            except FileNotFoundError:
                continue
            yield used, size, record.parent

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        """Give an empty folder inside the cache which is removed afterwards, if it is still there."""
        work = self.folder / "tmp" / f"{os.getpid()}-{secrets.token_hex(4)}"
        try:
            work.mkdir(parents=True)
        except OSError as error:
            raise _unwritable(self.folder, error) from error
        try:
            yield work
        finally:
            if work.exists():
                shutil.rmtree(work)

    def _remove_stale_scratch(self) -> None:
        """Remove what killed processes left half written: nothing is written for a day."""
        oldest = time.time() - STALE_SECONDS
        for work in self.folder.glob("tmp/*"):
            try:
                stale = work.stat().st_mtime < oldest
            except FileNotFoundError:
                continue  # its process has just removed it
            if stale:
                shutil.rmtree(work)

    def _remove_unused(self, path: Path) -> bool:
        """Remove an entry, unless somebody uses it."""
        try:
            descriptor = os.open(path / "entry.json", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._remove(path)
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True

    def _drop_damaged(self, path: Path) -> None:
        """Remove an entry if it is there and damaged; whoever still reads it reads garbage."""
        if path.exists():
            with _exclusive(self.folder / "lock"):
                if path.exists() and not _intact(path):
                    self._remove(path)

    def _remove(self, path: Path) -> None:
        """Take an entry out of sight in one step, then delete it; under the cache's lock."""
        with self._scratch() as work:
            path.rename(work / path.name)


def open_cache(use_cache: bool, scratch: Path, environ: Mapping[str, str] = os.environ) -> Cache:
    """The user's cache, or one that lies in `scratch` and is empty, so that callers need no second path.

    Args:
        use_cache: False for `--no-cache`.
        scratch: a temporary folder of the caller's, who removes it.
        environ: where `PDCONVERT_CACHE` and `PDCONVERT_CACHE_LIMIT` are looked up.
    """
    if use_cache:
        return Cache(cache_folder(environ), cache_limit_bytes(environ))
    return Cache(scratch, sys.maxsize, temporary=True)


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """`PDCONVERT_CACHE`, or `pdconvert` in the place where the system keeps a user's caches.

    Raises:
        InputError: `PDCONVERT_CACHE` is not UTF-8.
    """
    if given := environ.get("PDCONVERT_CACHE"):
        if not is_plain_text(given):
            raise InputError(f"PDCONVERT_CACHE is {given!r}, which is not UTF-8; set it to another folder")
        return Path(given).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "pdconvert"
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "pdconvert"


def cache_limit_bytes(environ: Mapping[str, str] = os.environ) -> int:
    """`PDCONVERT_CACHE_LIMIT` in bytes, from a text such as `20GB`, `500 MB` or `1000000`.

    Raises:
        InputError: the text is not a size.
    """
    text = environ.get("PDCONVERT_CACHE_LIMIT", "").strip()
    if not text:
        return DEFAULT_LIMIT_BYTES
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", text.upper())
    if not match or match[2] not in UNITS:
        raise InputError(f"PDCONVERT_CACHE_LIMIT is {text!r}; write a size such as 20GB or 500MB")
    return int(float(match[1]) * UNITS[match[2]])


def _unwritable(folder: Path, error: OSError) -> InputError:
    return InputError(f"the cache folder {folder} cannot be written ({error.strerror}); {INSTEAD}")


def _describe(folder: Path) -> dict[str, dict[str, int | str]]:
    """Size and SHA-256 of every file below a folder, besides the record itself."""
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / "entry.json"
    }


def _intact(path: Path) -> bool:
    """Whether an entry's files are those that its record lists."""
    try:
        record = json.loads((path / "entry.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError, ValueError, RecursionError):
        return False
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        return False
    return _describe(path) == record.get("files")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open_shared(path: Path) -> int:
    """Open a file and hold a shared lock on it.

    Raises:
        FileNotFoundError: it does not exist, or was removed while this waited for the lock.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if not os.path.samestat(os.fstat(descriptor), path.stat()):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unwritable(path.parent, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
