"""Calibration text: where it comes from, and its way through the layers beside the build.

    tokens ─► layer 0 ─► layer 1 ─► …      with the checkpoint's weights
         └──► layer 0 ─► layer 1 ─► …      with what is stored of the layers so far

Both lie in the checkpoint's basis of the residual stream, whatever that of the stored weights is.
Activations of two streams are held, (N, W, H) each, whatever the depth; nothing of them goes to disk.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pdconvert.basis import Basis, into, out_of
from pdconvert.errors import InputError
from pdconvert.quant.calibration import Calibration
from pdconvert.quant.store import Stored, dequantized
from pdconvert.reference import Capture, Reference

if TYPE_CHECKING:
    from pdconvert.recipe.model import CalibrationText
    from pdconvert.runtime.tokenizer import Tokenizer

BATCH = 4
"""Windows that go through a layer together."""

LARGEST_WRITER_BYTES = 10 * 10**9
"""A model above this size in fp32 does not write its own calibration text: it would not fit beside the rest."""

CACHE_BYTES = 1600 * 10**6
"""Keys and values held while the model writes."""


class _Buffer(Capture):
    """A cache with room for all tokens, filled in place."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room, self._length = room, 0

    def update(self, keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        if self._keys is None or self._values is None:
            self._keys, self._values = (
                torch.empty(*new.shape[:2], self._room, new.shape[3], dtype=new.dtype, device=new.device)
                for new in (keys, values)
            )
        end = self._length + keys.shape[2]
        self._keys[:, :, self._length : end] = keys
        self._values[:, :, self._length : end] = values
        self._length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


@torch.no_grad()
def write_sequences(reference: Reference, count: int, length: int, seed: int, device: str) -> list[list[int]]:
    """Token sequences that the model writes itself, sampled at temperature 1.

    The first token of each is drawn from what follows the checkpoint's BOS token, or uniformly where it names none.

    Raises:
        InputError: the model is too large to write text here.
    """
    sizes = [info.shape for name, info in reference.source.tensors().items() if ".layers." in name]
    total = 4 * sum(torch.Size(shape).numel() for shape in sizes)
    if total > LARGEST_WRITER_BYTES:
        raise InputError(
            f"recipe: calibration: the model has {total / 1e9:.0f} GB in fp32, too much to write its own text; "
            "give calibration.file a text file"
        )
    spec, draw = reference.spec, torch.Generator().manual_seed(seed)
    layers = [reference.module(i, reference.read_layer(i)).to(device) for i in range(len(spec.layers))]
    head = {name: value.to(device) for name, value in reference.head_tensors().items()}
    embedding = reference.source.read("model.embed_tokens.weight").to(device) * spec.embedding_scale
    per_row = 8 * length * len(layers) * spec.kv_heads * spec.head_dim
    batch = max(1, min(count, CACHE_BYTES // per_row))

    dice = torch.Generator(device).manual_seed(seed)

    def sample(logits: Tensor) -> Tensor:
        """The most likely token after division by exponential noise is a sample."""
        chances = logits.float().softmax(-1)
        return (
            (chances / torch.empty_like(chances).exponential_(generator=dice)).argmax(-1, keepdim=True).cpu()
        )

    found: list[list[int]] = []
    begin = reference.source.config.get("bos_token_id")
    for start in range(0, count, batch):
        rows = min(batch, count - start)
        caches = [_Buffer(length + 1) for _ in layers]
        begins = isinstance(begin, int) and 0 <= begin < spec.vocab_size
        first = (
            [begin] * rows
            if begins
            else [int(i) for i in torch.randint(spec.vocab_size, (rows,), generator=draw)]
        )
        tokens = torch.tensor(first)[:, None]
        written = [] if begins else [tokens]
        position = 0
        while len(written) < length:
            hidden = embedding[tokens.to(device)]
            for layer, cache in zip(layers, caches, strict=True):
                hidden, _ = reference.run(layer, hidden, position, cache)
            tokens = sample(reference.logits(hidden[:, -1], head))
            written.append(tokens)
            position += 1
        found += torch.cat(written, 1).tolist()
    return found


def read_sequences(path: Path, tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    """Token sequences from a text file, or from the `text` fields of a JSONL file, evenly spread.

    Raises:
        InputError: the file is missing, is not UTF-8 text or JSONL, or is too short.
    """
    try:
        content = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"recipe: calibration.file: {path} cannot be read as UTF-8 text ({error})"
        ) from error
    if path.suffix == ".jsonl":
        content = "\n\n".join(
            _jsonl_text(path, number, line) for number, line in enumerate(content.splitlines(), 1)
        )
    ids = tokenizer.encode(content)
    if len(ids) < count * length:
        raise InputError(
            f"recipe: calibration.file: {path} has {len(ids)} tokens, and {count} sequences of {length} need "
            f"{count * length}; give more text or fewer sequences"
        )
    stride = (len(ids) - length) // max(1, count - 1) if count > 1 else 0
    return [list(ids[start * stride : start * stride + length]) for start in range(count)]


def _jsonl_text(path: Path, number: int, line: str) -> str:
    try:
        value = json.loads(line) if line.strip() else {"text": ""}
    except json.JSONDecodeError as error:
        raise InputError(
            f"recipe: calibration.file: {path} line {number} is not JSON ({error.msg})"
        ) from error
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        raise InputError(
            f'recipe: calibration.file: {path} line {number} has no "text"; expected {{"text": "…"}}'
        )
    return str(value["text"])


def random_sequences(vocab_size: int, count: int, length: int, seed: int) -> list[list[int]]:
    """Seeded tokens, for models with random weights."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def describe(
    wanted: CalibrationText, random_weights: bool, sequences: Sequence[Sequence[int]]
) -> dict[str, Any] | None:
    """The calibration text for the manifest; None where there was none."""
    if not sequences:
        return None
    return {
        "text": "random tokens" if random_weights else wanted.file or "written by the model",
        "sequences": len(sequences),
        "tokens": sum(map(len, sequences)),
        "sha256": hashlib.sha256(json.dumps([list(ids) for ids in sequences]).encode()).hexdigest(),
    }


@dataclass
class Flow:
    """Calibration text between two layers.

    Attributes:
        sequences: token ids, N of equal length W.
        embedding: the stored embedding, fp32 (V, H), not scaled.
        basis: of the residual stream in the stored weights; None is the checkpoint's.
        nearest: how the recipe's quantizer rounds to nearest.
    """

    reference: Reference
    sequences: Sequence[Sequence[int]]
    embedding: Callable[[], Tensor]
    device: str = "cpu"
    basis: Basis | None = None
    nearest: Callable[[Tensor, str], Tensor] = lambda matrix, path: matrix
    _index: int = 0
    _streams: list[Tensor] = field(default_factory=list)

    @torch.no_grad()
    def before(self, index: int, stored: Callable[[int], dict[str, Stored]]) -> Calibration:
        """The streams before layer `index`; `stored` gives the tensors of the layers before it."""
        if not self._streams:
            ids, scale = torch.tensor(self.sequences), self.reference.spec.embedding_scale
            original = self.reference.source.read("model.embed_tokens.weight")
            self._streams = [(table[ids] * scale).to(self.device) for table in (original, self.embedding())]
            self._streams[1] = out_of(self._streams[1], self.basis)
        while self._index < index:
            original_tensors = self.reference.read_layer(self._index)
            values = stored(self._index)
            kept = {name: dequantized(values[name]).view(old.shape) for name, old in original_tensors.items()}
            for side, (tensors, basis) in enumerate(((original_tensors, None), (kept, self.basis))):
                layer = self.reference.module(self._index, tensors).to(self.device)
                hidden = self._streams[side]
                for start in range(
                    0, len(hidden), BATCH
                ):  # in place: a stream may take hundreds of megabytes
                    part = slice(start, start + BATCH)
                    hidden[part] = out_of(self.reference.run(layer, into(hidden[part], basis))[0], basis)
            self._index += 1
        probe = partial(self.reference.probe, index)
        return Calibration(self._streams[0], self._streams[1], probe, self.device, self.nearest)
