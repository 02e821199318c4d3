"""Calibration text that the model writes itself: samples of the checkpoint, all sequences together, token by token.

    rows     ████████████████  the longest sequence
    (all at  ████████
     once)   ████              rows leave as they are done; the caches are cut to those that are left

A step is bound by reading weights and caches, not by arithmetic. So rows share each step, and attention reads the
keys and values of a group of heads where they lie, instead of copying them for every head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from pdconvert.errors import InputError
from pdconvert.reference import Capture, Reference

LARGEST_WRITER_BYTES = 10 * 10**9
"""A model above this size in fp32 does not write its own calibration text: it would not fit beside the rest."""

CACHE_BYTES = 1600 * 10**6
"""Keys and values held while the model writes."""

GROUPED = "pdconvert_grouped"
"""The name of `grouped_attention` among transformers' attention functions."""


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    softcap: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """What transformers' eager attention computes, without a copy of keys and values for each head.

    Args:
        query: (B, heads, S, D).
        key, value: (B, kv_heads, K, D).
        attention_mask: (1, 1, S, K), added to the scores.
        softcap: bounds the scores, where a family does so.

    Returns:
        (B, S, heads, D), and no weights.
    """
    batch, heads, new, size = query.shape
    groups, seen = key.shape[1], key.shape[2]
    scores = query.reshape(batch, groups, -1, size) @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = (scores.view(batch, heads, new, seen) + attention_mask).softmax(-1)
    mixed = weights.view(batch, groups, -1, seen) @ value
    return mixed.view(batch, heads, new, -1).transpose(1, 2).contiguous(), None


class _Buffer(Capture):
    """A cache that is filled in place."""

    def __init__(self) -> None:
        super().__init__()
        self._length = 0

    def fit(self, rows: int, room: int) -> None:
        """Keep the first rows, with room for so many tokens."""
        self._room = room
        if self._keys is not None and self._values is not None:
            self._keys, self._values = (self._moved(old, rows) for old in (self._keys, self._values))

    def _moved(self, old: Tensor, rows: int) -> Tensor:
        new = old.new_empty(rows, old.shape[1], self._room, old.shape[3])
        new[:, :, : self._length] = old[:rows, :, : self._length]
        return new

    def update(self, keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        if self._keys is None or self._values is None:
            self._keys, self._values = (
                new.new_empty(*new.shape[:2], self._room, new.shape[3]) for new in (keys, values)
            )
        end = self._length + keys.shape[2]
        self._keys[:, :, self._length : end] = keys
        self._values[:, :, self._length : end] = values
        self._length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


@torch.no_grad()
def write_sequences(
    reference: Reference,
    lengths: Sequence[int],
    seed: int,
    device: str = "cpu",
    track: Callable[[Iterable[int]], Iterable[int]] = lambda items: items,
) -> list[list[int]]:
    """Token sequences that the model writes itself, sampled at temperature 1.

    The first token of each is drawn from what follows the checkpoint's BOS token, or uniformly where it names none.

    Args:
        lengths: tokens of each sequence.
        track: wraps the loop over steps, for a progress bar.

    Returns:
        The sequences, longest first.

    Raises:
        InputError: the model is too large to write text here.
    """
    _refuse_large(reference)
    spec, draw = reference.spec, torch.Generator().manual_seed(seed)
    writer = grouped(reference)
    layers = [writer.module(i, writer.read_layer(i)).to(device) for i in range(len(spec.layers))]
    head = {name: value.to(device) for name, value in writer.head_tensors().items()}
    embedding = writer.source.read("model.embed_tokens.weight").to(device) * spec.embedding_scale
    begin = writer.source.config.get("bos_token_id")
    begin = begin if isinstance(begin, int) and 0 <= begin < spec.vocab_size else None

    found: list[list[int]] = []
    room = CACHE_BYTES // (8 * len(layers) * spec.kv_heads * spec.head_dim)
    for together in _batches(sorted(lengths, reverse=True), room):
        tokens = torch.randint(spec.vocab_size, (len(together),), generator=draw)
        written: list[list[int]] = [[token] if begin is None else [] for token in tokens.tolist()]
        if begin is not None:
            tokens = torch.full_like(tokens, begin)
        caches, first = [_Buffer() for _ in layers], len(written[0])
        for count in track(range(first, together[0])):
            rows = sum(length > count for length in together)
            if count == first or rows < len(tokens):
                tokens = tokens[:rows]
                for cache in caches:
                    cache.fit(rows, together[rows - 1])
            hidden = embedding[tokens.to(device)[:, None]]
            for layer, cache in zip(layers, caches, strict=True):
                hidden, _ = writer.run(layer, hidden, count - first, cache)
            tokens = sample(writer.logits(hidden[:, -1], head), draw)
            for ids, token in zip(written[:rows], tokens.tolist(), strict=True):
                ids.append(token)
        found += written
    return sorted(found, key=len, reverse=True)


def grouped(reference: Reference) -> Reference:
    """The same reference, with `grouped_attention`."""
    from transformers import AttentionInterface

    AttentionInterface.register(GROUPED, grouped_attention)
    return replace(reference, attention=GROUPED, _kept={})


def sample(logits: Tensor, draw: torch.Generator) -> Tensor:
    """One token per row of logits (N, V), at temperature 1: where a uniform number falls among the summed shares."""
    sums = logits.float().softmax(-1).cumsum(-1, dtype=torch.float64)
    uniform = torch.rand(len(logits), 1, generator=draw, dtype=torch.float64).to(sums.device)
    chosen = torch.searchsorted(sums, uniform * sums[:, -1:], right=True)
    return chosen.clamp_(max=logits.shape[1] - 1)[:, 0].cpu()


def _batches(lengths: Sequence[int], room: int) -> list[Sequence[int]]:
    """Lengths, longest first, in as few batches of the same mix as hold no more than `room` tokens at once."""

    def held(together: Sequence[int]) -> int:
        return max(length * rows for rows, length in enumerate(together, 1))

    count = next((n for n in range(1, len(lengths)) if held(lengths[::n]) <= room), len(lengths))
    return [lengths[start::count] for start in range(count)]


def _refuse_large(reference: Reference) -> None:
    sizes = [info.shape for name, info in reference.source.tensors().items() if ".layers." in name]
    total = 4 * sum(torch.Size(shape).numel() for shape in sizes)
    if total > LARGEST_WRITER_BYTES:
        raise InputError(
            f"recipe: calibration: the model has {total / 1e9:.0f} GB in fp32, too much to write its own text; "
            "give calibration.file a text file"
        )
