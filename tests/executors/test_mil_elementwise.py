"""Every elementwise op and activation against coremltools' value inference, or torch where it has none."""

from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from mil_programs import Case, check_op

FLOATS = (np.float32, np.float16)
SHAPES = ((), (7,), (2, 3), (1, 4, 1, 5), (2, 1, 3, 2, 2))
PAIRS = (
    ((), ()),
    ((3,), ()),
    ((2, 3), (3,)),
    ((2, 1, 4), (3, 1)),
    ((1, 2, 1, 3), (1, 2, 4, 3)),
    ((0, 3), (3,)),
)
EDGES = (0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 6.0, 6.5, 1e-7, -1e-7, 3.25, 10.0, -10.0)


def values(seed: int, shape: tuple[int, ...], dtype: type, low: float = -10, high: float = 10) -> np.ndarray:
    """Random values of [low, high], some replaced by those edge values that lie inside."""
    rng = np.random.default_rng(seed)
    array = rng.uniform(low, high, shape)
    flat = np.atleast_1d(array).reshape(-1)
    edges = [e for e in EDGES if low <= e <= high]
    for place in rng.permutation(flat.size)[: flat.size // 2]:
        flat[place] = edges[rng.integers(len(edges))]
    return flat.reshape(shape).astype(dtype)


def integers(seed: int, shape: tuple[int, ...], low: int = -9, high: int = 9) -> np.ndarray:
    """Random int32 of [low, high]."""
    return np.random.default_rng(seed).integers(low, high + 1, shape).astype(np.int32)


def unary(
    low: float = -10, high: float = 10, *, ints: bool = False, expected: Callable | None = None
) -> Callable:
    """Cases of a unary op on values of [low, high]."""

    def cases() -> Iterator[Case]:
        for seed, (shape, dtype) in enumerate(product(SHAPES, FLOATS)):
            yield Case({"x": values(seed, shape, dtype, low, high)}, expected=expected)
        if ints:
            for seed, shape in enumerate(SHAPES[1:]):
                yield Case({"x": integers(seed, shape)}, expected=expected)

    return cases


def binary(low: float = -10, high: float = 10, *, ints: bool = True, nonzero: bool = False) -> Callable:
    """Cases of a binary op with broadcasting in both orders."""

    def fill(array: np.ndarray) -> np.ndarray:
        return np.where(array == 0, np.asarray(3, array.dtype), array) if nonzero else array

    def cases() -> Iterator[Case]:
        for seed, (pair, dtype) in enumerate(product(PAIRS, FLOATS)):
            for one, two in (pair, pair[::-1]):
                x, y = values(seed, one, dtype, low, high), values(seed + 99, two, dtype, low, high)
                yield Case({"x": x, "y": fill(y)}, expected=None if x.size and y.size else _empty(one, two))
        if ints:
            for seed, (one, two) in enumerate(PAIRS[1:-1]):
                yield Case({"x": integers(seed, one), "y": fill(integers(seed + 99, two))})

    return cases


def _empty(one: tuple[int, ...], two: tuple[int, ...]) -> Callable:
    return lambda x, y: np.empty(np.broadcast_shapes(one, two))


def logical() -> Iterator[Case]:
    for seed, (one, two) in enumerate(PAIRS[1:-1]):
        rng = np.random.default_rng(seed)
        yield Case({"x": rng.random(one) < 0.5, "y": rng.random(two) < 0.5})


def logical_not() -> Iterator[Case]:
    for seed, shape in enumerate(SHAPES[1:]):
        yield Case({"x": np.random.default_rng(seed).random(shape) < 0.5})


def with_params(
    names: str,
    choices: Iterable[tuple],
    low: float = -10,
    high: float = 10,
    expected: Callable[..., Callable] | None = None,
) -> Callable:
    """Cases of a unary op with scalar parameters, each in the type of x."""

    def cases() -> Iterator[Case]:
        for seed, (shape, dtype, chosen) in enumerate(product(SHAPES[1:4], FLOATS, choices)):
            params = {n: dtype(c) for n, c in zip(names.split(), chosen, strict=True)}
            reference = expected(**params) if expected else None
            yield Case({"x": values(seed, shape, dtype, low, high)}, params, reference)

    return cases


def gelu() -> Iterator[Case]:
    for seed, (shape, dtype) in enumerate(product(SHAPES[1:], FLOATS)):
        for mode in ("EXACT", "TANH_APPROXIMATION", "SIGMOID_APPROXIMATION"):
            yield Case({"x": values(seed, shape, dtype)}, {"mode": mode})


def softmax() -> Iterator[Case]:
    for seed, (shape, dtype) in enumerate(product(SHAPES[1:], FLOATS)):
        for axis in range(-len(shape), len(shape)):
            yield Case({"x": values(seed, shape, dtype, -60, 60)}, {"axis": axis})


def per_channel(names: str, low: float = -5, high: float = 5) -> Callable:
    """Cases of an activation with one parameter vector over channels."""

    def cases() -> Iterator[Case]:
        for seed, (shape, dtype) in enumerate(product(((2, 3, 4, 5), (1, 3, 1, 1)), FLOATS)):
            vectors = {n: values(seed + i, (3,), dtype, 0.1, 2) for i, n in enumerate(names.split())}
            yield Case({"x": values(seed, shape, dtype, low, high), **vectors})

    return cases


def select() -> Iterator[Case]:
    for seed, (one, two) in enumerate(PAIRS[1:-1]):
        rng = np.random.default_rng(seed)
        shape = np.broadcast_shapes(one, two)
        for make in (
            lambda s, n: values(n, s, np.float32),
            lambda s, n: values(n, s, np.float16),
            lambda s, n: integers(n, s),
        ):
            yield Case(
                {"cond": rng.random(shape) < 0.5, "a": make(shape, seed), "b": make(shape, seed + 9)},
                expected=lambda cond, a, b: np.where(cond, a, b),
            )  # fmt: skip


def cast() -> Iterator[Case]:
    floats = values(0, (40,), np.float32, -100, 100)
    for dtype in ("fp16", "fp32", "int32", "bool"):
        yield Case({"x": floats}, {"dtype": dtype}, rtol=1e-3)
        yield Case({"x": floats.astype(np.float16)}, {"dtype": dtype})
        yield Case({"x": integers(1, (40,), -2000, 2000)}, {"dtype": dtype})
        yield Case({"x": integers(2, (40,)) > 0}, {"dtype": dtype})
    for dtype in ("int8", "uint8", "int16", "uint16"):
        yield Case({"x": np.abs(floats)}, {"dtype": dtype}, since=17)
        yield Case({"x": integers(3, (40,), 0, 100)}, {"dtype": dtype}, since=17)
        yield Case({"x": np.array([-1, 70000, -65536, 300], np.int32)}, {"dtype": dtype}, since=17)


def _torch(function: Callable) -> Callable:
    return lambda x: function(torch.from_numpy(np.asarray(x))).numpy()


POSITIVE = {"low": 0.01, "high": 10}
CASES: dict[str, Callable[[], Iterable[Case]]] = {
    "abs": unary(ints=True),
    "acos": unary(-1, 1),
    "asin": unary(-1, 1),
    "atan": unary(),
    "atanh": unary(-0.9, 0.9),
    "ceil": unary(),
    "cos": unary(),
    "cosh": unary(-5, 5),
    "erf": unary(-4, 4),
    "exp": unary(-8, 8),
    "exp2": unary(-8, 8),
    "floor": unary(),
    "logical_not": logical_not,
    "round": unary(),
    "sign": unary(ints=True),
    "sin": unary(),
    "sinh": unary(-5, 5),
    "sqrt": unary(0, 10),
    "square": unary(ints=True),
    "tan": unary(-1.4, 1.4),
    "tanh": unary(),
    "clip": with_params("alpha beta", [(-1, 1), (0, 6), (2, 2.5), (-0.5, 3)]),
    "threshold": with_params("alpha", [(0,), (-1.5,), (2,)]),
    "inverse": with_params("epsilon", [(0,), (1e-3,), (0.5,)], **POSITIVE),
    "log": with_params("epsilon", [(0,), (1e-3,), (0.5,)], **POSITIVE),
    "rsqrt": with_params("epsilon", [(0,), (1e-3,), (0.5,)], **POSITIVE),
    "add": binary(),
    "sub": binary(),
    "mul": binary(),
    "real_div": binary(nonzero=True, ints=False),
    "floor_div": binary(nonzero=True),
    "mod": binary(nonzero=True),
    "pow": binary(0.5, 3, ints=False),
    "maximum": binary(),
    "minimum": binary(),
    "equal": binary(),
    "not_equal": binary(),
    "less": binary(),
    "less_equal": binary(),
    "greater": binary(),
    "greater_equal": binary(),
    "logical_and": logical,
    "logical_or": logical,
    "logical_xor": logical,
    "select": select,
    "cast": cast,
    "clamped_relu": with_params("alpha beta", [(0.1, 3), (2, 1), (-1, 6), (0, 0)]),
    "elu": with_params("alpha", [(1,), (0.3,), (0,)]),
    "gelu": gelu,
    "leaky_relu": with_params("alpha", [(0.01,), (1,), (-0.5,)]),
    "linear_activation": with_params("alpha beta", [(1, 0), (-2, 0.5), (0, 3)]),
    "prelu": per_channel("alpha"),
    "relu": unary(),
    "relu6": unary(),
    "scaled_tanh": with_params("alpha beta", [(1, 1), (1.7, 0.66), (-1, 2)]),
    "sigmoid": unary(),
    "sigmoid_hard": with_params("alpha beta", [(0.2, 0.5), (1, 0), (-1, 0.5)]),
    "silu": unary(expected=_torch(torch.nn.functional.silu)),
    "softmax": softmax,
    "softplus": unary(),
    "softplus_parametric": per_channel("alpha beta"),
    "softsign": unary(),
    "thresholded_relu": with_params("alpha", [(0,), (1,), (-2,)]),
}  # fmt: skip


@pytest.mark.parametrize("op", CASES)
def test_op(op: str, tmp_path: Path) -> None:
    check_op(op, CASES[op](), tmp_path)
