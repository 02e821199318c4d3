"""Compressed constants of iOS 16 to 18, alone, joined and nested, against coremltools' decompression."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mil_programs import Case, check_op, ct, mb, save_program, types

from pdconvert.executors.mil import MilSession, Package

INTEGERS = {
    "int4": (types.np_int4_dtype, -8, 7),
    "uint4": (types.np_uint4_dtype, 0, 15),
    "int8": (np.int8, -128, 127),
    "uint8": (np.uint8, 0, 255),
}
INDICES = {
    1: types.np_uint1_dtype,
    2: types.np_uint2_dtype,
    3: types.np_uint3_dtype,
    4: types.np_uint4_dtype,
    6: types.np_uint6_dtype,
    8: np.uint8,
}
SHAPE = (4, 6, 1, 2)


def codes(kind: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random integers of a type, its extremes among them."""
    dtype, low, high = INTEGERS[kind]
    array = np.random.default_rng(seed).integers(low, high + 1, shape)
    array.reshape(-1)[:2] = (low, high)[: array.size]
    return array.astype(dtype)


def scales(shape: tuple[int, ...], dtype: type, seed: int = 1) -> np.ndarray:
    """Random positive scales."""
    return (np.random.default_rng(seed).uniform(0.01, 0.2, shape)).astype(dtype)


def mask(seed: int = 3, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    """Random bits, about half of them set."""
    return (np.random.default_rng(seed).random(shape) < 0.5).astype(types.np_uint1_dtype)


Builders = Sequence[tuple[Callable[[], Any], np.ndarray | None]]


def check(builders: Builders, folder: Path, version: int = 18) -> None:
    """Run constants in both modes, all in one program.

    Args:
        builders: builds a constant, and what it must be (coremltools' decompression where None).
        folder: where the package goes.
        version: iOS version of the opset.

    fp32 mode agrees with the reference to the reference's own precision. fp16 mode gives what a
    decompression in fp16 gives, to half a unit in the last place where that rounds twice.
    """
    wanted: list[np.ndarray] = []

    def body(variables: Any) -> dict[str, Any]:
        outputs = {}
        for number, (build, expected) in enumerate(builders):
            weight = build()
            wanted.append(
                np.asarray(weight.op.materialized_val_inference()) if expected is None else expected
            )
            full = weight.dtype == types.fp32
            zero = variables["zero"] if full else mb.cast(x=variables["zero"], dtype="fp16")
            total = mb.add(x=weight, y=zero)
            outputs[f"w{number}"] = total if full else mb.cast(x=total, dtype="fp32")
        return outputs

    inputs = {"zero": np.zeros(1, np.float32)}
    package = Package.open(save_program(folder / "c.mlpackage", inputs, body, version))
    exact = MilSession(package, mode="fp32").run(inputs)
    rounded = MilSession(package, mode="fp16").run(inputs)
    for number, want in enumerate(wanted):
        name = f"w{number}"
        if want.dtype == np.float16:
            np.testing.assert_allclose(
                exact[name], want.astype(np.float32), rtol=2e-3, atol=1e-3, err_msg=name
            )
            np.testing.assert_allclose(
                rounded[name], want.astype(np.float32), rtol=1e-3, atol=1e-3, err_msg=name
            )
            assert (rounded[name].half().float() == rounded[name]).all()
        else:
            np.testing.assert_allclose(exact[name], want, rtol=1e-6, err_msg=name)
            assert (rounded[name] == exact[name]).all()


BLOCKS = ((1, 1, 1, 1), (4, 1, 1, 1), (1, 6, 1, 1), (4, 3, 1, 1), (2, 2, 1, 1), (2, 6, 1, 2), (4, 6, 1, 2))


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("offset", ["none", "integer", "float"])
def test_blockwise_shift_scale(kind: str, offset: str, tmp_path: Path) -> None:
    builders: list = []
    for number, (blocks, dtype) in enumerate(product(BLOCKS, (np.float16, np.float32))):
        given = {"data": codes(kind, SHAPE, number), "scale": scales(blocks, dtype)}
        if offset == "integer":
            given["offset"] = codes(kind, blocks, number + 9)
        elif offset == "float":
            given["offset"] = np.random.default_rng(number).uniform(-3, 3, blocks).astype(dtype)
        builders.append((partial(mb.constexpr_blockwise_shift_scale, **given), None))
    check(builders, tmp_path)


def test_a_code_times_a_scale_is_exact_in_fp32_mode(tmp_path: Path) -> None:
    data, scale = codes("int8", (8, 16)), scales((8, 1), np.float16)
    path = save_program(
        tmp_path / "w.mlpackage",
        {"zero": np.zeros(1, np.float16)},
        lambda v: {"out": mb.add(x=mb.constexpr_blockwise_shift_scale(data=data, scale=scale), y=v["zero"])},
    )
    out = MilSession(path).run({"zero": np.zeros(1)})["out"].numpy()
    np.testing.assert_array_equal(out.astype(np.float64), data.astype(np.float64) * scale.astype(np.float64))


@pytest.mark.parametrize("bits", INDICES)
def test_lut_to_dense(bits: int, tmp_path: Path) -> None:
    builders: list = []
    for number, (blocks, vector) in enumerate(product(BLOCKS[:6], ((1, None), (2, 0), (2, 1), (4, -1)))):
        size, axis = vector
        rng = np.random.default_rng(number)
        indices = rng.integers(0, 2**bits, SHAPE).astype(INDICES[bits])
        lut = rng.standard_normal((*blocks, 2**bits, size)).astype((np.float16, np.float32)[number % 2])
        given = {"indices": indices, "lut": lut} | ({} if axis is None else {"vector_axis": axis})
        builders.append((partial(mb.constexpr_lut_to_dense, **given), None))
    check(builders, tmp_path)


@pytest.mark.parametrize("bits", [1, 2, 4, 6, 8])
def test_lut_to_dense_of_ios16(bits: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(bits)
    indices = rng.integers(0, 2**bits, (3, 5, 2))
    packed = np.packbits(
        (indices.reshape(-1, 1) >> np.arange(bits) & 1).astype(np.uint8).reshape(-1), bitorder="little"
    )
    lut = rng.standard_normal(2**bits).astype(np.float16)
    shape = np.array([3, 5, 2], np.uint32)
    build = partial(mb.constexpr_lut_to_dense, indices=packed, lut=lut, shape=shape)
    check([(build, lut[indices])], tmp_path, version=16)


@pytest.mark.parametrize("kind", ["int8", "uint8"])
@pytest.mark.parametrize("version", [16, 17])
def test_affine_dequantize(kind: str, version: int, tmp_path: Path) -> None:
    builders: list = []
    for axis, dtype, vector in product((0, 1, -1), (np.float16, np.float32), (False, True)):
        shape = (SHAPE[axis],) if vector else ()
        scale, zero = (
            scales(shape, dtype),
            codes(kind, (9,))[: SHAPE[axis]] if vector else codes(kind, (3,))[2],
        )
        given = {"quantized_data": codes(kind, SHAPE), "scale": scale, "zero_point": zero, "axis": axis}
        builders.append((partial(mb.constexpr_affine_dequantize, **given), None))
    check(builders, tmp_path, version)


def test_sparse_to_dense(tmp_path: Path) -> None:
    bits = mask()
    data = np.random.default_rng(0).standard_normal(int(bits.astype(int).sum()))
    builders = [
        (partial(mb.constexpr_sparse_to_dense, nonzero_data=data.astype(dtype), mask=bits), None)
        for dtype in (np.float16, np.float32)
    ]
    check(builders, tmp_path)


def test_sparse_to_dense_of_ios16(tmp_path: Path) -> None:
    bits = np.random.default_rng(0).random(15) < 0.4
    data = np.random.default_rng(1).standard_normal(int(bits.sum())).astype(np.float16)
    given = {
        "nonzero_data": data,
        "mask": np.packbits(bits, bitorder="little"),
        "shape": np.array([3, 5], np.uint32),
    }
    check([(partial(mb.constexpr_sparse_to_dense, **given), None)], tmp_path, version=16)


def test_cast(tmp_path: Path) -> None:
    source = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float16)
    check([(partial(mb.constexpr_cast, source_val=source, output_dtype="fp32"), None)], tmp_path, version=16)


def test_lut_to_sparse(tmp_path: Path) -> None:
    builders: list = []
    for number, (bits, vector) in enumerate(product((2, 4), ((1, None), (2, 1)))):
        hits = mask()
        count = int(hits.astype(int).sum())
        rng = np.random.default_rng(number)
        data = rng.integers(0, 2**bits, count).astype(INDICES[bits])
        lut = rng.standard_normal((2, 1, 1, 1, 2**bits, vector[0])).astype(np.float16)
        extra = {} if vector[1] is None else {"vector_axis": vector[1]}

        def build(hits: Any = hits, data: Any = data, lut: Any = lut, extra: Any = extra) -> Any:
            bits, values = mb.constexpr_lut_to_sparse(
                indices_mask=hits, indices_nonzero_data=data, lut=lut, **extra
            )
            return mb.constexpr_sparse_to_dense(nonzero_data=values, mask=bits)

        builders.append((build, None))
    check(builders, tmp_path)


@pytest.mark.parametrize("offset", [False, True])
def test_sparse_blockwise_shift_scale(offset: bool, tmp_path: Path) -> None:
    builders: list = []
    for number, (kind, blocks) in enumerate(product(("int4", "int8"), ((1, 1, 1, 1), (4, 3, 1, 1)))):
        hits = mask()
        data = codes(kind, (int(hits.astype(int).sum()),), number)
        given = {"data_mask": hits, "nonzero_data": data, "scale": scales(blocks, np.float16)}
        if offset:
            given["offset"] = codes(kind, blocks, 7)

        def build(given: Any = given) -> Any:
            bits, values = mb.constexpr_sparse_blockwise_shift_scale(**given)
            return mb.constexpr_sparse_to_dense(nonzero_data=values, mask=bits)

        builders.append((build, None))
    check(builders, tmp_path)


def test_a_table_of_integers_then_scales(tmp_path: Path) -> None:
    """Palettization with an int8 table and a scale for each output channel, as joint compression writes it."""
    rng = np.random.default_rng(0)
    indices = rng.integers(0, 16, (4, 6)).astype(INDICES[4])
    lut, scale = rng.integers(-127, 128, (1, 1, 16, 1)).astype(np.int8), scales((4, 1), np.float16)

    def build() -> Any:
        return mb.constexpr_blockwise_shift_scale(
            data=mb.constexpr_lut_to_dense(indices=indices, lut=lut), scale=scale
        )

    check([(build, lut.reshape(-1)[indices.astype(int)].astype(np.float16) * scale)], tmp_path)


def test_a_table_that_is_quantized_itself(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    indices = rng.integers(0, 4, (4, 6)).astype(INDICES[2])
    table, scale = rng.integers(-127, 128, (2, 1, 4, 1)).astype(np.int8), scales((2, 1, 1, 1), np.float16)

    def build() -> Any:
        lut = mb.constexpr_blockwise_shift_scale(data=table, scale=scale)
        return mb.constexpr_lut_to_dense(indices=indices, lut=lut)

    lut = (table.astype(np.float16) * scale).reshape(2, 4)
    check([(build, np.stack([lut[i // 2][indices[i].astype(int)] for i in range(4)]))], tmp_path)


def test_a_scale_that_is_quantized_itself(tmp_path: Path) -> None:
    data, small = codes("int4", (4, 6)), codes("uint8", (4, 1))

    def build() -> Any:
        scale = mb.constexpr_blockwise_shift_scale(data=small, scale=np.array([[0.001]], np.float16))
        return mb.constexpr_blockwise_shift_scale(data=data, scale=scale)

    scale = (small.astype(np.float16) * np.float16(0.001)).astype(np.float16)
    check([(build, data.astype(np.float16) * scale)], tmp_path)


def _network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(8, 64, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(64, 32, 1), torch.nn.Flatten(),
        torch.nn.Linear(32 * 16, 24),
    ).eval()  # fmt: skip


def _compressions() -> dict[str, Callable[[Any], Any]]:
    cto = ct.optimize.coreml

    def config(one: Any) -> Any:
        return cto.OptimizationConfig(global_config=one)

    linear, palette = cto.OpLinearQuantizerConfig, cto.OpPalettizerConfig
    even = {"mode": "uniform", "weight_threshold": 0}
    prune = cto.OpMagnitudePrunerConfig(target_sparsity=0.6, weight_threshold=0)
    return {
        "per channel": lambda m: cto.linear_quantize_weights(
            m, config(linear(mode="linear_symmetric", weight_threshold=0))
        ),
        "asymmetric": lambda m: cto.linear_quantize_weights(m, config(linear(mode="linear", weight_threshold=0))),
        "int4 blocks": lambda m: cto.linear_quantize_weights(
            m, config(linear(dtype="int4", granularity="per_block", block_size=8, weight_threshold=0))
        ),
        "lut4": lambda m: cto.palettize_weights(m, config(palette(nbits=4, **even))),
        "lut3 groups": lambda m: cto.palettize_weights(
            m, config(palette(nbits=3, granularity="per_grouped_channel", group_size=8, **even))
        ),
        "lut4 scaled": lambda m: cto.palettize_weights(
            m, config(palette(nbits=4, enable_per_channel_scale=True, **even))
        ),
        "pruned": lambda m: cto.prune_weights(m, config(prune)),
        "pruned int8": lambda m: cto.linear_quantize_weights(
            cto.prune_weights(m, config(prune)), config(linear(weight_threshold=0)), joint_compression=True
        ),
        "pruned lut4": lambda m: cto.palettize_weights(
            cto.prune_weights(m, config(prune)), config(palette(nbits=4, **even)), joint_compression=True
        ),
    }  # fmt: skip


@pytest.fixture(scope="module")
def network() -> tuple[torch.nn.Module, Any]:
    module = _network()
    x = torch.randn(1, 8, 4, 4, generator=torch.Generator().manual_seed(0))
    traced = torch.jit.trace(module, x)
    model = ct.convert(
        traced,
        inputs=[ct.TensorType("x", x.shape)],
        minimum_deployment_target=ct.target.iOS18,
        skip_model_load=True,
    )
    return x, model


@pytest.mark.parametrize("name", _compressions())
def test_what_ct_optimize_writes(name: str, network: tuple[torch.Tensor, Any], tmp_path: Path) -> None:
    """A compressed network gives what the same network gives after coremltools decompressed it."""
    x, model = network
    compressed = _compressions()[name](model)
    compressed.save(str(tmp_path / "small.mlpackage"))
    ct.optimize.coreml.decompress_weights(compressed).save(str(tmp_path / "large.mlpackage"))
    for mode, slack in (("fp32", 2e-3), ("fp16", 5e-3)):
        small, large = (
            next(iter(MilSession(tmp_path / f"{size}.mlpackage", mode=mode).run({"x": x}).values()))
            for size in ("small", "large")
        )
        torch.testing.assert_close(small, large, rtol=slack, atol=slack)
    used = {op.type for op in Package.open(tmp_path / "small.mlpackage").block("main").operations}
    assert any(op.startswith("constexpr_") for op in used)


def quantize() -> Iterator[Case]:
    for kind, dtype, vector, zero in product(
        ("int8", "uint8"), (np.float32, np.float16), (False, True), (False, True)
    ):
        x = (np.random.default_rng(0).standard_normal((3, 5)) * 5).astype(dtype)
        tensors: dict[str, Any] = {"input": x, "scale": scales((5,), dtype) if vector else dtype(0.05)}
        if zero:
            tensors["zero_point"] = codes(kind, (5,)) if vector else codes(kind, (3,))[2]
        low, high = INTEGERS[kind][1:]

        def reference(
            input: np.ndarray, scale: np.ndarray, zero_point: Any = 0, low: int = low, high: int = high
        ) -> np.ndarray:
            return np.clip(np.round(input / scale) + np.float32(zero_point), low, high)

        yield Case(tensors, {"output_dtype": kind} | ({"axis": 1} if vector else {}), reference)


def dequantize() -> Iterator[Case]:
    for kind, dtype, vector, zero in product(
        ("int8", "uint8"), (np.float32, np.float16), (False, True), (False, True)
    ):
        tensors: dict[str, Any] = {
            "input": codes(kind, (3, 5)),
            "scale": scales((5,), dtype) if vector else dtype(0.05),
        }
        if zero:
            tensors["zero_point"] = codes(kind, (5,)) if vector else codes(kind, (3,))[2]

        def reference(input: np.ndarray, scale: np.ndarray, zero_point: Any = 0) -> np.ndarray:
            return (input.astype(np.float64) - zero_point) * scale

        yield Case(tensors, {"axis": 1} if vector else {}, reference)


CASES: dict[str, Callable[[], Iterable[Case]]] = {"quantize": quantize, "dequantize": dequantize}
TESTED = (
    "constexpr_blockwise_shift_scale",
    "constexpr_affine_dequantize",
    "constexpr_cast",
    "constexpr_lut_to_dense",
    "constexpr_lut_to_sparse",
    "constexpr_sparse_to_dense",
    "constexpr_sparse_blockwise_shift_scale",
)


@pytest.mark.parametrize("op", CASES)
def test_op(op: str, tmp_path: Path) -> None:
    check_op(op, CASES[op](), tmp_path)
