"""One small checkpoint for all tests of the lowering, and a prompt that Hugging Face has run."""

import pytest
from checkpoints import one_thread, random_source, reference_of
from lowered import CONFIG, Call, call

from pdconvert.reference import Reference

__all__ = ["one_thread"]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return reference_of(random_source(CONFIG))


@pytest.fixture(scope="module")
def prompt(reference: Reference) -> Call:
    return call(reference, [(7 * i) % 320 for i in range(12)])
