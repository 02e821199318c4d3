"""Small checkpoints in memory, with weights large enough that attention is far from uniform."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pdconvert import families
from pdconvert.blocks import DecoderLayer, Head
from pdconvert.compile import unrotate
from pdconvert.inventory import expected_tensors
from pdconvert.program import Block, Probe
from pdconvert.reference import Reference
from pdconvert.sources.base import Source, TensorInfo


@dataclass
class MemorySource(Source):
    """A checkpoint whose tensors lie in memory.

    Attributes:
        config: the content of a config.json.
        values: fp32 tensors by their names in the checkpoint.
        ids: what `tokenizer_size` answers.
    """

    config: dict[str, Any]
    values: dict[str, Tensor]
    ids: int | None = None
    label: str = "memory"
    generation_config: dict[str, Any] = field(default_factory=dict)
    license: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(tuple(value.shape), "F32") for name, value in self.values.items()}

    def hashes(self) -> dict[str, str]:
        return {}

    def write_tokenizer(self, folder: Path) -> None:
        raise AssertionError("a checkpoint in memory has no tokenizer")

    def tokenizer_size(self) -> int | None:
        return self.ids

    def _read(self, name: str, info: TensorInfo) -> Tensor:
        return self.values[name]

    def _read_rows(self, name: str, info: TensorInfo, ids: Sequence[int]) -> Tensor:
        return self.values[name][list(ids)]


def random_source(config: Mapping[str, Any], seed: int = 0) -> MemorySource:
    """Seeded weights for every tensor of a config: matrices N(0, 1/inputs), gains N(1, 0.2), biases N(0, 0.3)."""
    family = families.get(dict(config))
    spec = family.read_config(dict(config))
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, shape in expected_tensors(family, spec).items():
        value = torch.randn(shape, generator=generator)
        if "embed_tokens" in name:
            values[name] = value
        elif len(shape) == 2:
            values[name] = value * shape[1] ** -0.5
        else:
            gain = 1 - spec.gain_offset + 0.2 * value
            values[name] = gain if name.endswith("weight") else 0.3 * value
    return MemorySource(dict(config), values)


def reference_of(source: Source) -> Reference:
    """Hugging Face's modules on a source."""
    family = families.get(source.config)
    return Reference(source, family, family.read_config(source.config))


def probe_of(reference: Reference, tokens: int = 12, seed: int = 1, layer: int = 0) -> Probe:
    """Hidden states N(0, 1) at positions 0, 1, …, with the RoPE of a layer."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(1, tokens, reference.spec.hidden_size, generator=generator)
    positions = torch.arange(tokens)
    cos, sin = reference.rope(positions, layer)
    return Probe(hidden, positions, cos[0], sin[0])


def layer_block(reference: Reference, index: int = 0, *, raw_keys: bool = False) -> Block:
    """A decoder layer in its plain form, with the checkpoint's weights."""
    spec = reference.spec
    module = DecoderLayer(spec.layers[index], spec.rope_of(spec.layers[index]))
    module.load_state_dict(reference.read_layer(index), strict=True)
    block = Block(f"layers.{index}", module.eval().requires_grad_(False), spec.layers[index])
    return block.with_layout(block.module, raw_keys=raw_keys)


def head_block(reference: Reference) -> Block:
    """The final norm and the head in their plain form, with the checkpoint's weights."""
    spec = reference.spec
    module = Head.of(spec)
    module.load_state_dict(reference.head_tensors(), strict=True)
    return Block("head", module.eval().requires_grad_(False), spec.layers[-1])


def expected_outputs(reference: Reference, block: Block, probe: Probe) -> dict[str, Tensor]:
    """What Hugging Face's own module gives for a plain block, in its layout."""
    if block.name == "head":
        return {"logits": reference.logits(probe.hidden, reference.head_tensors())}
    index = int(block.name.split(".")[1])
    hidden, cache = reference.run(reference.layer(index), probe.hidden)
    factor = reference.spec.rope_of(block.spec).attention_factor
    unturn = block.layout.raw_keys and block.spec.rotary
    keys = unrotate(cache.keys, probe, factor) if unturn else cache.keys
    return {"hidden": hidden, "k": keys, "v": cache.values}


def mlx_logits(config: dict[str, Any], tensors: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    """What mlx-lm computes in float32 from a decode config as it comes back from JSON."""
    import mlx.core as mx
    from mlx_lm.utils import _get_classes

    config = json.loads(json.dumps(config))
    model_class, arguments = _get_classes(config)
    with mx.stream(mx.cpu):
        model = model_class(arguments.from_dict(config))
        weights = {name: mx.array(value.numpy()) for name, value in tensors.items()}
        if hasattr(model, "sanitize"):
            weights = model.sanitize(weights)
        model.load_weights(list(weights.items()), strict=True)
        return torch.from_numpy(np.array(model(mx.array([ids]))[0].astype(mx.float32)))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from more threads, and on a busy machine lose much."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
