"""Calibration text: where it comes from, and its way through the layers beside the build.

    tokens ─► layer 0 ─► layer 1 ─► …      with the checkpoint's weights
         └──► layer 0 ─► layer 1 ─► …      with what is stored of the layers so far

Both lie in the checkpoint's basis of the residual stream, whatever that of the stored weights is.
Activations of two streams are held, (tokens, H) in fp32 each, whatever the depth; nothing of them goes to disk.
Sequences of one length run together.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pdconvert import text
from pdconvert.basis import Basis, into, out_of
from pdconvert.errors import InputError
from pdconvert.quant.calibration import Calibration
from pdconvert.quant.store import Stored, dequantized
from pdconvert.reference import Reference

if TYPE_CHECKING:
    from pdconvert.recipe.model import CalibrationText
    from pdconvert.runtime.tokenizer import Tokenizer

BATCH_TOKENS = 2048
"""Tokens that go through a layer together; of longer windows, one."""

OVERLAP_TOKENS = 16
LARGEST_OVERLAP = 0.01
"""Runs of tokens, and the largest share of those of the calibration text that the held-out text may have too."""


def sequence_lengths(wanted: CalibrationText, positions: int) -> tuple[int, ...]:
    """Tokens of each sequence, longest first: every length has the same share of the tokens.

    A length that its share does not fill by half is left out.

    Args:
        positions: those of the model, which no sequence exceeds.
    """
    lengths = sorted({min(length, positions) for length in wanted.length}, reverse=True)
    share = wanted.tokens / len(lengths)
    found = [length for length in lengths for _ in range(round(share / length))]
    return tuple(found) or (lengths[-1],)


def read_sequences(path: Path, tokenizer: Tokenizer, lengths: Sequence[int]) -> list[list[int]]:
    """Token sequences from a text file, or from the `text` fields of a JSONL file, evenly spread.

    Args:
        lengths: tokens of each sequence.

    Raises:
        InputError: the file is missing, is not UTF-8 text or JSONL, or is too short.
    """
    content = text.read(path, "recipe: calibration.file")
    if path.suffix == ".jsonl":
        content = "\n\n".join(
            _jsonl_text(path, number, line) for number, line in enumerate(content.splitlines(), 1)
        )
    ids = tokenizer.encode(content)
    free = len(ids) - sum(lengths)
    if free < 0:
        raise InputError(
            f"recipe: calibration.file: {path} has {len(ids)} tokens, and {len(lengths)} sequences need "
            f"{sum(lengths)}; give more text, or fewer calibration.tokens"
        )
    found, start = [], 0
    for index, length in enumerate(lengths):
        gap = free * index // max(1, len(lengths) - 1)
        found.append(list(ids[start + gap : start + gap + length]))
        start += length
    return found


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


def random_sequences(vocab_size: int, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Seeded tokens, for models with random weights."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(length)] for length in lengths]


def refuse_held_out(path: Path, sequences: Iterable[Sequence[int]], held_out: Sequence[int]) -> None:
    """Refuse calibration text that the build is measured on.

    Raises:
        InputError: runs of tokens are in the held-out text too.
    """
    known = set(_runs(held_out))
    runs = [run for ids in sequences for run in _runs(ids)]
    share = sum(run in known for run in runs) / max(1, len(runs))
    if share > LARGEST_OVERLAP:
        raise InputError(
            f"recipe: calibration.file: {100 * share:.0f} % of {path} is in the held-out text, the help of Python, "
            "and a loss on text that was seen says nothing; calibrate on another text"
        )


def _runs(ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return (tuple(ids[start : start + OVERLAP_TOKENS]) for start in range(len(ids) - OVERLAP_TOKENS + 1))


def by_length(sequences: Iterable[Sequence[int]]) -> list[Tensor]:
    """Token ids, (N, W) for each run of N sequences of W tokens."""
    return [torch.tensor([list(ids) for ids in alike]) for _, alike in groupby(sequences, key=len)]


def describe(
    wanted: CalibrationText, random_weights: bool, sequences: Sequence[Sequence[int]]
) -> dict[str, Any] | None:
    """The calibration text for the manifest, its fit not measured yet; None where there was none."""
    if not sequences:
        return None
    counts = Counter(map(len, sequences))
    return {
        "text": "random tokens" if random_weights else wanted.file or "written by the model",
        "sequences": len(sequences),
        "lengths": {str(length): counts[length] for length in sorted(counts)},
        "tokens": sum(map(len, sequences)),
        "sha256": hashlib.sha256(json.dumps([list(ids) for ids in sequences]).encode()).hexdigest(),
        "fit": None,
    }


@dataclass
class Flow:
    """Calibration text between two layers.

    Attributes:
        sequences: token ids; those of one length side by side.
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
    _streams: list[list[Tensor]] = field(default_factory=list)

    @torch.no_grad()
    def before(self, index: int, stored: Callable[[int], dict[str, Stored]]) -> Calibration:
        """The streams before layer `index`; `stored` gives the tensors of the layers before it."""
        if not self._streams:
            groups, scale = by_length(self.sequences), self.reference.spec.embedding_scale
            original = self.reference.source.read("model.embed_tokens.weight")
            self._streams = [
                [(table[ids] * scale).to(self.device) for ids in groups]
                for table in (original, self.embedding())
            ]
            self._streams[1] = [out_of(hidden, self.basis) for hidden in self._streams[1]]
        while self._index < index:
            original_tensors = self.reference.read_layer(self._index)
            values = stored(self._index)
            kept = {name: dequantized(values[name]).view(old.shape) for name, old in original_tensors.items()}
            for side, (tensors, basis) in enumerate(((original_tensors, None), (kept, self.basis))):
                layer = self.reference.module(self._index, tensors).to(self.device)
                for hidden in self._streams[side]:
                    size = max(1, BATCH_TOKENS // hidden.shape[1])
                    for part in hidden.split(size):  # in place: a stream may take hundreds of megabytes
                        part.copy_(out_of(self.reference.run(layer, into(part, basis))[0], basis))
            self._index += 1
        probe = partial(self.reference.probe, index)
        return Calibration(self._streams[0], self._streams[1], probe, self.device, self.nearest)
