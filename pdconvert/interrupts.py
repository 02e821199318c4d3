"""Ctrl-C and SIGTERM: raised where an exception may be raised, and held back where something is cleaned up.

Python raises KeyboardInterrupt wherever the main thread happens to be. Inside a third party's native code that is not
safe: a callback of C++ code swallows the exception or makes another one of it, and torch's tracer ends the process
without any cleaning. So a signal that arrives there waits until control is back in code that can unwind.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType

EXIT_TERMINATED = 143
RETRY_SECONDS = 0.02
PATIENCE_SECONDS = 10.0
"""After that the exception is raised in whatever code there is; a second signal does so at once."""
SAME_WISH_SECONDS = 0.1
"""A signal so soon after another one says nothing new: it must not end the cleaning that the first one began."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
INSTALLED = ("site-packages", "dist-packages")
OWN = tuple(str(Path(__file__).parents[1] / name) + os.sep for name in ("pdconvert", "passes"))
UNWINDING = (f"{os.sep}click{os.sep}", os.path.join("torch", "utils", "_contextlib.py"))
"""Third-party code in plain Python through which exceptions pass: the command line, and `torch.no_grad`."""


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the block with an exception, so that everything is cleaned up.

    In the main thread only, since Python handles signals nowhere else. A SIGINT that is ignored, as in a shell's
    background job, stays ignored.

    Raises:
        KeyboardInterrupt: SIGINT arrived.
        SystemExit: with code 143: SIGTERM arrived.
    """
    outermost, arrived, deadline, last = sys._getframe(2), 0, 0.0, -math.inf

    def arrive(signum: int, frame: FrameType | None) -> None:
        nonlocal arrived, deadline, last
        impatient = False
        if signum != signal.SIGALRM:
            now = time.monotonic()
            again, last = now - last < SAME_WISH_SECONDS, now
            if again and not arrived:
                return
            impatient = bool(arrived) and not again
            arrived, deadline = signum, deadline or now + PATIENCE_SECONDS
        if not arrived:
            return
        if not (impatient or time.monotonic() > deadline or _can_unwind(frame, outermost)):
            signal.setitimer(signal.ITIMER_REAL, RETRY_SECONDS)
            return
        number, arrived, deadline = arrived, 0, 0.0
        if number == signal.SIGTERM:
            sys.exit(EXIT_TERMINATED)
        raise KeyboardInterrupt

    taken = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, arrive) for number in taken}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _put_back(before)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold interrupts back while something is cleaned up, so that a second Ctrl-C leaves nothing behind either."""
    if current_thread() is not main_thread():
        yield
        return
    held: list[int] = []
    before = {number: signal.signal(number, lambda signum, frame: held.append(signum)) for number in SIGNALS}
    try:
        yield
    finally:
        _put_back(before)
        for signum in held[:1]:
            signal.raise_signal(signum)


def _put_back(handlers: dict) -> None:
    """Restore handlers; None stands for one that was not set from Python."""
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _can_unwind(frame: FrameType | None, outermost: FrameType) -> bool:
    """Whether an exception in `frame` reaches `outermost` through plain Python alone."""
    while frame is not None and frame is not outermost:
        name = frame.f_code.co_filename
        installed = any(part in name for part in INSTALLED) and not name.startswith(OWN)
        if installed and not any(part in name for part in UNWINDING):
            return False
        if (
            name.startswith("<frozen importlib")
            or name.endswith("weakref.py")
            or frame.f_code.co_name == "__del__"
        ):
            return False
        frame = frame.f_back
    return True
