"""Normalizations, pooling and resizing against torch or MIL's documented formulas."""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mil_programs import Case, check_op
from test_mil_elementwise import FLOATS
from test_mil_products import normal, same_padding, torch_reference


def layer_norm() -> Iterator[Case]:
    for seed, shape in enumerate(((6,), (3, 4), (2, 3, 4), (1, 8, 1, 5))):
        rank = len(shape)
        for count in range(1, rank + 1):
            for axes in combinations(range(rank), count):
                sizes = tuple(shape[a] for a in axes)
                for dtype, epsilon in product(FLOATS, (1e-5, 1e-2)):
                    signed = [a - rank if seed % 2 else a for a in axes]
                    tensors = {"x": normal(seed, shape, dtype) * dtype(8)}
                    params = {"axes": signed, "epsilon": dtype(epsilon)}
                    yield Case(tensors, params)
                    gain = {"gamma": normal(1, sizes, dtype), "beta": normal(2, sizes, dtype)}
                    yield Case(tensors | gain, params)
        yield Case({"x": np.zeros(shape, np.float32)}, {"axes": [-1], "epsilon": np.float32(1e-5)})


def instance_norm() -> Iterator[Case]:
    for seed, (shape, dtype, affine) in enumerate(product(((2, 3, 7), (2, 3, 4, 5)), FLOATS, (False, True))):
        tensors = {"x": normal(seed, shape, dtype)}
        if affine:
            tensors |= {"gamma": normal(1, (3,), dtype), "beta": normal(2, (3,), dtype)}

        def reference(x: torch.Tensor, gamma: Any = None, beta: Any = None) -> torch.Tensor:
            return F.instance_norm(x, weight=gamma, bias=beta, eps=1e-3)

        yield Case(tensors, {"epsilon": dtype(1e-3)}, torch_reference(reference))


def batch_norm() -> Iterator[Case]:
    for seed, (shape, dtype, affine) in enumerate(
        product(((2, 3, 7), (2, 3, 4, 5), (2, 3, 2, 3, 4)), FLOATS, (False, True))
    ):
        tensors = {"x": normal(seed, shape, dtype), "mean": normal(3, (3,), dtype)}
        tensors["variance"] = np.abs(normal(4, (3,), dtype)) + dtype(0.1)
        if affine:
            tensors |= {"gamma": normal(1, (3,), dtype), "beta": normal(2, (3,), dtype)}

        def reference(x: Any, mean: Any, variance: Any, gamma: Any = None, beta: Any = None) -> torch.Tensor:
            return F.batch_norm(x, mean, variance, gamma, beta, eps=1e-3)

        yield Case(tensors, {"epsilon": dtype(1e-3)}, torch_reference(reference))


def l2_norm() -> Iterator[Case]:
    for seed, (shape, dtype) in enumerate(product(((2, 3, 4), (2, 3, 2, 2), (2, 2, 3, 1, 2)), FLOATS)):
        for epsilon in (1e-6, 0.1):
            yield Case({"x": normal(seed, shape, dtype)}, {"epsilon": dtype(epsilon)})


def local_response_norm() -> Iterator[Case]:
    for seed, (size, dtype) in enumerate(product((1, 3, 5), FLOATS)):
        for alpha, beta, k in ((1e-4, 0.75, 1.0), (0.5, 1.5, 2.0)):
            params = {"size": size, "alpha": dtype(alpha), "beta": dtype(beta), "k": dtype(k)}

            def reference(
                x: np.ndarray, size: int = size, alpha: float = alpha, beta: float = beta, k: float = k
            ) -> np.ndarray:
                half = size // 2
                padded = np.pad(np.square(x), [(0, 0), (half, half), (0, 0), (0, 0)])
                total = sum(padded[:, i : i + x.shape[1]] for i in range(size))
                return x / (k + alpha / size * total) ** beta

            yield Case({"x": normal(seed, (2, 7, 3, 2), dtype)}, params, reference)


POOLS = {
    "max": {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d},
    "avg": {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d},
}


def pool(kind: str) -> Callable[[], Iterator[Case]]:
    def cases() -> Iterator[Case]:
        seed = 0
        for spatial, stride, padding in product(
            (1, 2, 3), (1, 2), ("valid", "same", "same_lower", "custom", "uneven")
        ):
            for exclude, ceil in product((False, True), (False, True)):
                seed += 1
                kernel = [(2, 3)[(seed + axis) % 2] for axis in range(spatial)]
                sizes = [7 + axis for axis in range(spatial)]
                if ceil and (spatial > 2 or padding in ("same", "same_lower", "uneven")):
                    continue
                if kind == "max" and exclude:
                    continue
                widths = {"valid": [0, 0], "custom": [1, 1], "uneven": [0, 1]}.get(padding, []) * spatial
                pairs = list(zip(widths[::2], widths[1::2], strict=True)) or [
                    same_padding(s, k, stride, 1, padding == "same_lower")
                    for s, k in zip(sizes, kernel, strict=True)
                ]
                params: dict[str, Any] = {
                    "kernel_sizes": kernel,
                    "strides": [stride] * spatial,
                    "ceil_mode": ceil,
                }
                params["pad_type"] = "custom" if padding in ("custom", "uneven") else padding
                if params["pad_type"] == "custom":
                    params["pad"] = widths
                if kind == "avg":
                    params["exclude_padding_from_average"] = exclude
                dtype = FLOATS[seed % 2]
                yield Case(
                    {"x": normal(seed, (2, 3, *sizes), dtype)},
                    params,
                    torch_reference(_pool_reference(kind, kernel, stride, pairs, exclude, ceil)),
                    since=16 if padding == "same_lower" else 15,
                )
        small = _pool_reference(kind, [3] * 3, 1, [(1, 1)] * 3, False, False)
        for kernel, padding in (
            (3, "same"),
            (2, "VALID"),
        ):  # an input smaller than the kernel; the type's other case
            reference = (
                small if padding == "same" else _pool_reference(kind, [2] * 3, 1, [(0, 0)] * 3, False, False)
            )
            params = {"kernel_sizes": [kernel] * 3, "strides": [1] * 3, "pad_type": padding}
            yield Case({"x": normal(seed, (1, 2, 2, 2, 2))}, params, torch_reference(reference))

    return cases


def _pool_reference(
    kind: str, kernel: list[int], stride: int, pairs: list[tuple[int, int]], exclude: bool, ceil: bool
) -> Callable[..., torch.Tensor]:
    """Pool a padded input: with -inf for the maximum, with zeros and a count of what is there for the mean."""

    def reference(x: torch.Tensor) -> torch.Tensor:
        spatial = x.dim() - 2
        function = POOLS[kind][spatial]
        if ceil:
            before = [b for b, _ in pairs]
            extra = {"count_include_pad": not exclude} if kind == "avg" else {}
            return function(x, kernel, stride, before, ceil_mode=True, **extra)
        flat = [n for pair in reversed(pairs) for n in pair]
        if kind == "max":
            return function(F.pad(x, flat, value=-math.inf), kernel, stride)
        total = function(F.pad(x, flat), kernel, stride)
        return total / function(F.pad(torch.ones_like(x), flat), kernel, stride) if exclude else total

    return reference


def _points(size_in: int, size_out: int, mode: str) -> list[float]:
    """Sampled positions of one axis, as MIL's documentation of resize_bilinear writes them."""
    points = []
    for i in range(size_out):
        if mode == "ALIGN_CORNERS" and size_out == 1:
            point = (size_in - 1) / 2
        elif mode in ("STRICT_ALIGN_CORNERS", "ALIGN_CORNERS"):
            point = i * (size_in - 1) / (size_out - 1) if size_out > 1 else 0.0
        elif mode == "DEFAULT":
            point = i * (size_in - size_in / size_out) / (size_out - 1) if size_out > 1 else 0.0
        elif mode == "OFFSET_CORNERS":
            delta = max(1, size_in - 1) / size_out
            point = 0.5 * delta + i * delta
        else:
            point = (i + 0.5) * size_in / size_out - 0.5
        points.append(min(size_in - 1.0, max(0.0, point)))
    return points


def _sampled(x: np.ndarray, axis: int, size: int, mode: str) -> np.ndarray:
    slices = []
    for point in _points(x.shape[axis], size, mode):
        low = math.floor(point)
        high = min(low + 1, x.shape[axis] - 1)
        slices.append(np.take(x, low, axis) * (1 - (point - low)) + np.take(x, high, axis) * (point - low))
    return np.stack(slices, axis)


SAMPLING = ("STRICT_ALIGN_CORNERS", "ALIGN_CORNERS", "UNALIGN_CORNERS", "DEFAULT", "OFFSET_CORNERS")
SIZES = ((1, 1), (5, 9), (3, 4), (8, 3), (6, 8))


def resize_bilinear() -> Iterator[Case]:
    for mode, (height, width), dtype in product(SAMPLING, SIZES, FLOATS):
        params = {"target_size_height": height, "target_size_width": width, "sampling_mode": mode}

        def reference(
            x: np.ndarray, height: int = height, width: int = width, mode: str = mode
        ) -> np.ndarray:
            return _sampled(_sampled(x, x.ndim - 2, height, mode), x.ndim - 1, width, mode)

        yield Case({"x": normal(0, (2, 3, 4), dtype)}, params, reference)
        yield Case({"x": normal(0, (1, 2, 3, 4), dtype)}, params, reference)


def upsample_bilinear() -> Iterator[Case]:
    for factors, corners in product(((1, 1), (2, 3), (3, 2)), (False, True)):
        params = {
            "scale_factor_height": factors[0],
            "scale_factor_width": factors[1],
            "align_corners": corners,
        }
        reference = torch_reference(
            lambda x, f=factors, c=corners: F.interpolate(x, scale_factor=f, mode="bilinear", align_corners=c)
        )
        for dtype in FLOATS:
            yield Case({"x": normal(0, (1, 2, 3, 4), dtype)}, params, reference)
    params = {
        "scale_factor_height": 2,
        "scale_factor_width": 2,
        "align_corners": False,
        "half_pixel_centers": False,
    }
    plain = lambda x: _sampled(_sampled(x, 2, 6, "DEFAULT"), 3, 8, "DEFAULT")  # noqa: E731
    yield Case({"x": normal(0, (1, 2, 3, 4))}, params, plain, since=16)


def nearest(by_size: bool) -> Callable[[], Iterator[Case]]:
    def cases() -> Iterator[Case]:
        for (height, width), dtype in product(((3, 4), (6, 8), (9, 4), (3, 12)), FLOATS):
            if by_size:
                params = {"target_size_height": height, "target_size_width": width}
            else:
                params = {"scale_factor_height": height // 3, "scale_factor_width": width // 4}
            reference = torch_reference(
                lambda x, size=(height, width): F.interpolate(x, size=size, mode="nearest")
            )
            yield Case({"x": normal(0, (1, 2, 3, 4), dtype)}, params, reference)
        if not by_size:  # 1.4 times 5 is 7 in fp32 and 6.99999976 beyond it
            params = {"scale_factor_height": np.float32(1.4), "scale_factor_width": np.float32(2.6)}
            rows, columns = np.arange(7) * 5 // 7, np.arange(13) * 5 // 13
            yield Case({"x": normal(0, (1, 2, 5, 5))}, params, lambda x: x[:, :, rows][..., columns])

    return cases


def resize() -> Iterator[Case]:
    for mode, (height, width) in product(SAMPLING, SIZES):
        params = {"resized_dims": np.uint32(2), "sampling_mode": mode, "interpolation_mode": "LINEAR"}

        def linear(
            x: np.ndarray, shape: np.ndarray, height: int = height, width: int = width, mode: str = mode
        ) -> np.ndarray:
            return _sampled(_sampled(x, x.ndim - 2, height, mode), x.ndim - 1, width, mode)

        yield Case(
            {"x": normal(0, (1, 2, 3, 4)), "shape": np.array([height, width], np.int32)}, params, linear
        )
    for shape, size in (([1, 6, 0], (6, 4)), ([0, 0], (3, 4)), ([2, 9, 8], (9, 8))):
        params = {"resized_dims": np.uint32(2), "interpolation_mode": "NEAREST_NEIGHBOR"}

        def closest(x: np.ndarray, shape: np.ndarray, size: tuple = size) -> np.ndarray:
            return F.interpolate(torch.from_numpy(x), size=size, mode="nearest").numpy()

        yield Case({"x": normal(0, (1, 2, 3, 4)), "shape": np.array(shape, np.int32)}, params, closest)


def _resample_params(
    dtype: type, sampling: str, padding: str, coordinates: str, corners: bool
) -> dict[str, Any]:
    return {
        "sampling_mode": sampling,
        "padding_mode": padding,
        "padding_value": dtype(0),
        "coordinates_mode": coordinates,
        "align_corners": corners,
    }


COORDINATES = ("normalized_minus_one_to_one", "normalized_zero_to_one", "unnormalized")


def _pixel(place: float, size: int, mode: str, corners: bool) -> float:
    """The pixel, from 0, at a coordinate of one axis."""
    if mode == "unnormalized":
        return place
    share = (place + 1) / 2 if mode == "normalized_minus_one_to_one" else place
    return share * (size - 1) if corners else share * size - 0.5


def _extended(index: int, size: int, padding: str) -> int | None:
    """The pixel that stands at an index beyond the image; None for the padding value."""
    period = {
        "border": [min(max(index, 0), size - 1)],
        "reflection": [*range(size), *range(size - 2, 0, -1)],
        "symmetric": [*range(size), *range(size - 1, -1, -1)],
    }.get(padding)
    if period is None:
        return index if 0 <= index < size else None
    return period[index % len(period)]


def _resampled(
    x: np.ndarray,
    coordinates: np.ndarray,
    sampling: str,
    padding: str,
    mode: str,
    corners: bool,
    value: float,
) -> np.ndarray:
    """Point by point, as MIL describes each mode."""
    out = np.zeros((*x.shape[:2], *coordinates.shape[1:3]))

    def at(item: int, row: int, column: int) -> np.ndarray:
        places = [_extended(i, n, padding) for i, n in zip((row, column), x.shape[2:], strict=True)]
        return (
            np.full(x.shape[1], value) if None in places else x[item, :, places[0], places[1]].astype(float)
        )

    for item, i, j in np.ndindex(*coordinates.shape[:3]):
        column, row = (
            _pixel(float(c), n, mode, corners)
            for c, n in zip(coordinates[item, i, j], (x.shape[3], x.shape[2]), strict=True)
        )
        if sampling == "nearest":
            out[item, :, i, j] = at(item, round(row), round(column))
            continue
        top, left = math.floor(row), math.floor(column)
        for down, right in product((0, 1), (0, 1)):
            weight = abs(1 - down - (row - top)) * abs(1 - right - (column - left))
            out[item, :, i, j] += weight * at(item, top + down, left + right)
    return out


def resample() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    for seed, (sampling, padding, mode, corners) in enumerate(
        product(
            ("bilinear", "nearest"),
            ("constant", "border", "reflection", "symmetric"),
            COORDINATES,
            (False, True),
        )
    ):
        for shape, value in (((2, 3, 6, 7), 0.0), ((1, 2, 1, 3), 100.0)):
            dtype = FLOATS[seed % 2]
            low, high = {"unnormalized": (-9, 15), "normalized_zero_to_one": (-1, 2)}.get(mode, (-3, 3))
            points = rng.uniform(low, high, (shape[0], 4, 5, 2)).astype(np.float32)
            params = _resample_params(dtype, sampling, padding, mode, corners) | {
                "padding_value": dtype(value)
            }
            yield Case(
                {"x": normal(1, shape, dtype), "coordinates": points},
                params,
                lambda x, coordinates, how=(sampling, padding, mode, corners, value): _resampled(
                    x, coordinates, *how
                ),
            )


def affine() -> Iterator[Case]:
    for seed, (count, dtype) in enumerate(product((1, 2), FLOATS)):
        params = _resample_params(dtype, "bilinear", "constant", "normalized_minus_one_to_one", True)

        def reference(x: torch.Tensor, transform_matrix: torch.Tensor) -> torch.Tensor:
            matrix = transform_matrix.reshape(-1, 2, 3).expand(2, 2, 3)
            return F.grid_sample(x, F.affine_grid(matrix, [2, 3, 4, 5], True), align_corners=True)

        matrix = normal(seed, (count, 6), dtype) + np.array([1, 0, 0, 0, 1, 0], dtype)
        yield Case(
            {"x": normal(seed, (2, 3, 6, 7), dtype), "transform_matrix": matrix},
            params | {"output_height": 4, "output_width": 5},
            torch_reference(reference),
        )


CASES: dict[str, Callable[[], Iterable[Case]]] = {
    "layer_norm": layer_norm,
    "instance_norm": instance_norm,
    "batch_norm": batch_norm,
    "l2_norm": l2_norm,
    "local_response_norm": local_response_norm,
    "max_pool": pool("max"),
    "avg_pool": pool("avg"),
    "resize_bilinear": resize_bilinear,
    "resize_nearest_neighbor": nearest(True),
    "upsample_bilinear": upsample_bilinear,
    "upsample_nearest_neighbor": nearest(False),
    "resize": resize,
    "resample": resample,
    "affine": affine,
}


@pytest.mark.parametrize("op", CASES)
def test_op(op: str, tmp_path: Path) -> None:
    check_op(op, CASES[op](), tmp_path)
