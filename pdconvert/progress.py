"""Progress of long steps: stages as lines and bars on stderr, silent when stderr is not a terminal.

Nothing here ever writes to stdout, so `--json` output stays one object.
"""

import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class Stage:
    """A finished step: its seconds, and the peak resident bytes of the process up to its end."""

    name: str
    seconds: float
    peak_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "seconds": round(self.seconds, 1)}


def peak_bytes() -> int:
    """Peak resident size of this process so far.

    On Linux `ru_maxrss` would count the process that started this one, if that is larger.
    """
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * int(status.read_text(encoding="ascii").partition("VmHWM:")[2].split()[0])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def takes_colour(stream: TextIO | None) -> bool:
    """Whether to colour what goes there: to a terminal that can, unless NO_COLOR is set (no-color.org).

    Args:
        stream: None where it is closed.
    """
    if stream is None or not stream.isatty():
        return False
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Progress:
    """Where a long command says what it is doing.

    Attributes:
        stages: those that are done, whether or not anything is written.

    Args:
        stream: where to write; stderr by default.
        enabled: whether to write at all; by default, whether `stream` is a terminal.
    """

    def __init__(self, stream: TextIO | None = None, enabled: bool | None = None) -> None:
        self.stages: list[Stage] = []
        self._stream = sys.stderr if stream is None else stream
        self._enabled = self._stream.isatty() if enabled is None else enabled
        colour = self._enabled and takes_colour(self._stream)
        self._dim, self._reset = ("\x1b[2m", "\x1b[0m") if colour else ("", "")

    @classmethod
    def silent(cls) -> "Progress":
        """A progress that writes nothing, for tests and callers from Python."""
        return cls(enabled=False)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Announce a step, and when it is done its seconds and the memory used so far."""
        start = time.monotonic()
        self.note(f"{name} ...")
        yield
        done = Stage(name, time.monotonic() - start, peak_bytes())
        self.stages.append(done)
        self.note(f"{name}: {done.seconds:.1f} s, peak {done.peak_bytes / 1e9:.2f} GB")

    def bar(
        self,
        items: Iterable[Item],
        description: str,
        *,
        total: int | None = None,
        unit: str = "it",
        label: Callable[[Item], str] | None = None,
    ) -> Iterator[Item]:
        """Yield `items` and draw a bar as they are taken; the bar disappears when they are done.

        The bar has the share done, the last item's label, the memory used and the time left.

        Args:
            items: what to go through.
            description: the step, in a few words.
            total: the number of items, where `items` has no length.
            unit: what one item is, e.g. "layer".
            label: names an item that is done.
        """
        if not self._enabled:
            yield from items
            return
        from tqdm import tqdm

        drawn = tqdm(
            items,
            desc=description,
            total=total,
            unit=f" {unit}",
            file=self._stream,
            leave=False,
            dynamic_ncols=True,
            bar_format="{desc}: {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt}{unit}s, {remaining} left{postfix}",
        )
        for item in drawn:
            name = f"{label(item)}, " if label else ""
            drawn.set_postfix_str(f"{name}peak {peak_bytes() / 1e9:.2f} GB", refresh=False)
            yield item

    def note(self, message: str) -> None:
        """Write one line."""
        if self._enabled:
            self._stream.write(f"{self._dim}{message}{self._reset}\n")
            self._stream.flush()
