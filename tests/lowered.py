"""Lower a checkpoint in memory to a package and run it, without the pipeline around it."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import head_block, layer_block
from torch import Tensor

from passes import (
    EagerGqaAttention,
    LinearToConv2d,
    QuantizeWeights,
    RopeAsInput,
    SafeRmsNorm,
    ScaleResidual,
    TruncateLastLayer,
)
from pdconvert.compile import stored_tensors, unrotate
from pdconvert.executors.mil import MilSession, Package
from pdconvert.families import llama
from pdconvert.lowering.contract import FunctionShape, Interface
from pdconvert.measure import sqnr_db
from pdconvert.program import Block, Pass, Probe
from pdconvert.quant.store import Stored
from pdconvert.quiet import quiet_coremltools
from pdconvert.reference import Capture, Reference

quiet_coremltools()

from pdconvert.emit.coreml import write_package  # noqa: E402
from pdconvert.lowering.assemble import Lowering  # noqa: E402

CONFIG = {
    **llama.TINY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "head_dim": 16,
    "attention_bias": True,
    "mlp_bias": True,
}
"""A head's attention scale, 0.25, is exact in fp16."""

PREFILL = FunctionShape(16)

FULL: tuple[Pass, ...] = (LinearToConv2d(), EagerGqaAttention(), SafeRmsNorm(), RopeAsInput())
"""The passes of a usual recipe, but for the quantizer."""


FP16_WEIGHTS_DB = 60
"""Loss to fp16 weights in fp32 arithmetic; the tiny models here reach about 67."""

FOR_HEADS = ("linear_to_conv2d", "safe_rms_norm", "fold_norm_gain")


def is_graph_only(rewrite: Pass) -> bool:
    """Whether a pass changes the graph and not what is stored."""
    return getattr(rewrite, "graph_only", False)


@dataclass
class Form:
    """What decides a package, besides the checkpoint."""

    passes: Sequence[Pass] = FULL
    scheme: str = "none"
    shapes: Sequence[FunctionShape] = (FunctionShape(16),)
    outputs: str = "kv"
    embedding: str = "host"
    target: str = "iOS18"
    raw_keys: bool = False


def lowering(reference: Reference, form: Form) -> tuple[Lowering, dict[str, Mapping[str, Stored]]]:
    """The lowering of a checkpoint, and the stored tensors of its blocks."""
    last = len(reference.spec.layers) - 1
    shared = [item for item in form.passes if not is_graph_only(item)]
    graph = [item for item in form.passes if is_graph_only(item)]
    quantize = QuantizeWeights(scheme=form.scheme)  # type: ignore[arg-type]
    store: dict[str, Mapping[str, Stored]] = {
        "embedding": {"weight": reference.source.read("model.embed_tokens.weight").half()}
    }
    blocks = []
    for index in range(last + 1):
        block = apply(layer_block(reference, index, raw_keys=form.raw_keys), [*shared, quantize])
        store[block.name] = stored_tensors(block)
        truncate = [TruncateLastLayer()] if index == last and form.outputs == "kv" else []
        blocks.append(apply(block, [*graph, *truncate]))
    if form.outputs == "logits":
        block = apply(head_block(reference), [*(item for item in shared if item.name in FOR_HEADS), quantize])
        store["head"] = stored_tensors(block)
        blocks.append(apply(block, graph))
    lowered = Lowering(
        reference.spec,
        blocks,
        store.__getitem__,
        form.target,
        Interface(form.embedding, form.outputs),
    )
    return lowered, store


def apply(block: Block, passes: Iterable[Pass]) -> Block:
    """The block after some passes, each with its requirements and promises checked."""
    for rewrite in passes:
        rewrite.requires(block)
        new = rewrite.run(block)
        rewrite.ensures(block, new)
        block = new
    return block


def package(folder: Path, reference: Reference, form: Form) -> Package:
    """Write `folder` and open it with the executor."""
    lowered, _ = lowering(reference, form)
    write_package(folder, lowered.program(form.shapes), form.target, {"made by": "a test"})
    return Package.open(folder)


@dataclass
class Call:
    """Token ids at positions start, start + 1, … and what Hugging Face computes for them.

    Attributes:
        keys, values: of the new tokens, (1, L·heads, D, n), rotated or raw as asked.
        caches: per layer all keys (rotated) and values so far.
        logits: (n, V).
    """

    ids: list[int]
    start: int
    keys: Tensor
    values: Tensor
    logits: Tensor
    caches: list[Capture] = field(default_factory=list)


def call(
    reference: Reference, ids: Sequence[int], before: Call | None = None, raw_keys: bool = False
) -> Call:
    """Run Hugging Face's layers on token ids, after an earlier call."""
    start = before.start + len(before.ids) if before else 0
    hidden, caches = reference.embed(ids)[None], []
    for index in range(len(reference.spec.layers)):
        past = Capture(before.caches[index].keys, before.caches[index].values) if before else Capture()
        hidden, cache = reference.run(reference.layer(index), hidden, start, past)
        caches.append(cache)
    keys = [cache.keys[:, :, start:] for cache in caches]
    for index, layer in enumerate(reference.spec.layers):
        if raw_keys and layer.rotary:
            cos, sin = reference.rope(torch.arange(start, start + len(ids)), index)
            probe = Probe(hidden, torch.arange(len(ids)), cos[0], sin[0])
            keys[index] = unrotate(keys[index], probe, reference.spec.rope_of(layer).attention_factor)
    values = [cache.values[:, :, start:] for cache in caches]
    logits = reference.logits(hidden[0], reference.head_tensors())
    return Call(list(ids), start, _graph(keys), _graph(values), logits, caches)


def _graph(caches: Sequence[Tensor]) -> Tensor:
    """Caches (1, heads, n, D) of all layers as (1, L·heads, D, n)."""
    return torch.cat(list(caches), 1).transpose(2, 3)


def inputs(
    reference: Reference, form: Form, shape: FunctionShape, new: Call, before: Call | None = None
) -> dict[str, Any]:
    """The inputs of a function for a call, padded with its last token and, in the past, with sevens."""
    padded = [*new.ids, *[new.ids[-1]] * (shape.tokens - len(new.ids))]
    mask = torch.full((shape.keys, shape.tokens), -4e4)
    mask[: new.start] = 0
    mask[shape.past :] = torch.full((shape.tokens, shape.tokens), -4e4).tril(-1)
    given: dict[str, Any] = {}
    for index, layer in enumerate(reference.spec.layers):
        tables = reference.rope(torch.arange(new.start, new.start + shape.tokens), index)
        for name, table in zip(("rope_cos", "rope_sin"), tables, strict=True):
            given[name + "_local" * layer.local_rope] = table.transpose(1, 2)[None]
        given["mask_window" if layer.window else "mask"] = within(mask, shape, new.start, layer.window)
    if form.embedding == "host":
        factors = [item.factor for item in form.passes if isinstance(item, ScaleResidual)]
        given["hidden"] = reference.embed(padded).T[None, :, None, :] * (factors[0] if factors else 1)
    else:
        given["token_ids"] = np.array([padded], np.int32)
    if shape.past:
        assert before is not None
        past = {
            "past_k": _graph([cache.keys for cache in before.caches]),
            "past_v": _graph([cache.values for cache in before.caches]),
        }
        for name, cache in past.items():
            given[name] = torch.full((*cache.shape[:3], shape.past), 7.0)
            given[name][..., : new.start] = cache
    if form.outputs == "logits":
        given["row"] = torch.zeros(1, 1, shape.tokens, 1)
        given["row"][0, 0, len(new.ids) - 1] = 1
    return given


def within(mask: Tensor, shape: FunctionShape, start: int, window: int | None) -> Tensor:
    """A causal mask (K, S) as an input, with what lies before a window masked too."""
    if window is not None:
        mask = mask.clone()
        for key, query in itertools.product(range(shape.keys), range(shape.tokens)):
            position = key if key < shape.past else start + key - shape.past
            if start + query - position >= window:
                mask[key, query] = -4e4
    return mask[None, None]


def run(
    opened: Package, function: str, given: Mapping[str, Any], tokens: int, mode: str = "fp32"
) -> dict[str, Tensor]:
    """Run a function; padded columns are cut off."""
    results = MilSession(opened, function, mode=mode).run(given)
    return {name: value if name == "logits" else value[..., :tokens] for name, value in results.items()}


def operations(opened: Package, function: str | None = None) -> list[Any]:
    """The operations of a function's protobuf block, in order."""
    return list(opened.block(function or opened.default_function).operations)


def assert_close(new: Call, got: dict[str, Tensor], floor_db: float = FP16_WEIGHTS_DB) -> None:
    """Compare the outputs of a package with Hugging Face's."""
    found = {"k": sqnr_db(new.keys, got["k"]), "v": sqnr_db(new.values, got["v"])}
    if "logits" in got:
        found["logits"] = sqnr_db(new.logits[-1], got["logits"][0, :, 0, 0])
    assert min(found.values()) > floor_db, found
