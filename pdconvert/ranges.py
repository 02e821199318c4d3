"""Measured ranges of a checkpoint's activations: what `auto` options of passes decide on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pdconvert.basis import Basis, into
from pdconvert.families.config import reference_class
from pdconvert.reference import Reference


@dataclass(frozen=True)
class Ranges:
    """Peaks of absolute values over the probe and the held-out windows, in fp32.

    Attributes:
        residual_peak: of the residual stream, before and after every layer and between its two halves.
        residual_where: the layer in which it peaks.
        peaks: per layer, of every module's output, by module path; "" is the layer itself.
        norm_peak: of the inputs of all norms in layers, those of q and k and behind attention and MLP included.
        norm_where: the norm in which it peaks, by its path.
    """

    residual_peak: float
    residual_where: str
    peaks: dict[str, dict[str, float]]
    norm_peak: float = 0.0
    norm_where: str = ""

    def write(self, folder: Path) -> None:
        """Save as ranges.json in a folder."""
        (folder / "ranges.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Ranges:
        """The reverse of `write`."""
        return cls(**json.loads((folder / "ranges.json").read_text()))


def measure_ranges(
    reference: Reference,
    sequences: Sequence[Sequence[int]],
    readers: Sequence[str],
    basis: Basis | None = None,
) -> Ranges:
    """Run sequences through the reference and keep the peaks.

    Args:
        sequences: token ids, of any lengths.
        readers: paths of the parts whose input is the residual stream (`pdconvert.blocks.stream_inputs`).
        basis: in which the stream is measured; None is the checkpoint's.
    """
    states = [reference.embed(ids)[None] for ids in sequences]
    residual, where = max(float(into(state, basis).abs().max()) for state in states), "embedding"
    peaks: dict[str, dict[str, float]] = {}
    norm_class, norm_peak, norm_where = reference_class(reference.family.NORM), 0.0, ""
    for index in range(len(reference.spec.layers)):
        layer = reference.layer(index)
        found: dict[str, float] = {}
        norms = [path for path, part in layer.named_modules() if isinstance(part, norm_class)]
        stream = {"", *(f"into {path}" for path in readers)}
        hooks = _watch(layer, {*readers, *norms}, found, dict.fromkeys(stream, basis))
        states = [reference.run(layer, state)[0] for state in states]
        for hook in hooks:
            hook.remove()
        inputs = {path: found.pop(f"into {path}") for path in {*readers, *norms}}
        for path in norms:
            if inputs[path] > norm_peak:
                norm_peak, norm_where = inputs[path], f"layers.{index}.{path}"
        peak = max(found[""], *(inputs[path] for path in readers))
        if peak > residual:
            residual, where = peak, f"layers.{index}"
        peaks[f"layers.{index}"] = found
    return Ranges(residual, where, peaks, norm_peak, norm_where)


def _watch(
    layer: nn.Module,
    readers: Iterable[str],
    found: dict[str, float],
    bases: Mapping[str, Basis | None],
) -> list[Any]:
    def keep(name: str, value: Any) -> None:
        tensor = value[0] if isinstance(value, tuple) else value
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            tensor = into(tensor, bases.get(name))
            found[name] = max(
                found.get(name, 0.0),
                float(torch.nan_to_num(tensor.abs(), nan=torch.inf, posinf=torch.inf).max()),
            )

    hooks = [
        part.register_forward_hook(lambda _, __, output, name=name: keep(name, output))
        for name, part in layer.named_modules()
    ]
    for path in readers:
        part = layer.get_submodule(path)
        hooks.append(
            part.register_forward_pre_hook(lambda _, inputs, name=path: keep(f"into {name}", inputs))
        )
    return hooks
