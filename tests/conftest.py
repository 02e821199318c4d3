"""Fixtures for all tests: nothing is written outside pytest's own temporary folders."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test a cache folder of its own, whatever the user's environment says."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("PDCONVERT_CACHE", str(folder))
    monkeypatch.delenv("PDCONVERT_CACHE_LIMIT", raising=False)
    return folder
