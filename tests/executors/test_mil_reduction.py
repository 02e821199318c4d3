"""Reductions, `cumsum`, sorting and `topk` against coremltools' value inference."""

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from mil_programs import Case, check_op
from test_mil_elementwise import FLOATS, integers, values

SHAPES = ((5,), (2, 3), (2, 1, 4), (1, 3, 2, 4))


def reduce(low: float = -4, high: float = 4, *, ints: bool = True) -> Callable[[], Iterator[Case]]:
    """Cases over all subsets of axes, counted from both ends, with and without the reduced axes kept."""

    def cases() -> Iterator[Case]:
        for seed, (shape, keep) in enumerate(product(SHAPES, (False, True))):
            rank = len(shape)
            for dtype in FLOATS:
                yield Case({"x": values(seed, shape, dtype, low, high)}, {"keep_dims": keep})
            for count in range(1, rank + 1):
                for axes in combinations(range(rank), count):
                    signed = [axis - rank if (axis + seed) % 2 else axis for axis in axes]
                    x = values(seed, shape, np.float32, low, high)
                    yield Case({"x": x}, {"axes": signed, "keep_dims": keep})
            if ints:
                yield Case({"x": integers(seed, shape, 1, 9)}, {"axes": [-1], "keep_dims": keep})
        if ints:
            huge = np.array([[2**31 - 1, 2**31 - 1, 5], [70000, 1, -(2**31)]], np.int32)
            yield Case({"x": huge}, {"axes": [1]})  # sums wrap around
        none = np.zeros(0, np.int32)
        yield Case({"x": values(0, (2, 3), np.float32, max(low, 0.5), high)}, {"axes": none})

    return cases


def truncated(function: Callable) -> Callable[[], Iterator[Case]]:
    """Cases of a reduction whose integer form is cut to an integer."""

    def cases() -> Iterator[Case]:
        yield from reduce(0.5, 4, ints=False)()
        for seed, shape in enumerate(SHAPES):
            yield Case(
                {"x": integers(seed, shape, 1, 9)},
                {"axes": [-1], "keep_dims": False},
                expected=lambda x: np.trunc(function(x.astype(np.float64))),
            )

    return cases


def distinct(seed: int, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Values without ties, in random order, that every type holds exactly."""
    count = int(np.prod(shape))
    return (np.random.default_rng(seed).permutation(count) - count // 2).reshape(shape).astype(dtype)


def argument() -> Iterator[Case]:
    for seed, (shape, keep) in enumerate(product(SHAPES, (False, True))):
        for axis in range(-len(shape), len(shape)):
            for dtype in (*FLOATS, np.int32):
                yield Case({"x": distinct(seed, shape, dtype)}, {"axis": axis, "keep_dims": keep})
        yield Case({"x": distinct(seed, shape, np.float32)}, {"output_dtype": "uint16"}, since=17)


def argsort() -> Iterator[Case]:
    for seed, shape in enumerate(SHAPES):
        for axis, ascending in product(range(-len(shape), len(shape)), (False, True)):
            yield Case({"x": distinct(seed, shape, np.float32)}, {"axis": axis, "ascending": ascending})
            yield Case({"x": distinct(seed, shape, np.int32)}, {"axis": axis, "ascending": ascending})


def topk() -> Iterator[Case]:
    for seed, shape in enumerate(SHAPES):
        for axis, ascending in product(range(-len(shape), len(shape)), (False, True)):
            for k in sorted({1, shape[axis] // 2 + 1, shape[axis]}):
                x = distinct(seed, shape, (*FLOATS, np.int32)[(axis + k) % 3])
                yield Case({"x": x}, {"k": k, "axis": axis, "ascending": ascending})
    for sort, indices in product((False, True), (False, True)):
        x = {"x": distinct(3, (3, 6), np.float32)}
        yield Case(x, {"k": 2, "axis": 1, "sort": sort, "return_indices": indices}, since=16)
    yield Case({"x": distinct(3, (3, 6), np.float32)}, {"k": 2, "output_indices_dtype": "uint16"}, since=17)


def cumsum() -> Iterator[Case]:
    def reference(axis: int, exclusive: bool, reverse: bool) -> Callable[..., np.ndarray]:
        def compute(x: np.ndarray) -> np.ndarray:
            given = np.flip(x, axis) if reverse else x
            total = np.cumsum(given, axis, dtype=x.dtype)
            if exclusive:
                total = total - given
            return np.flip(total, axis) if reverse else total

        return compute

    for seed, shape in enumerate(SHAPES):
        for axis, exclusive, reverse in product(range(-1, len(shape)), (False, True), (False, True)):
            params = {"axis": axis, "exclusive": exclusive, "reverse": reverse}
            for x in (
                values(seed, shape, np.float32),
                values(seed, shape, np.float16),
                integers(seed, shape),
            ):
                yield Case({"x": x}, params, reference(axis, exclusive, reverse))


CASES: dict[str, Callable[[], Iterable[Case]]] = {
    "reduce_argmax": argument,
    "reduce_argmin": argument,
    "reduce_l1_norm": reduce(),
    "reduce_l2_norm": truncated(lambda x: np.sqrt(np.square(x).sum(-1))),
    "reduce_log_sum": truncated(lambda x: np.log(x.sum(-1))),
    "reduce_log_sum_exp": truncated(lambda x: np.log(np.exp(x).sum(-1))),
    "reduce_max": reduce(),
    "reduce_mean": truncated(lambda x: x.mean(-1)),
    "reduce_min": reduce(),
    "reduce_prod": reduce(0.5, 2),
    "reduce_sum": reduce(),
    "reduce_sum_square": reduce(),
    "argsort": argsort,
    "topk": topk,
    "cumsum": cumsum,
}


@pytest.mark.parametrize("op", CASES)
def test_op(op: str, tmp_path: Path) -> None:
    check_op(op, CASES[op](), tmp_path)
