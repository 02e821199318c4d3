"""What a build notes about a layer for its report: the SQNR of every projection, and how its weights lie.

Nothing here decides anything: gates look at the ledger and at the shipped files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pdconvert.measure import sqnr_db
from pdconvert.quant.grid import Record
from pdconvert.quant.store import Stored

SAMPLE = 1 << 18
"""Elements of a tensor that its histogram looks at, in whole rows; more would cost seconds on a large model."""

WEIGHT_BINS, WEIGHT_SPAN = 61, 6.0
"""Bins from −6 to 6 standard deviations; what lies beyond counts in the outer bins."""

CODE_BINS = 51
"""Bins of codes, where there are more codes: the 255 of 8 bits go five to a bin, the middle one around 0."""


@dataclass
class Calls:
    """What the linears of a module took and gave in one run, by module path."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)

    def split(self, fused: Mapping[str, Sequence[str]], rows: Mapping[str, int]) -> Calls:
        """These calls by the block's names: a linear that Hugging Face fuses becomes the several that it holds.

        Args:
            fused: weight name in Hugging Face's layer → weight names in the block, in the order of their rows.
            rows: of each weight in the block.
        """
        found = Calls()
        for path, output in self.outputs.items():
            names = fused[f"{path}.weight"]
            for name, part in zip(names, output.split([rows[name] for name in names], -1), strict=True):
                found.inputs[name], found.outputs[name] = self.inputs[path], part
        return found


@contextmanager
def watch_linears(module: nn.Module) -> Iterator[Calls]:
    """Keep input and output of every linear or 1×1 convolution, (1, S, channels), while the module runs."""
    calls = Calls()

    def keep(path: str, inputs: tuple[Any, ...], output: Any) -> None:
        calls.inputs[path], calls.outputs[path] = channels_last(inputs[0]), channels_last(output)

    hooks = [
        part.register_forward_hook(lambda _, inputs, output, path=path: keep(path, inputs, output))
        for path, part in module.named_modules()
        if isinstance(part, nn.Linear | nn.Conv2d)
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def projections(exact: Calls, shipped: Calls, stored: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """SQNR of each projection's output against what it gives before weights are quantized, in dB.

    Args:
        exact: the block on the reference stream, as the quantizer finds it; by path.
        shipped: the layer with the stored weights on the stream of all stored weights before it; by name of weight.
        stored: these weights, and biases, in fp32, by name.

    Returns:
        Per linear `name`; `isolated_db`: its stored weight alone, on the exact input; `cumulative_db`: in the chain
        of all stored weights up to it.
    """
    rows = []
    for name in shipped.outputs:
        path = name.removesuffix(".weight")
        taken, expected = exact.inputs[path], exact.outputs[path]
        alone = nn.functional.linear(taken, stored[name], stored.get(f"{path}.bias"))
        rows.append(
            {
                "name": _short(name),
                "isolated_db": sqnr_db(expected, alone),
                "cumulative_db": sqnr_db(expected, shipped.outputs[name]),
            }
        )
    return rows


def histograms(weights: Mapping[str, Tensor], stored: Mapping[str, Stored]) -> list[dict[str, Any]]:
    """How the weights of each matrix are distributed, before quantization and as codes.

    Args:
        weights: the checkpoint's fp32 tensors by name in the block; all but matrices are passed over.
        stored: what is shipped, by the same names.

    Returns:
        Per matrix `name`, `shape`, `bits`, `std`, `peak` (largest magnitude), `sampled_rows`, `weights` (counts
        in `WEIGHT_BINS` bins over ± `weights_span` · std), and where it is quantized `codes` (counts) with
        `codes_first` (the lowest code of the first bin) and `codes_per_bin`.
    """
    return [
        _histogram(name, value, stored[name])
        for name, value in sorted(weights.items())
        if value.dim() == 2 and name in stored
    ]


def _histogram(name: str, weight: Tensor, stored: Stored) -> dict[str, Any]:
    every = max(1, -(-weight.numel() // SAMPLE))
    rows = weight[::every]
    std = float(rows.std()) or 1.0
    row: dict[str, Any] = {
        "name": _short(name),
        "shape": list(weight.shape),
        "bits": 16 if isinstance(stored, Tensor) else stored.bits,
        "std": std,
        "peak": float(weight.abs().max()),
        "sampled_rows": len(rows),
        "weights_span": WEIGHT_SPAN,
        "weights": _counts(rows, -WEIGHT_SPAN * std, WEIGHT_SPAN * std, WEIGHT_BINS),
    }
    return row if isinstance(stored, Tensor) else row | _codes(stored, every)


def _codes(record: Record, every: int) -> dict[str, Any]:
    """The histogram of a record's codes: signed ones of a symmetric grid, else from 0."""
    count, signed = 2**record.bits, record.codes.dtype == torch.int8
    first = -count // 2 if signed else 0
    if signed and record.bits == 8:
        first, count = first + 1, count - 1  # −127 … 127
    per_bin = max(1, count // CODE_BINS)
    bins = count // per_bin
    low = first - 0.5
    return {
        "codes": _counts(record.codes[::every].float(), low, low + bins * per_bin, bins),
        "codes_first": first,
        "codes_per_bin": per_bin,
    }


def channels_last(x: Tensor) -> Tensor:
    """Channels last, (1, S, C), of those or of (1, C, 1, S)."""
    return x if x.dim() < 4 else x[:, :, 0].transpose(1, 2)


def _short(name: str) -> str:
    """The projection that a weight belongs to: `q_proj` of `self_attn.q_proj.weight`."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _counts(values: Tensor, low: float, high: float, bins: int) -> list[int]:
    """A histogram whose outer bins hold what lies beyond."""
    edge = (high - low) * 1e-6
    return torch.histc(values.float().clamp(low + edge, high - edge), bins, low, high).int().tolist()
