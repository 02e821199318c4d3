"""The explicit table from MIL ops to ONNX nodes: a row for each op that our packages contain."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pdconvert.executors.mil.view import Op
from pdconvert.export import weights
from pdconvert.export.graph import GraphWriter, refusal

Row = Callable[[GraphWriter, Op], object]

RSQRT_EPSILON = 1e-12
"""MIL's own default."""


def _nodes(kind: str, *parameters: str) -> Row:
    """A node of the same meaning on the named parameters."""
    return lambda graph, op: graph.node(kind, [graph.input(op, name) for name in parameters], op.name)


def _reduce(kind: str) -> Row:
    def row(graph: GraphWriter, op: Op) -> None:
        axes = op.param("axes") or list(range(len(_shape(op, "x"))))
        inputs = [graph.input(op, "x"), graph.integers(op.name, axes)]
        graph.node(kind, inputs, op.name, keepdims=int(op.param("keep_dims", False)))

    return row


def _silu(graph: GraphWriter, op: Op) -> None:
    x = graph.input(op, "x")
    graph.node("Mul", [x, graph.node("Sigmoid", [x], f"{op.name}_sigmoid")], op.name)


def _square(graph: GraphWriter, op: Op) -> None:
    graph.node("Mul", [graph.input(op, "x")] * 2, op.name)


def _rsqrt(graph: GraphWriter, op: Op) -> None:
    epsilon = graph.number(op.name, op.param("epsilon", RSQRT_EPSILON))
    shifted = graph.node("Add", [graph.input(op, "x"), epsilon], f"{op.name}_shifted")
    graph.node("Reciprocal", [graph.node("Sqrt", [shifted], f"{op.name}_root")], op.name)


def _gelu(graph: GraphWriter, op: Op) -> None:
    modes = {"EXACT": "none", "TANH_APPROXIMATION": "tanh"}
    mode = op.param("mode", "EXACT")
    if mode not in modes:
        raise refusal(op, f"has the mode {mode}")
    graph.node("Gelu", [graph.input(op, "x")], op.name, approximate=modes[mode])


def _softmax(graph: GraphWriter, op: Op) -> None:
    graph.node("Softmax", [graph.input(op, "x")], op.name, axis=op.axis())


def _layer_norm(graph: GraphWriter, op: Op) -> None:
    shape = _shape(op, "x")
    axes = sorted(axis % len(shape) for axis in op.param("axes") or range(len(shape)))
    if axes != list(range(axes[0], len(shape))):
        raise refusal(op, f"is over the axes {axes}, not the last ones")
    inputs = [graph.input(op, "x")]
    if op.input("gamma") is None:
        name, sizes = f"{op.name}_ones", shape[axes[0] :]
        graph.add_initializer(name, "FLOAT", sizes, ("ones", sizes), lambda: np.ones(sizes, np.float32))
        inputs.append(name)
    else:
        inputs.append(graph.input(op, "gamma"))
    if op.input("beta") is not None:
        inputs.append(graph.input(op, "beta"))
    epsilon = op.param("epsilon", 1e-5)
    graph.node("LayerNormalization", inputs, op.name, axis=axes[0], epsilon=float(epsilon))


def _conv(graph: GraphWriter, op: Op) -> None:
    kernel = list(_shape(op, "weight")[2:])
    padded = op.param("pad_type", "valid") != "valid" and (
        op.param("pad_type") != "custom" or any(op.param("pad") or ())
    )
    if padded:
        raise refusal(op, "is padded")
    inputs = [graph.input(op, "x"), graph.input(op, "weight")]
    if op.input("bias") is not None:
        inputs.append(graph.input(op, "bias"))
    ones = [1] * len(kernel)
    graph.node(
        "Conv",
        inputs,
        op.name,
        kernel_shape=kernel,
        strides=op.param("strides") or ones,
        dilations=op.param("dilations") or ones,
        group=op.param("groups", 1),
    )


def _linear(graph: GraphWriter, op: Op) -> None:
    flipped = graph.node("Transpose", [graph.input(op, "weight")], f"{op.name}_weight", perm=[1, 0])
    biased = op.input("bias") is not None
    name = f"{op.name}_product" if biased else op.name
    product = graph.node("MatMul", [graph.input(op, "x"), flipped], name)
    if biased:
        graph.node("Add", [product, graph.input(op, "bias")], op.name)


def _matmul(graph: GraphWriter, op: Op) -> None:
    inputs = []
    for side in ("x", "y"):
        name, rank = graph.input(op, side), len(_shape(op, side))
        if op.param(f"transpose_{side}", False):
            order = [*range(rank - 2), rank - 1, rank - 2]
            name = graph.node("Transpose", [name], f"{op.name}_{side}", perm=order)
        inputs.append(name)
    graph.node("MatMul", inputs, op.name)


def _reshape(graph: GraphWriter, op: Op) -> None:
    """reshape, squeeze and expand_dims: the result's shape is known."""
    graph.node("Reshape", [graph.input(op, "x"), graph.integers(op.name, op.out.shape)], op.name)


def _transpose(graph: GraphWriter, op: Op) -> None:
    rank = len(op.out.shape)
    order = [axis % rank for axis in op.param("perm")]
    graph.node("Transpose", [graph.input(op, "x")], op.name, perm=order)


def _tile(graph: GraphWriter, op: Op) -> None:
    graph.node("Tile", [graph.input(op, "x"), graph.integers(op.name, op.param("reps"))], op.name)


def _concat(graph: GraphWriter, op: Op) -> None:
    if op.param("interleave", False):
        raise refusal(op, "interleaves")
    graph.node("Concat", [graph.name(value) for value in op.inputs["values"]], op.name, axis=op.axis())


def _slice(graph: GraphWriter, op: Op) -> None:
    if any(op.param("squeeze_mask") or ()):
        raise refusal(op, "removes an axis")
    shape, steps = _shape(op, "x"), op.param("stride") or [1] * len(_shape(op, "x"))
    if min(steps) < 1:
        raise refusal(op, "runs backwards")
    starts, ends = list(op.param("begin")), list(op.param("end"))
    for bounds, mask, whole in ((starts, "begin_mask", [0] * len(shape)), (ends, "end_mask", shape)):
        for axis, masked in enumerate(op.param(mask) or ()):
            bounds[axis] = whole[axis] if masked else bounds[axis]
    cut = [a for a, size in enumerate(shape) if (starts[a], ends[a], steps[a]) != (0, size, 1)]
    lists = [[values[axis] for axis in cut] for values in (starts, ends)] + [cut, [steps[a] for a in cut]]
    inputs = [graph.integers(op.name, values) for values in lists]
    graph.node("Slice" if cut else "Identity", [graph.input(op, "x"), *inputs][: 5 if cut else 1], op.name)


def _gather(graph: GraphWriter, op: Op) -> None:
    if op.param("batch_dims", 0):
        raise refusal(op, "has batch_dims")
    axis = op.param("axis", 0)
    graph.node("Gather", [graph.input(op, "x"), graph.input(op, "indices")], op.name, axis=axis)


def _read_state(graph: GraphWriter, op: Op) -> None:
    state = graph.input(op, "input")
    graph.node("Identity", [graph.states.get(state, state)], op.name)


def _write_state(graph: GraphWriter, op: Op) -> None:
    graph.states[graph.input(op, "input")] = graph.input(op, "data")


def _shape(op: Op, parameter: str) -> tuple[int, ...]:
    value = op.input(parameter)
    if value is None:
        raise refusal(op, f"has no {parameter}")
    return value.shape


ROWS: dict[str, Row] = {
    "add": _nodes("Add", "x", "y"),
    "sub": _nodes("Sub", "x", "y"),
    "mul": _nodes("Mul", "x", "y"),
    "real_div": _nodes("Div", "x", "y"),
    "maximum": _nodes("Max", "x", "y"),
    "abs": _nodes("Abs", "x"),
    "tanh": _nodes("Tanh", "x"),
    "sigmoid": _nodes("Sigmoid", "x"),
    "relu": _nodes("Relu", "x"),
    "sqrt": _nodes("Sqrt", "x"),
    "identity": _nodes("Identity", "x"),
    "silu": _silu,
    "square": _square,
    "rsqrt": _rsqrt,
    "gelu": _gelu,
    "softmax": _softmax,
    "layer_norm": _layer_norm,
    "reduce_mean": _reduce("ReduceMean"),
    "reduce_max": _reduce("ReduceMax"),
    "reduce_sum": _reduce("ReduceSum"),
    "conv": _conv,
    "linear": _linear,
    "matmul": _matmul,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "transpose": _transpose,
    "tile": _tile,
    "concat": _concat,
    "slice_by_index": _slice,
    "gather": _gather,
    "read_state": _read_state,
    "write_state": _write_state,
    "constexpr_blockwise_shift_scale": weights.shift_scale,
    "constexpr_affine_dequantize": weights.affine,
    "constexpr_lut_to_dense": weights.tables,
}
