"""Learning of scales, table entries and norm gains against the reference, with all codes and zero points as they are.

    tokens ─► the checkpoint's layers ───────────────────────► logits ─┐
        └───► stored embedding ─► layers of codes × (1 + δ) ─► logits ─┴─► KL divergence ─► gradient of every δ

Layers run under activation checkpointing, so that memory does not grow with depth times tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pdconvert.calibrate import by_length
from pdconvert.errors import CheckFailed
from pdconvert.layer_tensors import reference_state
from pdconvert.quant.grid import QuantizedLinear
from pdconvert.quant.grids import snapped
from pdconvert.quant.store import Stored, dequantized
from pdconvert.reference import Reference

BATCH_TOKENS = 4096
"""Tokens of a step, in sequences of one length."""

WARM_UP = 0.1
BETAS = (0.9, 0.95)


@dataclass
class Learned:
    """One stored tensor and what is learned of it: a relative change of its scales, table entries or gains."""

    stored: Stored
    base: Tensor
    unit: Tensor
    delta: nn.Parameter

    @classmethod
    def of(cls, stored: Stored, device: str) -> Learned:
        """Nothing learned yet."""
        if isinstance(stored, Tensor):
            base = stored.float().to(device)
            unit = base
        elif isinstance(stored, QuantizedLinear):
            base = stored.scales.float().to(device)
            unit = base
        else:
            base = stored.tables.float().to(device)
            unit = base.square().mean(1, keepdim=True).sqrt()
        if not isinstance(stored, Tensor):
            stored = stored.each(lambda part: part.to(device))
        return cls(stored, base, unit, nn.Parameter(torch.zeros_like(base)))

    def value(self) -> Tensor:
        """The de-quantized tensor, which gradients flow through."""
        moved = self.base + self.unit * self.delta
        if isinstance(self.stored, Tensor):
            return moved
        if isinstance(self.stored, QuantizedLinear):
            return self.stored.values(moved)
        return moved.gather(1, self.stored.codes.reshape(len(moved), -1).long()).view(self.stored.shape)

    @torch.no_grad()
    def record(self) -> Stored:
        """The stored tensor with what was learned, on fp16 numbers again."""
        moved = (self.base + self.unit * self.delta).cpu()
        if isinstance(self.stored, Tensor):
            return moved.half()
        stored = self.stored.each(Tensor.cpu)
        if isinstance(stored, QuantizedLinear):
            return replace(stored, scales=snapped(moved, stored.short_scales).half())
        return replace(stored, tables=moved.half())


def learnable(name: str, stored: Stored, folded: frozenset[str]) -> bool:
    """Whether a tensor is learned: quantized weights, and gains of norms, but for `folded` ones."""
    return not isinstance(stored, Tensor) or (name.endswith("norm.weight") and name not in folded)


def learn(
    reference: Reference,
    embedding: Stored,
    layers: Sequence[Mapping[str, Stored]],
    head: Mapping[str, Stored],
    sequences: Sequence[Sequence[int]],
    *,
    steps: int,
    rate: float,
    folded: frozenset[str] = frozenset(),
    device: str = "cpu",
    track: Callable[[Iterator[int]], Iterator[int]] = lambda items: items,
) -> list[dict[str, Stored]]:
    """Learn for some steps of AdamW on batches of calibration text.

    Args:
        embedding, layers, head: the store, by names in the blocks.
        sequences: calibration text; a step takes some of one length.
        rate: the largest relative change per step; it warms up and falls with a cosine.
        folded: gains of a layer that linears hold, and which stay 1.

    Returns:
        The layers with what was learned.

    Raises:
        CheckFailed: the loss is not finite.
    """
    depth = len(layers)
    originals = [reference.module(i, reference.read_layer(i)).to(device) for i in range(depth)]
    learned = [
        {name: Learned.of(value, device) for name, value in tensors.items() if learnable(name, value, folded)}
        for tensors in layers
    ]
    fixed = [
        {
            name: dequantized(value).to(device)
            for name, value in tensors.items()
            if not learnable(name, value, folded)
        }
        for tensors in layers
    ]
    heads = [
        {name: dequantized(value).to(device) for name, value in side.items()}
        for side in (reference.head_tensors(), head)
    ]
    scale = reference.spec.embedding_scale
    tables = [
        (value * scale).to(device)
        for value in (reference.source.read("model.embed_tokens.weight"), dequantized(embedding))
    ]

    def layer(hidden: Tensor, index: int) -> Tensor:
        values = {name: item.value() for name, item in learned[index].items()} | fixed[index]
        state = reference_state(values, reference.family, index, reference.spec)
        return reference.run(originals[index], hidden, state=state)[0]

    optimizer = torch.optim.AdamW(
        [item.delta for tensors in learned for item in tensors.values()], lr=rate, betas=BETAS, weight_decay=0
    )
    draw = torch.Generator().manual_seed(0)
    groups, pending = by_length(sequences), list[Tensor]()
    for step in track(iter(range(steps))):
        warm = min(1.0, (step + 1) / max(1.0, WARM_UP * steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * warm * 0.5 * (1 + math.cos(math.pi * step / steps))
        pending = pending or _batches(groups, draw)
        chosen = pending.pop()
        with torch.no_grad():
            hidden = tables[0][chosen]
            for original in originals:
                hidden, _ = reference.run(original, hidden)
            expected = reference.logits(hidden, heads[0]).log_softmax(-1)
        with torch.enable_grad():
            hidden = tables[1][chosen].requires_grad_()
            for index in range(depth):
                hidden = checkpoint(layer, hidden, index, use_reentrant=False)
            got = reference.logits(hidden, heads[1]).log_softmax(-1)
            loss = nn.functional.kl_div(got, expected, log_target=True, reduction="sum") / chosen.numel()
            loss.backward()
        if not math.isfinite(loss.item()):
            raise CheckFailed(
                f"learning of scales: the loss is {loss.item()} at step {step}; lower quantize_weights.learning_rate"
            )
        optimizer.step()
        optimizer.zero_grad()
    return [
        {**tensors, **{name: item.record() for name, item in found.items()}}
        for tensors, found in zip(layers, learned, strict=True)
    ]


def _batches(groups: Sequence[Tensor], draw: torch.Generator) -> list[Tensor]:
    """All sequences once, in batches of one length, (n, W) token ids each, in a random order."""
    found = [
        ids[chosen]
        for ids in groups
        for chosen in torch.randperm(len(ids), generator=draw).split(max(1, BATCH_TOKENS // ids.shape[1]))
    ]
    return [found[index] for index in torch.randperm(len(found), generator=draw)]
