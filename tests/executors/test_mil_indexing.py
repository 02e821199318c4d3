"""Slices, gathers and scatters against numpy, and coremltools' value inference where it has one."""

from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mil_programs import Case, check_op, save_program
from test_mil_shape import kinds, numbered

from pdconvert.errors import InputError
from pdconvert.executors.mil import MilSession

DTYPES = (np.float32, np.float16, np.int32)


def windows(shape: tuple[int, ...], count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Random begins, ends, strides and masks that give a slice without empty axes, with negative ones."""
    rng = np.random.default_rng(seed)
    made = 0
    while made < count:
        params: dict[str, list] = {
            k: [] for k in ("begin", "end", "stride", "begin_mask", "end_mask", "squeeze_mask")
        }
        for size in shape:
            stride = int(rng.choice([1, 1, 2, 3, -1, -2]))
            begin, end = int(rng.integers(0, size)), int(rng.integers(0, size + 1))
            params["begin"].append(begin - size if rng.random() < 0.3 else begin)
            params["end"].append(end - size if rng.random() < 0.3 and end < size else end)
            params["stride"].append(stride)
            params["begin_mask"].append(bool(rng.random() < 0.3))
            params["end_mask"].append(bool(rng.random() < 0.3))
            params["squeeze_mask"].append(bool(rng.random() < 0.15))
        if all(params["squeeze_mask"]):
            continue
        index = numpy_index(**params)
        picked = np.empty(shape)[index]
        lone = [s for s, m in zip(params["stride"], params["squeeze_mask"], strict=True) if m]
        if picked.size and not any(s < 0 for s in lone) and not _undefined(shape, params):
            made += 1
            yield params


def _undefined(shape: tuple[int, ...], params: dict[str, list]) -> bool:
    """Bounds that coremltools' shape inference treats in its own way: mixed signs, or crossing bounds."""
    for size, b, e, s, bm, em in zip(
        shape, params["begin"], params["end"], params["stride"], params["begin_mask"], params["end_mask"], strict=True
    ):  # fmt: skip
        wanted = len(range(*slice(None if bm else b, None if em else e, s).indices(size)))
        first, last = b + size if b < 0 else b, e + size if e < 0 else e
        if not wanted or (s < 0 and not em and not bm and last >= first) or (s < 0 and (b < 0) != (e < 0)):
            return True
    return False


def numpy_index(
    begin: list, end: list, stride: list, begin_mask: list, end_mask: list, squeeze_mask: list
) -> tuple[Any, ...]:
    """The same slice as a numpy index."""
    index: list[Any] = []
    for b, e, s, bm, em, sm in zip(begin, end, stride, begin_mask, end_mask, squeeze_mask, strict=True):
        index.append((0 if bm else b) if sm else slice(None if bm else b, None if em else e, s))
    return tuple(index)


def slice_by_index() -> Iterator[Case]:
    for seed, shape in enumerate(((7,), (5, 4), (2, 5, 3), (1, 4, 2, 6))):
        for number, params in enumerate(windows(shape, 30, seed)):
            index = numpy_index(**params)
            bounds = {k: np.array(params.pop(k), np.int32) for k in ("begin", "end")}
            x = kinds(shape)[number % 3]
            yield Case({"x": x}, {**bounds, **params}, lambda x, index=index: x[index])
    for x in kinds((4, 6)):
        yield Case({"x": x}, {"begin": [1, 2], "end": [3, 5]}, lambda x: x[1:3, 2:5])
    yield Case(
        {"x": numbered((4, 6)), "begin": np.array([1, 2], np.int32), "end": np.array([3, 5], np.int32)},
        expected=lambda x, begin, end: x[1:3, 2:5],
    )  # bounds that only the run gives


def slice_update() -> Iterator[Case]:
    for seed, shape in enumerate(((7,), (5, 4), (2, 5, 3), (1, 4, 2, 6))):
        for params in windows(shape, 20, seed + 50):
            index = numpy_index(**params)

            def reference(x: np.ndarray, update: np.ndarray, index: tuple = index) -> np.ndarray:
                out = x.copy()
                out[index] = update
                return out

            for x in kinds(shape)[:3]:
                yield Case({"x": x, "update": (x[index] + x.dtype.type(50))}, params, reference)


def slice_by_size() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    for shape in ((7,), (5, 4), (2, 5, 3)):
        for _ in range(10):
            begin = [int(rng.integers(0, size)) for size in shape]
            size = [int(rng.integers(1, s - b + 1)) for s, b in zip(shape, begin, strict=True)]
            index = tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))
            open_end = [-1 if b + n == s else n for s, b, n in zip(shape, begin, size, strict=True)]
            for x in kinds(shape)[:3]:
                yield Case({"x": x}, {"begin": begin, "size": open_end}, lambda x, index=index: x[index])
            bounds = {"begin": np.array(begin, np.int32), "size": np.array(size, np.int32)}
            yield Case(
                {"x": numbered(shape), **bounds}, expected=lambda x, begin, size, index=index: x[index]
            )


def gather() -> Iterator[Case]:
    x = numbered((4, 5, 6))
    for axis, shape, dtype in product((-3, -2, -1, 0, 1, 2), ((3,), (2, 2)), DTYPES):
        indices = (numbered(shape, np.int32) * 3) % 4
        yield Case({"x": x.astype(dtype), "indices": indices}, {"axis": axis})
        yield Case(
            {"x": x.astype(dtype), "indices": indices}, {"axis": axis, "validate_indices": True}, since=17
        )
        negative = indices - x.shape[axis]
        yield Case({"x": x.astype(dtype), "indices": negative}, {"axis": axis})
    for batch, axis in ((1, 1), (1, 2), (2, 2)):
        indices = numbered((*x.shape[:batch], 3), np.int32) % 4
        yield Case({"x": x, "indices": indices}, {"axis": axis, "batch_dims": batch}, since=16)
    scalar = np.array(2, np.int32)
    yield Case({"x": x, "indices": scalar}, {"axis": 1}, lambda x, indices: np.take(x, indices, 1))
    for kind in (np.uint16, np.int16):
        yield Case({"x": x, "indices": np.array([3, 0], kind)}, {"axis": 0}, since=17)


def gather_along_axis() -> Iterator[Case]:
    for axis, dtype in product((-2, -1, 0, 1), DTYPES):
        x = numbered((4, 4), dtype)
        for indices in ((numbered((4, 4), np.int32) * 3) % 4, (numbered((4, 4), np.int32) * 3) % 4 - 4):
            yield Case({"x": x, "indices": indices}, {"axis": axis})


def gather_nd() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    for depth, dtype in product((1, 2, 3), DTYPES):
        x = numbered((4, 5, 6), dtype)
        indices = np.stack([rng.integers(0, size, (2, 3)) for size in x.shape[:depth]], -1).astype(np.int32)

        def reference(x: np.ndarray, indices: np.ndarray) -> np.ndarray:
            return x[tuple(np.moveaxis(indices, -1, 0))]

        yield Case({"x": x, "indices": indices}, {}, reference)
    for depth in (1, 2):
        x = numbered((2, 5, 6, 3))
        indices = np.stack([rng.integers(0, size, (2, 4)) for size in x.shape[1 : 1 + depth]], -1).astype(
            np.int32
        )

        def batched(x: np.ndarray, indices: np.ndarray) -> np.ndarray:
            return np.stack([x[b][tuple(np.moveaxis(indices[b], -1, 0))] for b in range(len(x))])

        yield Case({"x": x, "indices": indices}, {"batch_dims": 1}, batched, since=16)


MODES: dict[str, Callable] = {
    "update": lambda old, new: new,
    "add": lambda old, new: old + new,
    "sub": lambda old, new: old - new,
    "mul": lambda old, new: old * new,
    "div": lambda old, new: old / new if old.dtype.kind == "f" else np.trunc(old / new),
    "max": np.maximum,
    "min": np.minimum,
}


def scatter() -> Iterator[Case]:
    for axis, mode, dtype in product((-1, 0, 1), MODES, DTYPES):
        data = numbered((3, 4), dtype) + dtype(1)
        indices = np.array([2, 0, 2] if mode != "update" else [2, 0], np.int32)
        shape = [3, 4]
        shape[axis] = len(indices)
        updates = numbered(tuple(shape), dtype) % 5 + dtype(1)

        def reference(
            data: np.ndarray, indices: np.ndarray, updates: np.ndarray, axis: int = axis, mode: str = mode
        ) -> np.ndarray:
            out = np.moveaxis(data.copy(), axis, 0)
            for place, target in enumerate(indices):
                out[target] = MODES[mode](out[target], np.moveaxis(updates, axis, 0)[place])
            return np.moveaxis(out, 0, axis)

        yield Case(
            {"data": data, "indices": indices, "updates": updates}, {"axis": axis, "mode": mode}, reference
        )


def scatter_along_axis() -> Iterator[Case]:
    for axis, mode, dtype in product((-1, 0, 1), MODES, DTYPES):
        data = numbered((3, 3), dtype) + dtype(1)
        order = [[2, 0, 1], [1, 2, 0], [0, 1, 2]] if mode == "update" else [[2, 0, 2], [1, 1, 0], [0, 2, 2]]
        updates = numbered((3, 3), dtype) % 5 + dtype(1)

        def reference(
            data: np.ndarray, indices: np.ndarray, updates: np.ndarray, axis: int = axis, mode: str = mode
        ) -> np.ndarray:
            out = data.copy()
            for place in np.ndindex(*indices.shape):
                target = list(place)
                target[axis] = indices[place]
                out[tuple(target)] = MODES[mode](out[tuple(target)], updates[place])
            return out

        tensors = {"data": data, "indices": np.array(order, np.int32), "updates": updates}
        yield Case(tensors, {"axis": axis, "mode": mode}, reference)


def scatter_nd() -> Iterator[Case]:
    for depth, mode, dtype in product((1, 2), MODES, DTYPES):
        data = numbered((3, 4), dtype) + dtype(1)
        rows = [[0, 1], [2, 3], [1, 1]] if mode == "update" else [[0, 1], [2, 3], [0, 1]]
        indices = np.array(rows, np.int32)[:, :depth]
        updates = numbered((3, *data.shape[depth:]), dtype) % 5 + dtype(1)

        def reference(
            data: np.ndarray, indices: np.ndarray, updates: np.ndarray, mode: str = mode
        ) -> np.ndarray:
            out = data.copy()
            for place, target in enumerate(indices):
                out[tuple(target)] = MODES[mode](out[tuple(target)], updates[place])
            return out

        yield Case({"data": data, "indices": indices, "updates": updates}, {"mode": mode}, reference)


CASES: dict[str, Callable[[], Iterable[Case]]] = {
    "slice_by_index": slice_by_index,
    "slice_by_size": slice_by_size,
    "slice_update": slice_update,
    "gather": gather,
    "gather_along_axis": gather_along_axis,
    "gather_nd": gather_nd,
    "scatter": scatter,
    "scatter_along_axis": scatter_along_axis,
    "scatter_nd": scatter_nd,
}


@pytest.mark.parametrize("op", CASES)
def test_op(op: str, tmp_path: Path) -> None:
    check_op(op, CASES[op](), tmp_path)


@pytest.mark.parametrize(
    ("index", "validate", "fails"), [(-1, False, False), (-1, True, True), (4, False, True)]
)
def test_an_index_out_of_range_is_an_error(index: int, validate: bool, fails: bool, tmp_path: Path) -> None:
    from mil_programs import mb

    inputs = {"x": numbered((4, 2)), "indices": np.array([index], np.int32)}
    path = save_program(
        tmp_path / "gather.mlpackage",
        inputs,
        lambda v: {
            "out": mb.gather(x=v["x"], indices=v["indices"], axis=0, validate_indices=validate, name="pick")
        },
    )
    session = MilSession(path)
    if fails:
        with pytest.raises(
            InputError, match=r"op gather 'pick' \(number \d+ of function main\) failed: index"
        ):
            session.run(inputs)
    else:
        np.testing.assert_array_equal(session.run(inputs)["out"].numpy(), inputs["x"][[index]])
