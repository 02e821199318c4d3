"""Single files that a user names or a package holds: read only where they are plain, written whole or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from pdconvert.errors import InputError


def refuse_special(path: Path, remedy: str) -> None:
    """Refuse what is there and no regular file, such as a pipe, whose opening waits for the other side.

    Raises:
        InputError: it is a folder, a pipe or a device; the message ends with `remedy`.
    """
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: not a regular file; {remedy}")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that takes the name `path` when the block ends without an exception; else it is removed."""
    work = path.with_name(f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with work.open("xb") as file:
            yield file
        work.replace(path)
    finally:
        work.unlink(missing_ok=True)
