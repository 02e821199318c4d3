"""Convolutions, matrix products and attention against torch and numpy."""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mil_programs import Case, check_op
from test_mil_elementwise import FLOATS, integers

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def normal(seed: int, shape: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
    """Random values, a quarter of a standard normal's size, so that sums stay small in fp16."""
    return (np.random.default_rng(seed).standard_normal(shape) / 4).astype(dtype)


def torch_reference(function: Callable[..., torch.Tensor]) -> Callable[..., np.ndarray]:
    """Let a torch function take and give numpy arrays by MIL's names."""
    return lambda **arrays: function(**{k: torch.from_numpy(v) for k, v in arrays.items()}).numpy()


def same_padding(size: int, kernel: int, stride: int, dilation: int, lower: bool) -> tuple[int, int]:
    """(before, after) padding under which the output has ceil(size / stride) elements."""
    reach = (kernel - 1) * dilation + 1
    total = max(0, (math.ceil(size / stride) - 1) * stride + reach - size)
    return (total - total // 2, total // 2) if lower else (total // 2, total - total // 2)


def conv() -> Iterator[Case]:
    seed = 0
    for spatial, groups, stride, dilation in product((1, 2, 3), (1, 2, 4), (1, 2), (1, 2)):
        for kind in ("valid", "same", "same_lower", "custom"):
            seed += 1
            kernel = [(1, 3, 2)[(seed + axis) % 3] for axis in range(spatial)]
            sizes = [7 + axis for axis in range(spatial)]
            custom = np.random.default_rng(seed).integers(0, 3, 2 * spatial).tolist()
            pairs = {
                "valid": [(0, 0)] * spatial,
                "custom": list(zip(custom[::2], custom[1::2], strict=True)),
            }.get(kind) or [
                same_padding(s, k, stride, dilation, kind == "same_lower")
                for s, k in zip(sizes, kernel, strict=True)
            ]
            params: dict[str, Any] = {
                "strides": [stride] * spatial,
                "dilations": [dilation] * spatial,
                "groups": groups,
                "pad_type": kind,
            }
            if kind == "custom":
                params["pad"] = custom

            def reference(
                x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
                pairs: list = pairs, stride: int = stride, dilation: int = dilation, groups: int = groups,
            ) -> torch.Tensor:  # fmt: skip
                padded = F.pad(x, [n for pair in reversed(pairs) for n in pair])
                return CONV[x.dim() - 2](padded, weight, bias, stride, 0, dilation, groups)

            dtype = FLOATS[seed % 2]
            tensors = {
                "x": normal(seed, (2, 4, *sizes), dtype),
                "weight": normal(seed + 1, (8, 4 // groups, *kernel), dtype),
            }
            if seed % 3:
                tensors["bias"] = normal(seed + 2, (8,), dtype)
            since = 16 if kind == "same_lower" else 15
            checked = torch_reference(reference)
            yield Case(tensors, params, checked, since=since, constants=("weight", "bias"))  # fmt: skip


def pointwise() -> Iterator[Case]:
    """1x1 convolutions, which take another way: batches, several rows, one position, with bias."""
    for seed, (shape, dtype, biased) in enumerate(
        product(((1, 6, 1, 9), (1, 6, 1, 1), (3, 6, 1, 4), (2, 6, 3, 5), (1, 1, 1, 4)), FLOATS, (False, True))
    ):
        tensors = {"x": normal(seed, shape, dtype), "weight": normal(seed, (5, shape[1], 1, 1), dtype)}
        if biased:
            tensors["bias"] = normal(seed, (5,), dtype)
        yield Case(tensors, {}, torch_reference(lambda x, weight, bias=None: F.conv2d(x, weight, bias)))


def conv_all() -> Iterator[Case]:
    yield from conv()
    yield from pointwise()


def conv_transpose() -> Iterator[Case]:
    seed = 0
    for spatial, groups, stride, dilation in product((1, 2), (1, 2), (1, 2, 3), (1, 2)):
        for kind in ("valid", "custom", "output_shape"):
            seed += 1
            kernel = [(3, 2)[(seed + axis) % 2] for axis in range(spatial)]
            sizes = [4 + axis for axis in range(spatial)]
            extra = stride - 1 if kind == "output_shape" else 0
            trim = 1 if kind != "valid" else 0
            params: dict[str, Any] = {
                "strides": [stride] * spatial,
                "dilations": [dilation] * spatial,
                "groups": groups,
            }
            if kind != "valid":
                params |= {"pad_type": "custom", "pad": [trim] * (2 * spatial)}
            full = [(s - 1) * stride + (k - 1) * dilation + 1 for s, k in zip(sizes, kernel, strict=True)]
            if kind == "output_shape":
                params["output_shape"] = [2, 6, *[f - 2 * trim + extra for f in full]]

            def reference(
                x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, trim: int = trim,
                extra: int = extra, stride: int = stride, dilation: int = dilation, groups: int = groups,
            ) -> torch.Tensor:  # fmt: skip
                function = TRANSPOSED[x.dim() - 2]
                return function(x, weight, bias, stride, trim, extra, groups, dilation)

            if extra >= max(stride, dilation):
                continue
            dtype = FLOATS[seed % 2]
            tensors = {
                "x": normal(seed, (2, 4, *sizes), dtype),
                "weight": normal(seed, (4, 6 // groups, *kernel), dtype),
            }
            if seed % 3:
                tensors["bias"] = normal(seed, (6,), dtype)
            yield Case(tensors, params, torch_reference(reference), constants=("weight", "bias"))  # fmt: skip
    for stride, kernel in ((2, 3), (2, 4), (3, 3)):  # same: stride * size elements, the surplus cut off

        def cut(x: torch.Tensor, weight: torch.Tensor, stride: int = stride) -> torch.Tensor:
            whole = F.conv_transpose1d(x, weight, None, stride)
            surplus = whole.shape[-1] - x.shape[-1] * stride
            return whole[..., surplus // 2 : whole.shape[-1] - (surplus - surplus // 2)]

        tensors = {"x": normal(kernel, (1, 2, 5)), "weight": normal(stride, (2, 3, kernel))}
        yield Case(tensors, {"strides": [stride], "pad_type": "same"}, torch_reference(cut))
        for size in range(4 * stride + 1, 5 * stride + 1):  # what a "same" convolution makes 5 elements of

            def gradient(
                x: torch.Tensor, weight: torch.Tensor, size: int = size, stride: int = stride
            ) -> torch.Tensor:
                whole = torch.zeros(1, 3, size, requires_grad=True)
                padding = same_padding(size, weight.shape[-1], stride, 1, False)
                F.conv1d(F.pad(whole, padding), weight, None, stride).backward(x)
                assert whole.grad is not None
                return whole.grad

            params = {"strides": [stride], "pad_type": "same", "output_shape": [1, 3, size]}
            yield Case(tensors, params, torch_reference(gradient), constants=("weight",))


def linear() -> Iterator[Case]:
    for seed, (shape, dtype) in enumerate(product(((6,), (1, 6), (3, 6), (2, 3, 6), (2, 1, 3, 6)), FLOATS)):
        tensors = {"x": normal(seed, shape, dtype), "weight": normal(seed, (4, 6), dtype)}
        yield Case(tensors)
        yield Case(tensors | {"bias": normal(seed, (4,), dtype)})


MATRICES = (
    ((3, 4), (4, 5)),
    ((1, 4), (4, 1)),
    ((2, 3, 4), (4, 5)),
    ((3, 4), (2, 4, 5)),
    ((2, 3, 4), (2, 4, 5)),
    ((2, 3, 4), (1, 4, 5)),
    ((2, 5, 3, 4), (2, 1, 4, 3)),
    ((2, 1, 3, 4), (2, 5, 4, 3)),
    ((2, 5, 1, 4), (5, 4, 3)),
    ((5, 1, 4), (2, 5, 4, 1)),
    ((2, 3, 2, 3, 4), (2, 3, 1, 4, 2)),
    ((2, 3, 1, 3, 4), (2, 3, 2, 4, 2)),
)


def matmul() -> Iterator[Case]:
    for seed, ((one, two), flip_x, flip_y, dtype) in enumerate(
        product(MATRICES, (False, True), (False, True), (*FLOATS, np.int32))
    ):
        if dtype == np.int32:
            x, y = integers(seed, one), integers(seed + 99, two)
        else:
            x, y = normal(seed, one, dtype), normal(seed + 99, two, dtype)
        x = np.ascontiguousarray(x.swapaxes(-1, -2)) if flip_x else x
        y = np.ascontiguousarray(y.swapaxes(-1, -2)) if flip_y else y
        yield Case({"x": x, "y": y}, {"transpose_x": flip_x, "transpose_y": flip_y})
    for dtype in FLOATS:
        yield Case({"x": normal(0, (4,), dtype), "y": normal(1, (4, 5), dtype)})
        yield Case({"x": normal(0, (4,), dtype), "y": normal(1, (2, 4, 5), dtype)})


def einsum() -> Iterator[Case]:
    for seed, dtype in enumerate(FLOATS):
        for one, two in (
            ((2, 3, 4, 5), (2, 5, 4, 6)),
            ((1, 3, 4, 5), (2, 5, 4, 6)),
            ((2, 3, 4, 5), (2, 5, 1, 6)),
        ):
            values = [normal(seed, one, dtype), normal(seed + 9, two, dtype)]
            for equation in ("nchw,nwhu->nchu", "abcd,adce->abce"):
                left, right = equation.split("->")[0].split(",")

                def reference(values: list[np.ndarray], equation: str = equation) -> np.ndarray:
                    x, y = values
                    n, h = max(x.shape[0], y.shape[0]), max(x.shape[2], y.shape[2])
                    x = np.broadcast_to(x, (n, x.shape[1], h, x.shape[3]))
                    y = np.broadcast_to(y, (n, y.shape[1], h, y.shape[3]))
                    return np.einsum(equation, x, y)

                yield Case({"values": values}, {"equation": equation}, reference)
        values = [normal(seed, (3, 4, 5), dtype), normal(seed + 9, (5, 4, 6), dtype)]
        yield Case(
            {"values": values},
            {"equation": "chw,whr->chr"},
            lambda values: np.einsum("chw,whr->chr", *values),
        )


def attention() -> Iterator[Case]:
    for seed, (batch, dtype, mask) in enumerate(
        product(((2,), (1, 3), (2, 2, 2)), FLOATS, ("", "bool", "float", "broad"))
    ):
        tensors = {
            "query": normal(seed, (*batch, 4, 8), dtype),
            "key": normal(seed + 1, (*batch, 6, 8), dtype),
            "value": normal(seed + 2, (*batch, 6, 5), dtype),
        }
        rng = np.random.default_rng(seed)
        if mask == "bool":
            tensors["attn_mask"] = np.concatenate(
                [np.ones((*batch, 4, 1), bool), rng.random((*batch, 4, 5)) < 0.5], -1
            )
        elif mask:
            tensors["attn_mask"] = normal(seed, (*batch, 4, 6) if mask == "float" else (1, 6), dtype)

        def reference(
            query: np.ndarray, key: np.ndarray, value: np.ndarray, attn_mask: Any = None
        ) -> np.ndarray:
            parts = [torch.from_numpy(a) for a in (query, key, value)]
            held = None if attn_mask is None else torch.from_numpy(attn_mask)
            return F.scaled_dot_product_attention(*parts, held).numpy()

        yield Case(tensors, {}, reference)


CASES: dict[str, Callable[[], Iterable[Case]]] = {
    "conv": conv_all,
    "conv_transpose": conv_transpose,
    "linear": linear,
    "matmul": matmul,
    "einsum": einsum,
    "scaled_dot_product_attention": attention,
}


@pytest.mark.parametrize("op", CASES)
def test_op(op: str, tmp_path: Path) -> None:
    check_op(op, CASES[op](), tmp_path)
