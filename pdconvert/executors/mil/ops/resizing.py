"""Resizing and resampling of images.

Linear interpolation follows the grids in MIL's documentation of `resize_bilinear`; nearest neighbour is
the element at floor(i * size_in / size_out), as torch has it.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from pdconvert.executors.mil.ops.row import OpRow, row

Tensor = torch.Tensor


def _grid(size_in: int, size_out: int, mode: str) -> Tensor:
    """Return the input positions (size_out,) that an output axis samples, as float64."""
    steps = torch.arange(size_out, dtype=torch.float64)
    if mode in ("STRICT_ALIGN_CORNERS", "ALIGN_CORNERS"):
        if size_out == 1:
            points = torch.full(
                (1,), (size_in - 1) / 2 if mode == "ALIGN_CORNERS" else 0.0, dtype=torch.float64
            )
        else:
            points = steps * ((size_in - 1) / (size_out - 1))
    elif mode == "DEFAULT":
        points = steps * (size_in / size_out)
    elif mode == "OFFSET_CORNERS":
        delta = max(1, size_in - 1) / size_out
        points = 0.5 * delta + steps * delta
    elif mode == "UNALIGN_CORNERS":
        spacing = size_in / size_out
        points = steps * spacing + 0.5 * spacing - 0.5
    else:
        raise ValueError(f"sampling mode {mode!r}")
    return points.clamp(0, size_in - 1)


def _linear(x: Tensor, axis: int, size: int, mode: str) -> Tensor:
    """Resize one axis by linear interpolation."""
    points = _grid(x.shape[axis], size, mode)
    low = points.floor().long()
    high = (low + 1).clamp(max=x.shape[axis] - 1)
    sizes = [1] * x.dim()
    sizes[axis] = size
    share = (points - low).to(x.dtype).reshape(sizes)
    return torch.lerp(x.index_select(axis, low), x.index_select(axis, high), share)


def _nearest(x: Tensor, axis: int, size: int) -> Tensor:
    """Resize one axis to the nearest element before each sampled position."""
    index = torch.arange(size) * x.shape[axis] // size
    return x.index_select(axis, index)


def _bilinear(x: Tensor, height: int, width: int, mode: str) -> Tensor:
    rank = x.dim()
    return _linear(_linear(x, rank - 2, height, mode), rank - 1, width, mode)


def resize_bilinear(
    x: Tensor, *, target_size_height: int = 1, target_size_width: int = 1, sampling_mode: str = "DEFAULT"
) -> Tensor:
    """Resize the last two axes by linear interpolation."""
    return _bilinear(x, target_size_height, target_size_width, sampling_mode)


def resize_nearest_neighbor(x: Tensor, *, target_size_height: int, target_size_width: int) -> Tensor:
    """Resize the last two axes to the nearest element."""
    rank = x.dim()
    return _nearest(_nearest(x, rank - 2, target_size_height), rank - 1, target_size_width)


def _enlarged(x: Tensor, *scales: float) -> tuple[int, ...]:
    """Sizes of the last two axes, in fp32 as coremltools' types have them: 1.4 times 5 is 7, not 6.99999976."""
    return tuple(
        math.floor(np.float32(scale) * np.float32(size))
        for scale, size in zip(scales, x.shape[-2:], strict=True)
    )


def upsample_bilinear(
    x: Tensor,
    *,
    scale_factor_height: float = 1,
    scale_factor_width: float = 1,
    align_corners: bool = True,
    half_pixel_centers: bool | None = None,
) -> Tensor:
    """Enlarge the last two axes; sizes are rounded down and the scale is recomputed from them."""
    height, width = _enlarged(x, scale_factor_height, scale_factor_width)
    apart = "DEFAULT" if half_pixel_centers is False else "UNALIGN_CORNERS"
    return _bilinear(x, height, width, "STRICT_ALIGN_CORNERS" if align_corners else apart)


def upsample_nearest_neighbor(
    x: Tensor, *, scale_factor_height: float = 1, scale_factor_width: float = 1
) -> Tensor:
    """Enlarge the last two axes; sizes are rounded down."""
    height, width = _enlarged(x, scale_factor_height, scale_factor_width)
    return resize_nearest_neighbor(x, target_size_height=height, target_size_width=width)


def resize(
    x: Tensor,
    *,
    shape: Sequence[int],
    resized_dims: int,
    interpolation_mode: str = "LINEAR",
    sampling_mode: str = "DEFAULT",
) -> Tensor:
    """Resize the last `resized_dims` axes to the last entries of `shape`; 0 keeps an axis."""
    for place in range(resized_dims):
        axis = x.dim() - resized_dims + place
        size = shape[len(shape) - resized_dims + place]
        if size == 0:
            continue
        if interpolation_mode == "LINEAR":
            x = _linear(x, axis, size, sampling_mode)
        elif sampling_mode == "DEFAULT":
            x = _nearest(x, axis, size)
        else:
            raise ValueError(
                f"nearest neighbour with sampling mode {sampling_mode}: MIL does not say how it rounds"
            )
    return x


def _pixels(points: Tensor, sizes: Sequence[int], mode: str, align_corners: bool) -> Tensor:
    """Coordinates (..., 2) of pixels, of axes of these sizes: 0 is the centre of the first one."""
    if mode == "unnormalized":
        return points
    if mode == "normalized_minus_one_to_one":
        points = (points + 1) / 2
    elif mode != "normalized_zero_to_one":
        raise ValueError(f"coordinates mode {mode!r}")
    whole = torch.tensor(sizes, dtype=torch.float32)
    return points * (whole - 1) if align_corners else points * whole - 0.5


def _inside(places: Tensor, size: int, padding: str) -> Tensor:
    """Coordinates along one axis, brought into the image; outside by at most two where a value pads."""
    if padding == "constant":
        return places.clamp(-2, size + 1)
    if padding == "reflection":  # the pixel at the edge is not repeated
        around = max(2 * (size - 1), 1)
        places = places.remainder(around)
        places = torch.minimum(places, around - places)
    elif padding == "symmetric":
        places = (places + 0.5).remainder(2 * size)
        places = torch.minimum(places, 2 * size - places) - 0.5
    elif padding != "border":
        raise ValueError(f"padding mode {padding!r}")
    return places.clamp(0, size - 1)


def _sample(x: Tensor, points: Tensor, mode: str, padding: str, value: float) -> Tensor:
    """Sample x (N, C, H, W) at pixel coordinates (x, y) (N, H2, W2, 2); nearest takes the even one of two."""
    height, width = x.shape[2:]
    columns, rows = (_inside(points[..., i], size, padding) for i, size in enumerate((width, height)))
    pixels = x.flatten(2)

    def read(row: Tensor, column: Tensor) -> Tensor:
        """Pixels (N, C, H2, W2) at whole coordinates."""
        row, column = row.long(), column.long()
        index = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
        found = pixels.gather(2, index.flatten(1)[:, None].expand(-1, x.shape[1], -1))
        seen = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        found = found.view(x.shape[0], x.shape[1], *index.shape[1:])
        return torch.where(seen[:, None], found, value) if padding == "constant" else found

    if mode == "nearest":
        return read(rows.round(), columns.round())
    if mode != "bilinear":
        raise ValueError(f"sampling mode {mode!r}")
    top, left = rows.floor(), columns.floor()
    down, right = (rows - top)[:, None], (columns - left)[:, None]
    upper = read(top, left) * (1 - right) + read(top, left + 1) * right
    lower = read(top + 1, left) * (1 - right) + read(top + 1, left + 1) * right
    return upper * (1 - down) + lower * down


def resample(
    x: Tensor,
    coordinates: Tensor,
    *,
    sampling_mode: str,
    padding_mode: str,
    padding_value: float = 0.0,
    coordinates_mode: str,
    align_corners: bool,
) -> Tensor:
    """Sample x (N, C, H, W) at (x, y) coordinates (N, H2, W2, 2)."""
    sizes = (x.shape[3], x.shape[2])
    points = _pixels(coordinates.to(torch.float32), sizes, coordinates_mode, align_corners)
    return _sample(x, points, sampling_mode, padding_mode, padding_value)


def affine(
    x: Tensor,
    transform_matrix: Tensor,
    *,
    output_height: int,
    output_width: int,
    sampling_mode: str = "bilinear",
    padding_mode: str = "constant",
    padding_value: float = 0.0,
    coordinates_mode: str = "normalized_minus_one_to_one",
    align_corners: bool = True,
) -> Tensor:
    """Sample x (N, C, H, W) on a grid mapped by one 2x3 matrix (as 6 numbers) for all or each item."""
    if coordinates_mode != "normalized_minus_one_to_one":
        raise ValueError(f"coordinates mode {coordinates_mode!r}")
    matrix = transform_matrix.reshape(-1, 2, 3).expand(x.shape[0], 2, 3)
    grid = F.affine_grid(matrix, [x.shape[0], x.shape[1], output_height, output_width], align_corners)
    points = _pixels(grid, (x.shape[3], x.shape[2]), coordinates_mode, align_corners)
    return _sample(x, points, sampling_mode, padding_mode, padding_value)


ROWS: dict[str, OpRow] = {
    "resize_bilinear": row(resize_bilinear),
    "resize_nearest_neighbor": row(resize_nearest_neighbor, copies=True),
    "upsample_bilinear": row(upsample_bilinear),
    "upsample_nearest_neighbor": row(upsample_nearest_neighbor, copies=True),
    "resize": row(resize, view=True),
    "resample": row(resample),
    "affine": row(affine),
}
