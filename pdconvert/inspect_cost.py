"""How much a function computes and moves, estimated from the shapes in its program.

Only products count as arithmetic: they are nearly all of it in a network. Bytes are counted op by op, so they
are an upper bound: an engine that fuses ops keeps what passes between them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from pdconvert.executors.mil.values import RUN_TIME
from pdconvert.executors.mil.view import FunctionView, Op, Value

_GATHERS = ("gather", "gather_along_axis", "gather_nd")


@dataclass(frozen=True)
class Cost:
    """What one call of a function costs.

    Attributes:
        flops: floating-point operations of products, two for each multiply-and-add.
        weight_bytes: weights and other numbers that ops take, as stored; once for each op that takes them.
        activation_bytes: computed tensors that ops take and give.
        unsized_ops: ops left out because a size is known only when the program runs.
    """

    flops: int
    weight_bytes: int
    activation_bytes: int
    unsized_ops: int


def estimate(function: FunctionView) -> Cost:
    """Estimate a function's cost. Loop bodies count once."""
    flops = weights = activations = unsized = 0
    for op in function.computed_ops:
        if any(RUN_TIME in value.shape for value in (*op.computed(), *op.outputs)):
            unsized += 1
            continue
        flops += 2 * multiply_adds(op)
        if op.type in _GATHERS:  # reads what it gives, not the whole table
            activations += 2 * sum(value.size_bytes for value in op.outputs)
            continue
        weights += sum(_stored_bytes(value) for value in op.values() if value.is_constant)
        activations += sum(value.size_bytes for value in (*op.computed(), *op.outputs))
    return Cost(flops, weights, activations, unsized)


def multiply_adds(op: Op) -> int:
    """Multiply-and-adds of a product of tensors; 0 for every other op. All sizes must be known."""
    count = _PRODUCTS.get(op.type)
    return 0 if count is None else count(op)


def _stored_bytes(value: Value) -> int:
    """Bytes of a constant in the package; parameters such as axes and sizes are no data."""
    records = value.records()
    if records:
        return sum(records.values())
    return value.size_bytes if value.dtype.startswith(("fp", "bf")) else 0


def _shape(op: Op, name: str) -> tuple[int, ...]:
    value = op.input(name)
    return value.shape if value is not None else ()


def _conv(op: Op) -> int:
    weight = _shape(op, "weight")  # (O, I / groups, kernel ...)
    return op.out.elements * math.prod(weight[1:])


def _conv_transpose(op: Op) -> int:
    weight = _shape(op, "weight")  # (I, O / groups, kernel ...)
    return math.prod(_shape(op, "x")) * math.prod(weight[1:])


def _linear(op: Op) -> int:
    return op.out.elements * _shape(op, "weight")[-1]


def _matmul(op: Op) -> int:
    x = _shape(op, "x")
    inner = x[-2] if op.param("transpose_x", False) and len(x) > 1 else x[-1]
    return op.out.elements * inner


def _einsum(op: Op) -> int:
    inputs = str(op.param("equation")).replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for names, value in zip(inputs, op.inputs["values"], strict=True):
        for name, size in zip(names, value.shape, strict=True):
            sizes[name] = max(size, sizes.get(name, 1))
    return math.prod(sizes.values())


def _attention(op: Op) -> int:
    query, key, value = (_shape(op, name) for name in ("query", "key", "value"))
    return math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _recurrent(op: Op) -> int:
    steps, batch, _ = _shape(op, "x")
    names = ("weight_ih", "weight_hh", "weight_ih_back", "weight_hh_back")
    return steps * batch * sum(math.prod(_shape(op, name)) for name in names if op.input(name) is not None)


_PRODUCTS: dict[str, Callable[[Op], int]] = {
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    "linear": _linear,
    "matmul": _matmul,
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention,
    "rnn": _recurrent,
    "gru": _recurrent,
    "lstm": _recurrent,
}
