"""Fixtures for all tests: nothing is written outside pytest's own temporary folders."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test a cache folder of its own, whatever the user's environment says."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("PDCONVERT_CACHE", str(folder))
    monkeypatch.delenv("PDCONVERT_CACHE_LIMIT", raising=False)
    return folder


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """Put back the levels that the command line sets for the whole process."""
    names = ("pdconvert", "coremltools", "torch", "transformers")
    levels = {name: logging.getLogger(name).level for name in names}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
