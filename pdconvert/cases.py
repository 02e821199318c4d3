"""Test vectors from the streams of a compiled model: the calls that a build replays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from pdconvert.compile import CompiledBlock
from pdconvert.emit.vectors import Case
from pdconvert.lowering.contract import FunctionShape, input_ports, output_ports, state_ports
from pdconvert.model import ModelSpec
from pdconvert.prepare import Plan, Texts
from pdconvert.quant.store import dequantized
from pdconvert.reference import Reference
from pdconvert.runtime.embedding import HostEmbedding
from pdconvert.runtime.manifest import RopeTable
from pdconvert.runtime.mask import causal_mask
from pdconvert.runtime.rope import Frequencies, RopeTables
from pdconvert.runtime.weights import DecodeWeights


def graph_cache(blocks: Sequence[CompiledBlock], name: str) -> np.ndarray:
    """A stream's k or v of all layers in the graph's layout, (1, L·heads, D, T) fp32."""
    layers = [block.caches()[name] for block in blocks if block.name.startswith("layers.")]
    return torch.cat([layer.transpose(1, 2) for layer in layers])[None].numpy()


def make_cases(plan: Plan, texts: Texts, blocks: Sequence[CompiledBlock], decode: Path) -> list[Case]:
    """One test vector per function, on the probe: from position 0, or on as much past as the probe has.

    Expected values come from the stored weights, de-quantized, in fp32.

    Args:
        decode: the decode folder, whose embedding the host uses.
    """
    streams = {side: graph_cache(blocks, f"stored.{side}") for side in ("k", "v")}
    embedding = HostEmbedding(DecodeWeights(decode), plan.embedding_scale)
    return [_case(plan, texts, blocks, shape, streams, embedding) for shape in plan.shapes]


def _case(
    plan: Plan,
    texts: Texts,
    blocks: Sequence[CompiledBlock],
    shape: FunctionShape,
    streams: dict[str, np.ndarray],
    embedding: HostEmbedding,
) -> Case:
    prefill, spec = plan.recipe.prefill, plan.spec
    chunk = max(other.tokens for other in plan.shapes if not other.past)
    start = min(shape.past, chunk, len(texts.probe) - 1)
    ids = texts.probe[start : start + shape.tokens]
    by_role = {
        **RopeTables(_ropes(spec), start, shape.tokens).inputs(slice(None)),
        "mask": causal_mask(start, shape.past, len(ids), shape.tokens),
        "mask.window": causal_mask(start, shape.past, len(ids), shape.tokens, window=spec.window),
    }
    ports = input_ports(spec, shape, plan.interface)
    inputs = {port.name: by_role[port.key] for port in ports if port.key in by_role}
    if prefill.embedding == "graph":
        inputs["token_ids"] = np.array([[*ids, *[ids[-1]] * (shape.tokens - len(ids))]], np.int32)
    else:
        inputs["hidden"] = embedding.hidden(ids, shape.tokens)
    states: dict[str, np.ndarray] = {}
    columns = plan.interface.state_columns
    if columns:
        inputs["write"] = np.zeros((1, 1, shape.tokens, columns), np.float16)
        inputs["write"][0, 0, range(len(ids)), range(start, start + len(ids))] = 1
        for port, held in zip(state_ports(plan.spec, plan.interface), streams.values(), strict=True):
            states[port.name] = _columns(held[..., :start], columns).reshape(port.shape).astype(np.float16)
    elif shape.past:
        keys = streams["k"][..., :start]
        if prefill.kv.rope == "raw":
            tables = RopeTables(_ropes(spec), 0, start, np.float32)
            keys = tables.rotate(keys, spec.kv_heads, slice(None))
        inputs["past_k"] = _columns(keys, shape.past).astype(np.float16)
        inputs["past_v"] = _columns(streams["v"][..., :start], shape.past).astype(np.float16)
    expected = {
        side: _columns(value[..., start : start + len(ids)], shape.tokens) for side, value in streams.items()
    }
    if prefill.outputs == "logits":
        rows = range(start, start + len(ids))
        if prefill.logits == "row":
            inputs["row"] = np.zeros((1, 1, shape.tokens, 1), np.float16)
            inputs["row"][0, 0, len(ids) - 1] = 1
            rows = rows[-1:]
        size = 1 if prefill.logits == "row" else shape.tokens
        logits = _columns(_stored_logits(plan, blocks, rows), size)
        ports = [p for p in output_ports(plan.spec, shape, plan.interface) if p.role == "logits"]
        cuts = np.cumsum([port.shape[1] for port in ports])[:-1]
        expected |= dict(zip((port.name for port in ports), np.split(logits, cuts, 1), strict=True))
    floors = {"fp32": plan.recipe.gates.graph_db, "fp16": plan.recipe.gates.fp16_db}
    return Case(shape.name, shape.name, ids, inputs, expected, dict.fromkeys(expected, floors), states)


def _ropes(spec: ModelSpec) -> dict[str, Frequencies]:
    """The rotary embeddings of a model by the suffix of their inputs' roles, as the manifest will give them."""
    main, local = spec.rope, spec.local_rope
    second = None
    if local is not None and spec.local_layers:
        second = Frequencies(local.inv_freq, local.attention_factor, spec.local_layers)
    table = RopeTable(main.inv_freq, main.attention_factor, spec.unrotated_layers, second)
    return table.by_suffix(len(spec.layers))


def _columns(cache: np.ndarray, size: int) -> np.ndarray:
    """The cache with `size` columns, zero beyond its own."""
    columns = np.zeros((*cache.shape[:-1], size), cache.dtype)
    columns[..., : cache.shape[-1]] = cache
    return columns


def _stored_logits(plan: Plan, blocks: Sequence[CompiledBlock], rows: range) -> np.ndarray:
    """Logits (1, V, 1, n) of probe tokens through the stored weights, de-quantized."""
    head = blocks[-1]
    tensors = {name: dequantized(value) for name, value in head.tensors().items()}
    hidden = head.streams().stored[0, rows.start : rows.stop]
    logits = Reference(plan.source, plan.family, plan.spec).logits(hidden, tensors)
    return logits.T[None, :, None].numpy()
