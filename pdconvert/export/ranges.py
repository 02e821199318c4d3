"""Ranges of an ONNX model's activations on test vectors.

The mask's −40000 would take the whole range of what it is added to, and leave 16 bits for scores a step of 0.6. No
softmax needs it so low: a masked score only has to lie `MASKED_BELOW` under the lowest real one, where exp is 0 beside
any real score. So masked values do not count for a range; they saturate at its low end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pdconvert.export.session import open_session

MASKS = frozenset({"mask", "mask_window"})
"""Inputs that are masks."""
MASKED_VALUE = -20000.0
"""What is lower in a tensor that the mask went into is masked."""
MASKED_BELOW = 24.0
"""How far under the lowest real score a masked one ends up: exp(−24) is 4e−11."""
MOVES = frozenset({"Slice", "Reshape", "Transpose", "Tile", "Identity"})
"""Nodes whose result is masked where their input is, as is that of an Add."""


@dataclass(frozen=True)
class Range:
    """Lowest and highest value of a tensor and zero."""

    low: float
    high: float


@dataclass
class Masked:
    """Tensors that the mask went into.

    Attributes:
        masks: the masks themselves, cut or reshaped.
        sums: scores after the mask was added → the scores before.
    """

    masks: set[str]
    sums: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Any) -> Masked:
        """Follow the masks through a graph."""
        found = cls({item.name for item in graph.input if item.name in MASKS})
        for node in graph.node:
            inputs, output = list(node.input), node.output[0]
            if node.op_type == "Add" and found.masks & set(inputs):
                scores = [name for name in inputs if name not in found.masks]
                if scores:
                    found.sums[output] = scores[0]
            elif node.op_type in MOVES and inputs[0] in found.masks:
                found.masks.add(output)
            elif node.op_type in MOVES and inputs[0] in found.sums:
                found.sums[output] = found.sums[inputs[0]]
        return found


def activations(graph: Any) -> list[str]:
    """Float tensors that are known only when the model runs: inputs and results of nodes."""
    from onnx import TensorProto

    constants = {item.name for item in graph.initializer}
    names = [item.name for item in graph.input if item.type.tensor_type.elem_type == TensorProto.FLOAT]
    for node in graph.node:
        if constants.issuperset(node.input):
            constants.update(node.output)
        else:
            names += node.output
    return names


def observe(model: Path, feeds: Iterable[Mapping[str, np.ndarray]]) -> dict[str, Range]:
    """Run a model and take the range of every activation over all runs.

    Args:
        model: an exported model; a temporary one lies beside it while this runs.
        feeds: inputs by name, float32 or int32.
    """
    import onnx

    proto = onnx.load(model, load_external_data=False)
    names, masked = activations(proto.graph), Masked.of(proto.graph)
    _add_extremes(proto.graph, names, masked)
    instrumented = model.with_name(f"ranges.{model.name}")
    try:
        onnx.save(proto, instrumented)
        session = open_session(instrumented)
        wanted = [output.name for output in session.get_outputs()][-2 * len(names) :]
        found: dict[str, Range] = {}
        for feed in feeds:
            values = [float(value) for value in session.run(wanted, dict(feed))]
            for name, low, high in zip(names, values[::2], values[1::2], strict=True):
                before = found.get(name, Range(0.0, 0.0))
                found[name] = Range(min(before.low, low), max(before.high, high))
    finally:
        instrumented.unlink(missing_ok=True)
    return _with_room(found, masked)


def _add_extremes(graph: Any, names: list[str], masked: Masked) -> None:
    """Outputs with the lowest and the highest value of each tensor; masked values count as zero."""
    from onnx import TensorProto, helper

    limit = helper.make_tensor("ranges_limit", TensorProto.FLOAT, (), [MASKED_VALUE])
    graph.initializer.extend([limit, helper.make_tensor("ranges_zero", TensorProto.FLOAT, (), [0.0])])
    for index, name in enumerate(names):
        seen = name
        if name in masked.masks or name in masked.sums:
            seen, real = f"ranges_seen_{index}", f"ranges_real_{index}"
            graph.node.append(helper.make_node("Greater", [name, "ranges_limit"], [real]))
            graph.node.append(helper.make_node("Where", [real, name, "ranges_zero"], [seen]))
        for kind in ("ReduceMin", "ReduceMax"):
            output = f"ranges_{kind}_{index}"
            graph.node.append(helper.make_node(kind, [seen], [output], keepdims=0))
            graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, ()))


def _with_room(found: dict[str, Range], masked: Masked) -> dict[str, Range]:
    """Ranges with room for masked values under the real ones."""
    result, lowest = dict(found), 0.0
    for name, scores in masked.sums.items():
        low = found[name].low - MASKED_BELOW
        result[name] = Range(low, found[name].high)
        lowest = min(lowest, low - found[scores].high)
    for name in masked.masks:
        result[name] = Range(lowest, found[name].high)
    return result
