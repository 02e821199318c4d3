"""Progress of long steps: stages as lines and bars on stderr, silent when stderr is not a terminal.

Nothing here ever writes to stdout, so `--json` output stays one object.
"""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO, TypeVar

Item = TypeVar("Item")


class Progress:
    """Where a long command says what it is doing.

    Args:
        stream: where to write; stderr by default.
        enabled: whether to write at all; by default, whether `stream` is a terminal.
    """

    def __init__(self, stream: TextIO | None = None, enabled: bool | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._enabled = self._stream.isatty() if enabled is None else enabled
        colour = self._enabled and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._dim, self._reset = ("\x1b[2m", "\x1b[0m") if colour else ("", "")

    @classmethod
    def silent(cls) -> "Progress":
        """A progress that writes nothing, for tests and callers from Python."""
        return cls(enabled=False)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Announce a step, and its seconds when it is done."""
        start = time.monotonic()
        self.note(f"{name} ...")
        yield
        self.note(f"{name}: {time.monotonic() - start:.1f} s")

    def bar(
        self, items: Iterable[Item], description: str, *, total: int | None = None, unit: str = "it"
    ) -> Iterator[Item]:
        """Yield `items` and draw a bar as they are taken; the bar disappears when they are done.

        Args:
            items: what to go through.
            description: the step, in a few words.
            total: the number of items, where `items` has no length.
            unit: what one item is, e.g. "layer".
        """
        if not self._enabled:
            yield from items
            return
        from tqdm import tqdm

        yield from tqdm(
            items,
            desc=description,
            total=total,
            unit=f" {unit}",
            file=self._stream,
            leave=False,
            dynamic_ncols=True,
        )

    def note(self, message: str) -> None:
        """Write one line."""
        if self._enabled:
            self._stream.write(f"{self._dim}{message}{self._reset}\n")
            self._stream.flush()
