"""Ops that move values: shapes, layouts, joining, cutting, padding, filling."""

from collections.abc import Callable, Iterable, Iterator
from itertools import permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mil_programs import Case, check_op
from test_mil_elementwise import FLOATS, integers, values

SHAPES = ((6,), (2, 3), (2, 1, 4), (1, 3, 2, 4), (2, 1, 2, 1, 3))


def numbered(shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
    """0, 1, 2, ... in a shape, so that every misplaced value shows."""
    return np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape).astype(dtype)


def kinds(shape: tuple[int, ...]) -> list[np.ndarray]:
    """The same numbers as fp32, fp16, int32 and (their lowest bit) bool."""
    return [numbered(shape), numbered(shape, np.float16), numbered(shape, np.int32), numbered(shape) % 2 == 1]


def each(make: Callable[[tuple[int, ...]], Iterable[dict[str, Any]]], shapes: Iterable = SHAPES) -> Callable:
    """Cases of an op with input x: all params that `make` gives for a shape, all element types."""

    def cases() -> Iterator[Case]:
        for shape in shapes:
            for params in make(shape):
                for x in kinds(shape):
                    yield Case({"x": x}, params)

    return cases


def reshapes(shape: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    size = int(np.prod(shape))
    for target in (
        (size,),
        (-1,),
        (1, size, 1),
        (2, -1),
        (size // 2, 2),
        (-1, 3) if size % 3 == 0 else (-1, 2),
    ):
        yield {"shape": target}
    for axis in range(len(shape)):
        yield {"shape": tuple(-1 if a == axis else 0 for a in range(len(shape)))}


def reshape() -> Iterator[Case]:
    yield from each(reshapes)()
    for target in ((1, 0, 0), (1, 0, 6, 2), (0, -1, 3, 2)):  # from iOS 17 on, 0 counts axes from the end
        yield Case({"x": numbered((2, 6))}, {"shape": target}, since=17)


def reshape_like() -> Iterator[Case]:
    refs = [numbered((2, 3, 4)), numbered((7, 2, 2))]
    for begins, ends, masks, shape in (
        ((0, 0), (3, 0), (False, False), (2, 3, 4)),
        ((1, 1), (0, 2), (True, False), (3, 4, 2)),
        ((0, -1), (1, 0), (False, True), (2, 2)),
    ):
        params = {"begins": list(begins), "ends": list(ends), "end_masks": list(masks)}
        reference = lambda x, ref_tensors, shape=shape: x.reshape(shape)  # noqa: E731
        for x in kinds((int(np.prod(shape)),)):
            yield Case({"x": x, "ref_tensors": refs}, params, reference)


def transposes(shape: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    rank = len(shape)
    for number, perm in enumerate(permutations(range(rank))):
        if rank < 5 or number % 17 == 0:
            yield {"perm": [p - rank if number % 2 else p for p in perm]}


def expands(shape: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    rank = len(shape)
    if rank > 3:
        return
    for axis in range(-rank - 1, rank + 1):
        yield {"axes": [axis]}
    yield {"axes": [0, -1]}
    yield {"axes": [rank + 1, 0]}


def squeeze() -> Iterator[Case]:
    for shape, axes in (((1, 3), [0]), ((2, 1, 3, 1), [1]), ((2, 1, 3, 1), [-1, 1]), ((1, 1, 4), [0, 1])):
        for x in kinds(shape):
            yield Case({"x": x}, {"axes": axes})
    yield Case({"x": numbered((2, 1, 3, 1))}, {})


def axis_subsets(shape: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    rank = len(shape)
    yield {}
    for bits in range(1, 2**rank):
        yield {"axes": [a - rank if bits % 2 else a for a in range(rank) if bits >> a & 1]}


def reverse_sequence() -> Iterator[Case]:
    for batch, seq in ((0, 1), (1, 0), (0, 2), (2, 1)):
        x = numbered((4, 4, 4))
        lengths = np.array([0, 1, 3, 4], np.int32)

        def reference(x: np.ndarray, lengths: np.ndarray, batch: int = batch, seq: int = seq) -> np.ndarray:
            out = x.copy()
            for index, count in enumerate(lengths):
                where: list[Any] = [slice(None)] * 3
                where[batch] = index
                where[seq] = slice(0, count)
                order: list[Any] = list(where)
                order[seq] = slice(count - 1, None, -1) if count else slice(0, 0)
                out[tuple(where)] = x[tuple(order)]
            return out

        yield Case({"x": x, "lengths": lengths}, {"batch_axis": batch, "seq_axis": seq}, reference)


def concat() -> Iterator[Case]:
    for shape in SHAPES:
        for axis in range(-len(shape), len(shape)):
            for dtype in (*FLOATS, np.int32):
                other = list(shape)
                other[axis] += 1
                arrays = [
                    numbered(shape, dtype),
                    numbered(tuple(other), dtype) + dtype(50),
                    numbered(shape, dtype),
                ]
                reference = lambda values, axis=axis: np.concatenate(values, axis)  # noqa: E731
                yield Case({"values": arrays}, {"axis": axis}, reference)
                yield Case({"values": arrays[:1]}, {"axis": axis}, reference)
            same = [numbered(shape), numbered(shape) + 50, numbered(shape) + 90]

            def interleaved(values: list[np.ndarray], axis: int = axis) -> np.ndarray:
                slices = [np.take(v, [i], axis) for i in range(values[0].shape[axis]) for v in values]
                return np.concatenate(slices, axis)

            yield Case({"values": same}, {"axis": axis, "interleave": True}, interleaved)


def stack() -> Iterator[Case]:
    for shape in SHAPES[:4]:
        for axis, dtype in product(range(-len(shape) - 1, len(shape) + 1), (*FLOATS, np.int32)):
            arrays = [numbered(shape, dtype), numbered(shape, dtype) + dtype(50)]
            yield Case({"values": arrays}, {"axis": axis}, lambda values, axis=axis: np.stack(values, axis))


def split() -> Iterator[Case]:
    for axis, dtype in product((-3, -2, -1, 0, 1, 2), (*FLOATS, np.int32)):
        x = numbered((6, 6, 6), dtype)
        for sizes in ([1, 5], [2, 2, 2], [3, 1, 2], [6]):
            cuts = np.cumsum(sizes)[:-1]
            reference = lambda x, cuts=cuts, axis=axis: np.split(x, cuts, axis)  # noqa: E731
            yield Case({"x": x}, {"axis": axis, "split_sizes": sizes}, reference)
        for count in (1, 2, 3, 6):
            reference = lambda x, count=count, axis=axis: np.split(x, count, axis)  # noqa: E731
            yield Case({"x": x}, {"axis": axis, "num_splits": count}, reference)


def tiles(shape: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    for place in range(len(shape)):
        yield {"reps": [3 if a == place else 1 for a in range(len(shape))]}
    yield {"reps": [2] * len(shape)}


def pad() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    for shape in ((4,), (3, 4), (2, 3, 4), (1, 2, 3, 4)):
        for count, dtype in product(range(1, len(shape) + 1), FLOATS):
            for value in (0.0, 2.5):
                widths = rng.integers(0, 3, 2 * count).tolist()
                params = {"pad": widths, "mode": "constant", "constant_val": dtype(value)}
                yield Case({"x": numbered(shape, dtype)}, params)
        for mode, count in product(("reflect", "replicate"), (1, 2)):
            if count <= len(shape):
                widths = rng.integers(0, 3, 2 * count).tolist()
                yield Case({"x": numbered(shape)}, {"pad": widths, "mode": mode})
    yield Case({"x": numbered((3, 4))}, {"pad": [0, 0, 0, 0]})


def fill() -> Iterator[Case]:
    for shape, value in product(((3,), (2, 1, 4)), (np.float32(2.5), np.float16(0.5), np.int32(7), True)):
        reference = lambda shape, value=value: np.full(tuple(shape), value)  # noqa: E731
        yield Case({"shape": np.array(shape, np.int32)}, {"value": value}, reference)


def fill_like() -> Iterator[Case]:
    for shape, value in product(((3,), (2, 1, 4)), (np.float32(2.5), np.int32(7), True)):
        yield Case({"ref_tensor": numbered(shape)}, {"value": value})


def range_1d() -> Iterator[Case]:
    for start, end, step in ((0, 5, 1), (2, 11, 3), (5, 0, -2), (-3, 4, 2)):
        for dtype in (*FLOATS, np.int32):
            yield Case(
                {"start": np.array(start, dtype), "end": np.array(end, dtype), "step": np.array(step, dtype)}
            )


def bands(shape: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    yield {}
    for lower, upper in product((-1, 0, 1, 3), repeat=2):
        yield {"lower": lower, "upper": upper}


def band_part() -> Iterator[Case]:
    for shape in ((4, 4), (3, 5), (2, 5, 3)):
        for params, x in product(bands(shape), kinds(shape)[:3]):
            yield Case({"x": x + x.dtype.type(1)}, params)


def one_hot() -> Iterator[Case]:
    for shape in ((4,), (2, 3)):
        for axis in range(-len(shape) - 1, len(shape) + 1):
            for on, off in (
                (np.float32(1), np.float32(0)),
                (np.int32(5), np.int32(-1)),
                (np.float16(2), np.float16(0.5)),
            ):
                indices = numbered(shape, np.int32) % 5

                def reference(
                    indices: np.ndarray, axis: int = axis, on: Any = on, off: Any = off
                ) -> np.ndarray:
                    hit = np.eye(5, dtype=bool)[indices]
                    return np.where(np.moveaxis(hit, -1, axis), on, off)

                params = {"one_hot_vector_size": np.int32(5), "axis": axis, "on_value": on, "off_value": off}
                yield Case({"indices": indices}, params, reference)  # fmt: skip


def non_zero() -> Iterator[Case]:
    for seed, shape in enumerate(SHAPES):
        for x in (integers(seed, shape, 0, 1), integers(seed, shape, 0, 2).astype(np.float32)):
            yield Case({"x": x})


def sliding_windows() -> Iterator[Case]:
    for axis, size, stride in product((-1, 0, 1), (1, 2, 4), (1, 2, 3)):

        def reference(x: np.ndarray, axis: int = axis, size: int = size, stride: int = stride) -> np.ndarray:
            place = axis % x.ndim
            starts = range(0, x.shape[place] - size + 1, stride)
            return np.stack([np.take(x, range(s, s + size), place) for s in starts], place)

        yield Case({"x": numbered((5, 6, 7))}, {"axis": axis, "size": size, "stride": stride}, reference)


def _blocks(x: np.ndarray, rows: int, columns: int) -> np.ndarray:
    n, c, h, w = x.shape
    return x.reshape(n, c, h // rows, rows, w // columns, columns)


def depth_space(to_space: bool) -> Callable:
    def cases() -> Iterator[Case]:
        for b in (2, 3):
            flat = numbered((2, 3, 2 * b, 4 * b))
            deep = _blocks(flat, b, b).transpose(0, 3, 5, 1, 2, 4).reshape(2, 3 * b * b, 2, 4)
            given, wanted = (deep, flat) if to_space else (flat, deep)
            for dtype in FLOATS:
                yield Case({"x": given.astype(dtype)}, {"block_size": b}, lambda x, wanted=wanted: wanted)

    return cases


def space_to_batch() -> Iterator[Case]:
    for rows, columns, pads in ((2, 2, [[0, 0], [0, 0]]), (2, 3, [[1, 1], [0, 2]]), (3, 1, [[0, 2], [1, 0]])):
        x = numbered((2, 3, 4, 4))

        def reference(
            x: np.ndarray, rows: int = rows, columns: int = columns, pads: list = pads
        ) -> np.ndarray:
            padded = np.pad(x, [(0, 0), (0, 0), *pads])
            n, c, h, w = padded.shape
            moved = _blocks(padded, rows, columns).transpose(3, 5, 0, 1, 2, 4)
            return moved.reshape(n * rows * columns, c, h // rows, w // columns)

        yield Case(
            {"x": x}, {"block_shape": [rows, columns], "paddings": np.array(pads, np.int32)}, reference
        )


def batch_to_space() -> Iterator[Case]:
    for rows, columns, crops in (
        (2, 2, [[0, 0], [0, 0]]),
        (2, 3, [[1, 1], [0, 2]]),
        (3, 1, [[0, 2], [1, 0]]),
    ):
        x = numbered((2 * rows * columns, 3, 4, 5))

        def reference(
            x: np.ndarray, rows: int = rows, columns: int = columns, crops: list = crops
        ) -> np.ndarray:
            n, c, h, w = x.shape
            moved = x.reshape(rows, columns, 2, c, h, w).transpose(2, 3, 4, 0, 5, 1)
            whole = moved.reshape(2, c, h * rows, w * columns)
            (top, bottom), (left, right) = crops
            return whole[:, :, top : h * rows - bottom, left : w * columns - right]

        yield Case({"x": x}, {"block_shape": [rows, columns], "crops": np.array(crops, np.int32)}, reference)


def pixel(name: str, function: Callable, shape: Callable) -> Callable:
    def cases() -> Iterator[Case]:
        for factor, dtype in product((2, 3), FLOATS):
            value = np.uint32(factor) if name.startswith("down") else factor
            reference = lambda x, factor=factor: function(torch.from_numpy(x), factor).numpy()  # noqa: E731
            yield Case({"x": numbered(shape(factor), dtype)}, {name: value}, reference)

    return cases


def crop() -> Iterator[Case]:
    for rows, columns in product(([0, 0], [1, 2], [0, 3]), ([2, 0], [1, 1])):

        def reference(x: np.ndarray, rows: list = rows, columns: list = columns) -> np.ndarray:
            return x[..., rows[0] : x.shape[-2] - rows[1], columns[0] : x.shape[-1] - columns[1]]

        for dtype in FLOATS:
            yield Case(
                {"x": numbered((2, 3, 6, 5), dtype)}, {"crop_height": rows, "crop_width": columns}, reference
            )


def identity() -> Iterator[Case]:
    for seed, (shape, dtype) in enumerate(product(SHAPES, FLOATS)):
        yield Case({"x": values(seed, shape, dtype)})


CASES: dict[str, Callable[[], Iterable[Case]]] = {
    "identity": identity,
    "reshape": reshape,
    "reshape_like": reshape_like,
    "transpose": each(transposes),
    "expand_dims": each(expands),
    "squeeze": squeeze,
    "flatten2d": each(lambda shape: ({"axis": a} for a in range(1, len(shape)))),
    "shape": each(lambda shape: [{}]),
    "reverse": each(axis_subsets),
    "reverse_sequence": reverse_sequence,
    "concat": concat,
    "stack": stack,
    "split": split,
    "tile": each(tiles),
    "pad": pad,
    "fill": fill,
    "fill_like": fill_like,
    "range_1d": range_1d,
    "band_part": band_part,
    "one_hot": one_hot,
    "non_zero": non_zero,
    "sliding_windows": sliding_windows,
    "depth_to_space": depth_space(True),
    "space_to_depth": depth_space(False),
    "space_to_batch": space_to_batch,
    "batch_to_space": batch_to_space,
    "pixel_shuffle": pixel("upscale_factor", torch.nn.functional.pixel_shuffle, lambda f: (2, 2 * f * f, 3, 4)),
    "pixel_unshuffle": pixel("downscale_factor", torch.nn.functional.pixel_unshuffle, lambda f: (2, 2, 3 * f, 2 * f)),
    "crop": crop,
}  # fmt: skip


@pytest.mark.parametrize("op", CASES)
def test_op(op: str, tmp_path: Path) -> None:
    check_op(op, CASES[op](), tmp_path)
