"""Errors that a user sees, each with the exit code of the command line.

An error says *what* is wrong, *where* (file, tensor, field, value) and *what to do*, in one or two
lines. Everything else is a bug and keeps its traceback.
"""


class PdconvertError(Exception):
    """Base of every error that is reported without a traceback."""

    exit_code = 2


class InputError(PdconvertError):
    """Bad input or usage: nothing was left behind (exit 2)."""


class CheckFailed(PdconvertError):
    """A check or gate failed: the files are kept, the verdict is `fail` (exit 1)."""

    exit_code = 1


def printable(text: str) -> str:
    """A name from a file as a terminal may have it: control characters, line ends among them, as escapes."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )
