"""Parameters and output that the subcommands share."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from pdconvert.errors import printable
from pdconvert.process import is_plain_text
from pdconvert.progress import takes_colour


class UserPath(click.ParamType):
    """A path as typed; only a leading `~` or `~/` means the home folder, any other `~` is a plain letter."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Turn the text of the command line into a path."""
        text = str(value)
        if not text:
            self.fail("the path is empty", param, ctx)
        if not is_plain_text(text):
            self.fail(f"{text!r} holds a zero byte, or bytes that are not UTF-8", param, ctx)
        return Path(text).expanduser() if text == "~" or text.startswith("~/") else Path(text)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Leave it to the shell, which knows the files."""
        return [CompletionItem(incomplete, type="file")]


def examples(*lines: str) -> str:
    """The end of a command's help: command lines as one types them."""
    title = "Example" if len(lines) == 1 else "Examples"
    return "\n".join(("\b", f"{title}:", *(f"  {line}" for line in lines)))


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")


def echo_verdict(verdict: str, text: str) -> None:
    """Print a line that begins with a verdict, in green or red where stdout is a terminal that takes colours."""
    if takes_colour(sys.stdout):
        word = click.style(verdict, fg="green" if verdict == "pass" else "red", bold=True)
        text = f"{word}{text.removeprefix(verdict)}"
    click.echo(text)


def echo_json(value: Any) -> None:
    """Print one object as JSON on stdout: strict JSON, non-finite numbers as null."""
    click.echo(json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) != float("inf") and value == value else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> str:
    """Lay out rows in columns; numbers are right-aligned.

    Args:
        rows: the cells, one per column; None shows as a dash.
        header: one title per column.
    """
    cells = [[("-" if cell is None else printable(str(cell))) for cell in row] for row in rows]
    right = [
        bool(rows) and all(isinstance(row[i], int | float) or row[i] is None for row in rows)
        for i in range(len(header))
    ]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    lines = [list(header), ["-" * width for width in widths], *cells]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )
