"""What a block's linears see on calibration text: their inputs, stage by stage.

    reference windows ─► the block with the checkpoint's weights ─► inputs X of every linear
    stored windows    ─► the block, what is quantized so far     ─► inputs X̂ of one stage ─► X̂ᵀX̂, X̂ᵀX

Linears that read the same tensor form a stage. A stage's inputs are taken after the stages before it were
quantized, so that each one can make up for their error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pdconvert.observe import channels_last
from pdconvert.program import Block, Probe

LINEAR = (nn.Linear, nn.Conv2d)


@dataclass(frozen=True)
class Calibration:
    """Calibration text before a block.

    Attributes:
        reference: windows through the checkpoint's own weights, (N, W, H) for each of their lengths W.
        stored: the same through the weights that are shipped.
        probe: (1, W, H) → what the block is run on.
        device: where the arithmetic is done.
        nearest: a weight (O, I), by block and name, as the recipe's quantizer would round it to nearest.
    """

    reference: Sequence[Tensor]
    stored: Sequence[Tensor]
    probe: Callable[[Tensor], Probe]
    device: str = "cpu"
    nearest: Callable[[Tensor, str], Tensor] = lambda matrix, path: matrix

    def windows(self, hidden: Sequence[Tensor]) -> Iterator[Probe]:
        """One probe per window of one of the two."""
        for alike in hidden:
            for window in alike:
                yield self.probe(window[None]).to(self.device)


@dataclass(frozen=True)
class Grams:
    """Sums over the tokens of a stage's inputs.

    Attributes:
        own: (I, I), X̂ᵀX̂, inputs behind quantized weights.
        cross: (I, I), X̂ᵀX, with the reference's.
    """

    own: Tensor
    cross: Tensor


class _Reached(Exception):
    """The input that was wanted is there; the rest of the block need not run."""


def stages(block: Block, probe: Probe) -> list[list[str]]:
    """Names of the block's linears in the order in which they run; those that read one tensor are together."""
    seen: list[tuple[Tensor, list[str]]] = []

    def note(name: str, x: Tensor) -> None:
        if seen and seen[-1][0] is x:
            seen[-1][1].append(name)
        else:
            seen.append((x, [name]))

    with _watching(block, note):
        block.run(probe)
    return [names for _, names in seen]


def reference_inputs(block: Block, calibration: Calibration, names: Sequence[str]) -> dict[str, Tensor]:
    """Inputs of the named linears on all reference windows: name → (tokens, I)."""
    found: dict[str, Tensor] = {}
    tokens = sum(alike.shape[0] * alike.shape[1] for alike in calibration.reference)
    start = 0

    def take(name: str, x: Tensor) -> None:
        if name in names:
            rows = _rows(x)
            if name not in found:
                found[name] = rows.new_empty(tokens, rows.shape[1])
            found[name][start : start + len(rows)] = rows

    with _watching(block, take):
        for probe in calibration.windows(calibration.reference):
            block.run(probe)
            start += probe.hidden.shape[1]
    return found


def mean_magnitudes(block: Block, calibration: Calibration, names: Sequence[str]) -> dict[str, Tensor]:
    """Mean of |x| over all stored windows, x the inputs of the named linears: name → (I,)."""
    sums: dict[str, Tensor] = {}
    tokens = 0

    def add(name: str, x: Tensor) -> None:
        if name in names:
            sums[name] = sums.get(name, 0) + _rows(x).abs().sum(0)

    with _watching(block, add):
        for probe in calibration.windows(calibration.stored):
            block.run(probe)
            tokens += probe.hidden.shape[1]
    return {name: total / tokens for name, total in sums.items()}


def grams(block: Block, calibration: Calibration, name: str, reference: Tensor) -> Grams:
    """Sums over all stored windows of the inputs of linear `name`; `reference` is (tokens, I)."""
    found: list[Tensor] = []

    def take(module: str, x: Tensor) -> None:
        if module == name:
            found.append(_rows(x))
            raise _Reached

    size = reference.shape[1]
    own, cross = (torch.zeros(size, size, device=reference.device) for _ in range(2))
    start = 0
    with _watching(block, take):
        for probe in calibration.windows(calibration.stored):
            try:
                block.run(probe)
            except _Reached:
                rows = found.pop()
            own.addmm_(rows.T, rows)
            cross.addmm_(rows.T, reference[start : start + len(rows)])
            start += len(rows)
    return Grams(own, cross)


class _watching:
    """While it is open, `note(name, input)` is called before each linear of the block runs."""

    def __init__(self, block: Block, note: Callable[[str, Tensor], None]) -> None:
        self._block, self._note = block, note

    def __enter__(self) -> None:
        self._hooks = [
            part.register_forward_pre_hook(lambda module, args, name=name: self._note(name, args[0]))
            for name, part in self._block.module.named_modules()
            if isinstance(part, LINEAR)
        ]

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()


def _rows(x: Tensor) -> Tensor:
    """A linear's input, (1, S, I) or (1, I, 1, S), as rows (S, I)."""
    return channels_last(x)[0]
