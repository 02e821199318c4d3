"""Decode folders that the tests of this folder share."""

import pytest
from tiny_pair import Tiny, make_tiny


@pytest.fixture(scope="session")
def w8(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Every matrix at 8 bits per output channel, the head untied."""
    return make_tiny(tmp_path_factory.mktemp("w8") / "decode", 8)


@pytest.fixture(scope="session")
def fp16(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Plain fp16, the head tied to the embedding."""
    return make_tiny(tmp_path_factory.mktemp("fp16") / "decode", None, tie_word_embeddings=True)
