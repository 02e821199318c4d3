"""What a recipe's form makes of weights that it does not fit: in words, for plan, manifest, summary and report."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from pdconvert.layer_tensors import block_shapes
from pdconvert.quant.grid import LutLinear, Record

if TYPE_CHECKING:
    from passes import QuantizeWeights
    from pdconvert.model import ModelSpec
    from pdconvert.prepare import Plan

LAYER = re.compile(r"\blayers\.\d+\.")


def size_notes(plan: Plan) -> tuple[str, ...]:
    """A note for every kind of weight whose groups have another size than the recipe's, in either half."""
    from passes import QuantizeWeights

    halves = {"quantize_weights": plan.shared_passes}
    if plan.recipe.decode.grid == "own":
        halves["decode.grid own"] = plan.decode_passes
    return tuple(
        note
        for half, passes in halves.items()
        for item in passes
        if isinstance(item, QuantizeWeights) and item.scheme != "none"
        for note in _replaced(plan.spec, item, half)
    )


def _replaced(spec: ModelSpec, quantizer: QuantizeWeights, half: str) -> list[str]:
    found: dict[str, list[str]] = defaultdict(list)
    for index in range(len(spec.layers)):
        for name, shape in block_shapes(spec, index).items():
            path = f"layers.{index}.{name}"
            if len(shape) != 2:
                continue
            wanted, record = quantizer.wanted_size(path), quantizer.blank(path, (shape[0], shape[1]), "meta")
            what = _instead(record, wanted)
            if what:
                found[what].append(path)
    return [f"{half}: {named(paths)}: {what}" for what, paths in found.items()]


def _instead(record: Record, wanted: int) -> str:
    """What a record has in the place of groups of the wanted size; empty where it has these."""
    (outputs, inputs), bits = record.shape, f"{record.stored_bits / record.codes.numel():.2f} bits per weight"
    if isinstance(record, LutLinear):
        if record.rows == wanted or not wanted:
            return ""
        return f"groups of {wanted} do not divide {outputs} output channels; tables of {record.rows}, {bits}"
    if record.group == wanted:
        return ""
    got = f"groups of {record.group}" if record.group else "one scale per output channel"
    return f"groups of {wanted} do not divide {inputs} input channels; {got}, {bits}"


def fp16_notes(reasons: Mapping[str, str]) -> tuple[str, ...]:
    """A note for every reason for which weights are fp16 in the MLX half, by tensor name."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, why in reasons.items():
        found[why].append(name)
    return tuple(f"decode: {named(names)}: {why}; fp16, 16 bits per weight" for why, names in found.items())


def named(names: Iterable[str]) -> str:
    """Names of tensors in all layers as one, and how many they are: `layers.*.mlp.down_proj (2 weights)`."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in names:
        kinds[LAYER.sub("layers.*.", name.removesuffix(".weight"))].append(name)
    shown = [kind if len(found) > 1 else found[0].removesuffix(".weight") for kind, found in kinds.items()]
    count = sum(map(len, kinds.values()))
    return f"{', '.join(shown)} ({count} weight{'s' if count > 1 else ''})"
