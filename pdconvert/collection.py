"""Reading and making programs of a hundred thousand objects without the garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Hold off the collection of reference cycles in the block, which makes objects that all stay in use.

    The collector would look at every object of the process again and again, and find nothing: up to 4 of the 57
    seconds of a build with six functions.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
