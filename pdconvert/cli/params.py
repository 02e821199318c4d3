"""Parameters and output that the subcommands share."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from pdconvert.process import is_plain_text


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


UNITS = ("kB", "MB", "GB", "TB")

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")


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
    cells = [[("-" if cell is None else str(cell)) for cell in row] for row in rows]
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


def size_text(size_bytes: int) -> str:
    """Give a size to three digits in decimal units: 1234567 is "1.23 MB"."""
    if abs(size_bytes) < 1000:
        return f"{size_bytes} B"
    power = min((len(str(abs(size_bytes))) - 1) // 3, len(UNITS))
    return f"{size_bytes / 1000**power:.3g} {UNITS[power - 1]}"
