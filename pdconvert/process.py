"""What a build does to the file system: all of its output appears at once, or none of it.

A build writes into a temporary sibling of its output folder, which takes the output's name when
everything is in it. One lock file beside it keeps two builds out of one place.

    build/
      .NAME.lock                while a build runs: held with flock, holds its process id
      .NAME.tmp-PID-RANDOM/     while a build runs: what is written
      NAME/                     after it: the finished build, or the one that was there before
"""

import errno
import fcntl
import glob
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdconvert.errors import InputError, PdconvertError
from pdconvert.interrupts import uninterrupted
from pdconvert.rename import exchange

BUILD_ENTRIES = frozenset(
    {"manifest.json", "prefill", "prefill.mlpackage", "decode", "test_vectors", "report"}
)
# What `pdconvert report` writes into a build that an older version made.
WRITTEN_LATER = ("report/index.html",)
# Below this, the disk counts as full when a write has failed for whatever reason a library gives.
FULL_DISK_BYTES = 1 << 20
# How coremltools says that it could not write, whatever the system's reason was.
NATIVE_WRITER = "[MIL FileWriter]"


def is_plain_text(path: str | Path) -> bool:
    """Whether a path can be handed to native libraries and written into JSON: UTF-8 without zero bytes."""
    try:
        return b"\0" not in str(path).encode("utf-8")
    except UnicodeEncodeError:  # bytes that are not UTF-8, which Python holds as lone surrogates
        return False


@contextmanager
def output_folder(out: Path, *, force: bool) -> Iterator[Path]:
    """Yield a temporary folder which becomes `out` when the block ends without an exception.

    With an exception, Ctrl-C or SIGTERM, the temporary folder is removed and `out` is what it was.

    Args:
        out: where the build shall be; its parents are made.
        force: whether a finished build in `out` may be replaced. Anything else there never is.

    Raises:
        InputError: `out` is a file, exists and `force` is not given, holds files that pdconvert did
            not write, is being written by another process, or the disk is full.
    """
    check_output(out, force=force)
    out = _real(out)
    made = _make_parents(out.parent)
    try:
        with _lock(out):
            _recover(out)
            check_output(out, force=force)
            yield from _write_and_swap(out)
    finally:
        for parent in made:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()


def _write_and_swap(out: Path) -> Iterator[Path]:
    work = out.with_name(f".{out.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        work.mkdir()
        yield work
        if out.exists():
            _replace(work, out)
        else:
            work.rename(out)
    except PdconvertError:
        raise
    except Exception as error:
        refusal = write_refusal(error, out.parent)
        if refusal:
            raise InputError(f"{refusal}, or choose another --out") from error
        raise
    finally:
        with uninterrupted():
            if work.exists():
                shutil.rmtree(work)


def _replace(work: Path, out: Path) -> None:
    """Put `work` in the place of `out` and remove what was there."""
    if exchange(work, out):
        return  # the caller removes `work`, which is now the old build
    aside = out.with_name(f".{out.name}.old-{os.getpid()}-{secrets.token_hex(4)}")
    out.rename(aside)
    try:
        work.rename(out)
    except BaseException:
        aside.rename(out)
        raise
    shutil.rmtree(aside)


def check_output(out: Path, *, force: bool) -> None:
    """Refuse an output folder that must not be written, before any work is done.

    Raises:
        InputError: as for `output_folder`.
    """
    real = _real(out)
    if not is_plain_text(real):
        raise InputError(f"{str(real)!r} holds bytes that are not UTF-8; choose another --out")
    if not os.path.lexists(real):
        return
    if not real.is_dir():
        raise InputError(f"{out} is not a folder; choose another --out")
    foreign = foreign_files(out)
    if foreign:
        shown = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise InputError(f"{out} holds files that pdconvert did not write ({shown}); choose another --out")
    if Path(os.path.realpath(os.curdir)).is_relative_to(real):  # whoever works there would lose the ground
        raise InputError(f"{out} is the working directory or holds it; choose a folder inside it as --out")
    if not any(out.iterdir()):
        return
    if not force:
        raise InputError(f"{out} already holds a build; add --force to replace it, or choose another --out")
    for folder in (out, *(path for path in out.rglob("*") if path.is_dir())):
        if not os.access(folder, os.W_OK | os.X_OK):
            raise InputError(
                f"{folder} is read-only, so the build in {out} cannot be replaced; make it writable, "
                "or choose another --out"
            )


def _real(out: Path) -> Path:
    """Where a path leads, links followed; a link that leads to itself is left as it is."""
    return Path(os.path.realpath(out))


def foreign_files(build: Path) -> list[str]:
    """Name what in a folder was not written by pdconvert (all of it, where there is no manifest of ours).

    Where the manifest lists the build's files (`files`: a list, or an object with their paths as keys),
    any other file is foreign; otherwise any top-level entry besides those of a build is.
    """
    manifest = _read_manifest(build)
    entries = sorted(entry.name for entry in build.iterdir())
    if manifest is None:
        return entries
    foreign = [name for name in entries if name not in BUILD_ENTRIES]
    if "files" in manifest:
        known = {*manifest["files"], "manifest.json", *WRITTEN_LATER}
        foreign += [path for path in list_files(build) if path not in known and _top(path) in BUILD_ENTRIES]
    return foreign


def list_files(folder: Path) -> list[str]:
    """List every file below a folder as sorted POSIX paths relative to it."""
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
    )


def _top(path: str) -> str:
    return path.split("/", 1)[0]


def _read_manifest(build: Path) -> dict | None:
    """The manifest of a build, or None where the folder has none that pdconvert could have written."""
    path = build / "manifest.json"
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None
    ours = isinstance(manifest, dict) and {"schema", "verdict", "prefill"} <= manifest.keys()
    return manifest if ours else None


def _make_parents(folder: Path) -> list[Path]:
    """Make a folder and its parents; return those that did not exist, innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise InputError(f"{folder} is not a folder; choose another --out") from None
    return missing


@contextmanager
def _lock(out: Path) -> Iterator[None]:
    """Hold the lock of an output folder.

    Raises:
        InputError: another process holds it.
    """
    path = out.with_name(f".{out.name}.lock")
    descriptor = _acquire(path, out)
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire(path: Path, out: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode(errors="replace") or "unknown"
            os.close(descriptor)
            raise InputError(
                f"another build (process {holder}) is writing {out}; wait for it, or choose another --out"
            ) from None
        # The previous holder may have removed the file between our open and our lock: then the lock is on
        # a file which nobody else can see, so take the next one.
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
        os.close(descriptor)


def _recover(out: Path) -> None:
    """Clean up what dead builds left beside `out`; under its lock nothing there belongs to a living one.

    A build that died while it replaced an older one may have put that aside: it comes back.
    """
    for aside in _siblings(out, "old"):
        if out.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(out)
    for stale in _siblings(out, "tmp"):
        shutil.rmtree(stale)


def _siblings(out: Path, kind: str) -> list[Path]:
    return sorted(out.parent.glob(glob.escape(f".{out.name}.{kind}-") + "*"))


def write_refusal(error: Exception, folder: Path) -> str | None:
    """What the system refused to write into a folder, and what helps; None where that was not the cause.

    Native libraries say so in words only, or not at all.
    """
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error):
        return f"the disk of {folder} is full; free some space"
    if code == errno.EFBIG or os.strerror(errno.EFBIG) in str(error):  # FAT32 ends at 4 GB a file
        return f"{folder} takes no file of this size; raise the limit (ulimit -f, or the disk's format)"
    if shutil.disk_usage(folder).free < FULL_DISK_BYTES:
        return f"the disk of {folder} is full; free some space"
    return f"{folder} cannot be written; check the disk" if NATIVE_WRITER in str(error) else None
