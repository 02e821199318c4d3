"""One small checkpoint for all tests of passes: grouped heads, and biases wherever a llama may have one."""

import pytest
import torch
from checkpoints import layer_block, one_thread, probe_of, random_source, reference_of

from pdconvert.families import llama
from pdconvert.program import Block, Probe
from pdconvert.reference import Reference

__all__ = ["one_thread"]

CONFIG = {**llama.TINY, "hidden_size": 32, "intermediate_size": 48, "attention_bias": True, "mlp_bias": True}


@pytest.fixture(scope="session")
def reference() -> Reference:
    with torch.no_grad():
        return reference_of(random_source(CONFIG))


@pytest.fixture
def probe(reference: Reference) -> Probe:
    return probe_of(reference, tokens=7)


@pytest.fixture
def layer(reference: Reference) -> Block:
    """Decoder layer 0 in its plain form."""
    return layer_block(reference)
