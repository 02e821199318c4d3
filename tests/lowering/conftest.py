"""Fixtures shared with other folders."""

from checkpoints import one_thread

__all__ = ["one_thread"]
