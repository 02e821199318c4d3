"""The texts that a build measures on; each of another origin than what it is compared with."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pdconvert.errors import InputError

PROBE = """\
A lighthouse keeper wrote down the weather every evening for forty-one years. On most pages there is little: wind from
the west, a few clouds, two ships passing. But on 3 March 1907 he counted 118 birds that struck the glass within an
hour, and asked in the margin why they had come so low. Nobody answered him. Today the notebooks lie in a museum, next
to a radar that counts the same birds, and the two rows of numbers, a century apart, agree better than anyone expected.
"""
"""What blocks are run on while they are compiled; written for this purpose."""

PROMPTS = (
    "The capital of France is",
    "2 + 2 equals",
    "Once upon a time, in a village by the sea,",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
)
"""Prompts whose greedy continuations are compared with the reference."""


def held_out() -> tuple[str, str]:
    """Held-out text and its SHA-256: the help topics of the running CPython, in order of their keys."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[key] for key in sorted(topics))
    return text, hashlib.sha256(text.encode()).hexdigest()


def to_score(path: Path | None) -> tuple[str, str]:
    """Text to score a build on and its SHA-256: that of the file named by `--text`, or the held-out one.

    Raises:
        InputError: the file cannot be read, or is not UTF-8.
    """
    if path is None:
        return held_out()
    content = read(path, "--text")
    return content, hashlib.sha256(content.encode()).hexdigest()


def read(path: Path, option: str) -> str:
    """The content of a text file that a user names.

    Args:
        option: where it is named, for the error.

    Raises:
        InputError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{option}: {path} cannot be read as UTF-8 text ({error})") from error
