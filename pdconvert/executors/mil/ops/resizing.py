"""Resizing and resampling of images.

Linear interpolation follows the grids in MIL's documentation of `resize_bilinear`; nearest neighbour is
the element at floor(i * size_in / size_out), as torch has it.
"""

import math
from collections.abc import Sequence

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


def upsample_bilinear(
    x: Tensor,
    *,
    scale_factor_height: float = 1,
    scale_factor_width: float = 1,
    align_corners: bool = True,
    half_pixel_centers: bool | None = None,
) -> Tensor:
    """Enlarge the last two axes; sizes are rounded down and the scale is recomputed from them."""
    height = math.floor(x.shape[-2] * scale_factor_height)
    width = math.floor(x.shape[-1] * scale_factor_width)
    apart = "DEFAULT" if half_pixel_centers is False else "UNALIGN_CORNERS"
    return _bilinear(x, height, width, "STRICT_ALIGN_CORNERS" if align_corners else apart)


def upsample_nearest_neighbor(
    x: Tensor, *, scale_factor_height: float = 1, scale_factor_width: float = 1
) -> Tensor:
    """Enlarge the last two axes; sizes are rounded down."""
    height = math.floor(x.shape[-2] * scale_factor_height)
    width = math.floor(x.shape[-1] * scale_factor_width)
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


_PADDING = {"constant": "zeros", "border": "border", "reflection": "reflection"}


def _sample(
    x: Tensor, coordinates: Tensor, mode: str, padding: str, value: float, align_corners: bool
) -> Tensor:
    """Sample x (N, C, H, W) at coordinates (N, H2, W2, 2), normalized to -1..1."""
    if padding not in _PADDING:
        raise ValueError(f"padding mode {padding!r} cannot be run")
    if padding == "constant" and value != 0:
        shifted = F.grid_sample(x - value, coordinates, mode, "zeros", align_corners)
        return shifted + value
    return F.grid_sample(x, coordinates, mode, _PADDING[padding], align_corners)


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
    points = coordinates.to(torch.float32)
    if coordinates_mode == "normalized_zero_to_one":
        points = points * 2 - 1
    elif coordinates_mode == "unnormalized":
        size = torch.tensor([x.shape[3], x.shape[2]], dtype=torch.float32)
        points = 2 * points / (size - 1).clamp(min=1) - 1 if align_corners else (2 * points + 1) / size - 1
    elif coordinates_mode != "normalized_minus_one_to_one":
        raise ValueError(f"coordinates mode {coordinates_mode!r}")
    return _sample(x, points, sampling_mode, padding_mode, padding_value, align_corners)


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
    points = F.affine_grid(matrix, [x.shape[0], x.shape[1], output_height, output_width], align_corners)
    return _sample(x, points, sampling_mode, padding_mode, padding_value, align_corners)


ROWS: dict[str, OpRow] = {
    "resize_bilinear": row(resize_bilinear),
    "resize_nearest_neighbor": row(resize_nearest_neighbor, copies=True),
    "upsample_bilinear": row(upsample_bilinear),
    "upsample_nearest_neighbor": row(upsample_nearest_neighbor, copies=True),
    "resize": row(resize, view=True),
    "resample": row(resample),
    "affine": row(affine),
}
