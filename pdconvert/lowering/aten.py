"""The explicit table from aten ops to MIL ops. An op without a row is an error that names the op and its line.

Each row takes the node's arguments (MIL variables, constants and Python values) and the name of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pdconvert.lowering.builder import CONV_DEFAULTS, mb

Row = Callable[..., Any]
ROWS: dict[str, Row] = {}


def row(*targets: str) -> Callable[[Row], Row]:
    """Put a function into the table under the names of aten overloads."""

    def register(function: Row) -> Row:
        ROWS.update(dict.fromkeys(targets, function))
        return function

    return register


def _half(value: Any) -> Any:
    """A Python number as an fp16 constant; a variable as it is."""
    return np.float16(value) if isinstance(value, int | float) else value


def _axis(x: Any, axis: int) -> int:
    return axis % len(x.shape)


def _shape(x: Any, sizes: Sequence[int]) -> list[int]:
    """Sizes with −1 resolved, so that the program holds static shapes only."""
    sizes = list(sizes)
    if -1 in sizes:
        rest = int(np.prod([size for size in sizes if size != -1]))
        sizes[sizes.index(-1)] = int(np.prod(x.shape)) // rest
    return sizes


def _binary(op: Callable[..., Any]) -> Row:
    return lambda name, x, y: op(x=_half(x), y=_half(y), name=name)


def _unary(op: Callable[..., Any]) -> Row:
    return lambda name, x: op(x=x, name=name)


ROWS["aten.mul.Tensor"] = _binary(mb.mul)
ROWS["aten.div.Tensor"] = _binary(mb.real_div)
ROWS["aten.maximum.default"] = _binary(mb.maximum)
ROWS["aten.clamp_min.default"] = _binary(mb.maximum)
ROWS["aten.matmul.default"] = lambda name, x, y, tx=False, ty=False: mb.matmul(
    x=x, y=y, transpose_x=tx, transpose_y=ty, name=name
)
for _target, _op in {
    "abs.default": mb.abs,
    "silu.default": mb.silu,
    "tanh.default": mb.tanh,
    "sigmoid.default": mb.sigmoid,
    "relu.default": mb.relu,
    "sqrt.default": mb.sqrt,
    "square.default": mb.square,
}.items():
    ROWS[f"aten.{_target}"] = _unary(_op)


@row("aten.add.Tensor")
def _add(name: str, x: Any, y: Any, alpha: float = 1) -> Any:
    return mb.add(x=_half(x), y=_half(y if alpha == 1 else mb.mul(x=y, y=np.float16(alpha))), name=name)


@row("aten.sub.Tensor")
def _sub(name: str, x: Any, y: Any) -> Any:
    return mb.sub(x=_half(x), y=_half(y), name=name)


@row("aten.neg.default")
def _neg(name: str, x: Any) -> Any:
    return mb.mul(x=x, y=np.float16(-1), name=name)


@row("aten.reciprocal.default")
def _reciprocal(name: str, x: Any) -> Any:
    return mb.real_div(x=np.float16(1), y=x, name=name)


@row("aten.rsqrt.default")
def _rsqrt(name: str, x: Any) -> Any:
    return mb.rsqrt(x=x, name=name)  # MIL's own epsilon, 1e-12: nothing beside any argument that a norm has


@row("aten.gelu.default")
def _gelu(name: str, x: Any, approximate: str = "none") -> Any:
    mode = "EXACT" if approximate == "none" else "TANH_APPROXIMATION"
    return mb.gelu(x=x, mode=mode, name=name)


@row("aten.mean.dim")
def _mean(name: str, x: Any, axes: Sequence[int], keep_dims: bool = False) -> Any:
    return mb.reduce_mean(x=x, axes=[_axis(x, axis) for axis in axes], keep_dims=keep_dims, name=name)


@row("aten.amax.default")
def _amax(name: str, x: Any, axes: Sequence[int], keep_dims: bool = False) -> Any:
    return mb.reduce_max(x=x, axes=[_axis(x, axis) for axis in axes], keep_dims=keep_dims, name=name)


@row("aten.softmax.int")
def _softmax(name: str, x: Any, axis: int, dtype: Any = None) -> Any:
    return mb.softmax(x=x, axis=_axis(x, axis), name=name)


@row("aten.layer_norm.default")
def _layer_norm(
    name: str,
    x: Any,
    shape: Sequence[int],
    gamma: Any = None,
    beta: Any = None,
    eps: float = 1e-5,
    cudnn: bool = True,
) -> Any:
    axes = list(range(len(x.shape) - len(shape), len(x.shape)))
    return mb.layer_norm(x=x, axes=axes, gamma=gamma, beta=beta, epsilon=np.float16(eps), name=name)


@row("aten.conv2d.default")
def _conv2d(name: str, x: Any, weight: Any, bias: Any = None) -> Any:
    given = {} if bias is None else {"bias": bias}
    return mb.conv(x=x, weight=weight, **given, **CONV_DEFAULTS, name=name)


@row("aten.linear.default")
def _linear(name: str, x: Any, weight: Any, bias: Any = None) -> Any:
    return (
        mb.linear(x=x, weight=weight, bias=bias, name=name)
        if bias is not None
        else mb.linear(x=x, weight=weight, name=name)
    )


@row("aten.view.default", "aten.reshape.default")
def _reshape(name: str, x: Any, shape: Sequence[int]) -> Any:
    return mb.reshape(x=x, shape=_shape(x, shape), name=name)


@row("aten.transpose.int")
def _transpose(name: str, x: Any, first: int, second: int) -> Any:
    order = list(range(len(x.shape)))
    first, second = _axis(x, first), _axis(x, second)
    order[first], order[second] = second, first
    return mb.transpose(x=x, perm=order, name=name)


@row("aten.permute.default")
def _permute(name: str, x: Any, order: Sequence[int]) -> Any:
    return mb.transpose(x=x, perm=[_axis(x, axis) for axis in order], name=name)


@row("aten.squeeze.dim")
def _squeeze(name: str, x: Any, axis: int) -> Any:
    return mb.squeeze(x=x, axes=[_axis(x, axis)], name=name)


@row("aten.unsqueeze.default")
def _unsqueeze(name: str, x: Any, axis: int) -> Any:
    return mb.expand_dims(x=x, axes=[axis], name=name)


@row("aten.expand.default")
def _expand(name: str, x: Any, sizes: Sequence[int]) -> Any:
    repeats = [1 if size in (-1, have) else size for size, have in zip(sizes, x.shape, strict=True)]
    return mb.tile(x=x, reps=repeats, name=name)


@row("aten.cat.default")
def _cat(name: str, values: Sequence[Any], axis: int = 0) -> Any:
    return mb.concat(values=list(values), axis=_axis(values[0], axis), interleave=False, name=name)


@row("aten.narrow.default", "aten.narrow.int")
def _narrow(name: str, x: Any, axis: int, start: int, length: int) -> Any:
    return slice_axis(name, x, _axis(x, axis), start, length)


def slice_axis(name: str, x: Any, axis: int, start: int, length: int) -> Any:
    """`length` entries of one axis from `start`, all others whole."""
    begin, end = [0] * len(x.shape), list(x.shape)
    begin[axis], end[axis] = start, start + length
    return mb.slice_by_index(x=x, begin=begin, end=end, name=name)
