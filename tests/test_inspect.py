"""`inspect`: packages that coremltools wrote, described from their files alone."""

import json
import logging
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from pdconvert.errors import InputError
from pdconvert.inspect_package import inspect_decode, inspect_path
from pdconvert.schema import SCHEMA


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with packages that coremltools wrote.

    small: iOS 18, one convolution of each weight form; both: functions `small` and `large` over one
    weight file, where `large` has one more convolution; old: iOS 16 forms; state: a state.
    """
    logging.getLogger("coremltools").setLevel(logging.ERROR)
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    folder = tmp_path_factory.mktemp("packages")
    rng = np.random.default_rng(0)
    half, int4, uint4 = np.float16, types.np_int4_dtype, types.np_uint4_dtype

    def save(name, program, target):
        model = ct.convert(program, minimum_deployment_target=target, skip_model_load=True)
        model.save(str(folder / f"{name}.mlpackage"))

    def convolutions(*, large):
        rng = np.random.default_rng(0)

        @mb.program(input_specs=[mb.TensorSpec((1, 64, 1, 8), types.fp16)], opset_version=ct.target.iOS18)
        def program(x):
            codes = rng.integers(-127, 127, (32, 64, 1, 1)).astype(np.int8)
            weight = mb.constexpr_blockwise_shift_scale(data=codes, scale=np.ones((32, 1, 1, 1), half))
            x = mb.conv(x=x, weight=weight)
            codes = rng.integers(-7, 7, (32, 32, 1, 1)).astype(int4)
            weight = mb.constexpr_blockwise_shift_scale(data=codes, scale=np.ones((32, 2, 1, 1), half))
            x = mb.conv(x=x, weight=weight)
            codes = rng.integers(0, 15, (32, 32, 1, 1)).astype(uint4)
            lut = rng.random((2, 1, 1, 1, 16, 1)).astype(half)
            x = mb.conv(x=x, weight=mb.constexpr_lut_to_dense(indices=codes, lut=lut))
            x = mb.conv(x=x, weight=rng.random((32, 32, 1, 1)).astype(half))
            if large:
                x = mb.conv(x=x, weight=rng.random((16, 32, 1, 1)).astype(half))
            return mb.relu(x=x, name="out")

        return program

    save("small", convolutions(large=False), ct.target.iOS18)
    save("large", convolutions(large=True), ct.target.iOS18)
    descriptor = ct.utils.MultiFunctionDescriptor()
    for name in ("small", "large"):
        descriptor.add_function(str(folder / f"{name}.mlpackage"), "main", name)
    descriptor.default_function_name = "small"
    ct.utils.save_multifunction(descriptor, str(folder / "both.mlpackage"))

    @mb.program(input_specs=[mb.TensorSpec((1, 64, 1, 8), types.fp16)], opset_version=ct.target.iOS16)
    def old(x):
        codes = rng.integers(-127, 127, (32, 64, 1, 1)).astype(np.int8)
        scale = np.ones(32, half)
        zero_point = np.zeros(32, np.int8)
        weight = mb.constexpr_affine_dequantize(
            quantized_data=codes, scale=scale, zero_point=zero_point, axis=0
        )
        x = mb.conv(x=x, weight=weight)
        indices = rng.integers(0, 255, 512).astype(np.uint8)
        table = rng.random(16).astype(half)
        weight = mb.constexpr_lut_to_dense(indices=indices, lut=table, shape=np.uint32([32, 32, 1, 1]))
        return mb.conv(x=x, weight=weight, name="out")

    save("old", old, ct.target.iOS16)

    @mb.program(
        input_specs=[mb.TensorSpec((1, 2), types.fp16), mb.StateTensorSpec((1, 2), types.fp16)],
        opset_version=ct.target.iOS18,
    )
    def state(x, total):
        total = mb.coreml_update_state(state=total, value=mb.add(x=x, y=mb.read_state(input=total)))
        return mb.relu(x=total, name="out")

    save("state", state, ct.target.iOS18)
    return folder


def weights(function: dict) -> dict[tuple[str, str], tuple[int, int, int]]:
    return {
        (group["dtype"], group["granularity"]): (group["tensors"], group["elements"], group["bytes"])
        for group in function["weights"]
    }


def test_functions_tensors_operations_and_weights(packages: Path) -> None:
    report = inspect_path(packages / "small.mlpackage")
    assert report["kind"] == "package"
    assert report["spec_version"] == 9
    assert report["default_function"] == "main"
    main = report["functions"]["main"]
    assert main["inputs"] == [{"name": "x", "shape": [1, 64, 1, 8], "dtype": "fp16"}]
    assert main["outputs"] == [{"name": "out", "shape": [1, 32, 1, 8], "dtype": "fp16"}]
    assert main["states"] == []
    assert main["ops"] == {
        "conv": 4,
        "constexpr_blockwise_shift_scale": 2,
        "constexpr_lut_to_dense": 1,
        "relu": 1,
    }
    assert weights(main) == {
        ("int8", "per_channel"): (1, 32 * 64, 32 * 64 + 2 * 32),
        ("int4", "per_block 16"): (1, 32 * 32, 32 * 32 // 2 + 2 * 64),
        ("lut4", "per_group 16"): (1, 32 * 32, 32 * 32 // 2 + 2 * 32),
        ("fp16", "-"): (1, 32 * 32, 2 * 32 * 32),
    }
    assert main["weight_bytes"] == sum(size for _, _, size in weights(main).values())


def test_sharing_between_functions(packages: Path) -> None:
    report = inspect_path(packages / "both.mlpackage")
    small, large = (report["functions"][name]["weight_bytes"] for name in ("small", "large"))
    extra = 16 * 32 * 2
    assert large == small + extra
    assert report["sharing"] == {
        "records": [
            {"functions": ["large", "small"], "records": 7, "bytes": small},
            {"functions": ["large"], "records": 1, "bytes": extra},
        ],
        "stored_bytes": large,
        "named_bytes": small + large,
        "shared_bytes": small,
        "alone_bytes": {"large": extra, "small": 0},
    }


def test_the_forms_of_ios16(packages: Path) -> None:
    main = inspect_path(packages / "old.mlpackage")["functions"]["main"]
    assert {key: value[:2] for key, value in weights(main).items()} == {
        ("int8", "per_channel"): (1, 32 * 64),
        ("lut4", "per_tensor"): (1, 32 * 32),
    }


def test_a_sparse_weight_with_scales(tmp_path: Path) -> None:
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    def body(x):
        mask = (np.arange(512) % 2).reshape(64, 8, 1, 1).astype(types.np_uint1_dtype)
        scale = np.ones((64, 1, 1, 1), np.float16)
        mask, values = mb.constexpr_sparse_blockwise_shift_scale(
            data_mask=mask, nonzero_data=np.ones(256, np.int8), scale=scale
        )
        return mb.conv(x=x, weight=mb.constexpr_sparse_to_dense(nonzero_data=values, mask=mask))

    path = write_program(tmp_path / "x.mlpackage", [(1, 8, 1, 10)], body)
    main = inspect_path(path)["functions"]["main"]
    assert weights(main) == {("sparse int8", "per_channel"): (1, 512, 256 + 128 + 64)}


def test_a_table_for_each_place_of_several_axes(tmp_path: Path) -> None:
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    def body(x):
        codes = np.zeros((32, 8, 1, 3), types.np_uint4_dtype)
        lut = np.ones((1, 8, 1, 3, 16, 1), np.float16)
        return mb.conv(x=x, weight=mb.constexpr_lut_to_dense(indices=codes, lut=lut))

    path = write_program(tmp_path / "x.mlpackage", [(1, 8, 1, 10)], body)
    [group] = weights(inspect_path(path)["functions"]["main"])
    assert group == ("lut4", "per_group 32")


def test_states(packages: Path) -> None:
    main = inspect_path(packages / "state.mlpackage")["functions"]["main"]
    assert [state["shape"] for state in main["states"]] == [[1, 2]]
    assert [value["name"] for value in main["inputs"]] == ["x"]
    assert main["weights"] == []


def products(mb):
    """One of each product, with its multiply-and-adds: name → (inputs, function of the inputs, count)."""
    half = np.float16
    x, heads = (1, 8, 1, 10), (1, 4, 6, 16)
    return {
        "conv": ((x,), lambda a: mb.conv(x=a, weight=np.ones((4, 8, 1, 3), half)), 4 * 8 * 8 * 3),
        "grouped": ((x,), lambda a: mb.conv(x=a, weight=np.ones((4, 4, 1, 1), half), groups=2), 4 * 10 * 4),
        "transposed": (
            (x,),
            lambda a: mb.conv_transpose(x=a, weight=np.ones((8, 4, 1, 3), half)),
            8 * 10 * 4 * 3,
        ),
        "linear": (((5, 8),), lambda a: mb.linear(x=a, weight=np.ones((3, 8), half)), 5 * 3 * 8),
        "matmul": ((heads, heads), lambda a, b: mb.matmul(x=a, y=b, transpose_y=True), 4 * 6 * 6 * 16),
        "flipped": ((heads, heads), lambda a, b: mb.matmul(x=a, y=b, transpose_x=True), 4 * 16 * 16 * 6),
        "broadcast": (((1, 4, 6, 16), (1, 1, 16, 5)), lambda a, b: mb.matmul(x=a, y=b), 4 * 6 * 5 * 16),
        "einsum": (
            ((1, 8, 3, 10), (1, 10, 3, 7)),
            lambda a, b: mb.einsum(values=(a, b), equation="nchw,nwhu->nchu"),
            8 * 3 * 10 * 7,
        ),
        "attention": (
            ((1, 4, 6, 16), (1, 4, 9, 16), (1, 4, 9, 20)),
            lambda a, b, c: mb.scaled_dot_product_attention(query=a, key=b, value=c),
            4 * 6 * 9 * (16 + 20),
        ),
        "lstm": (
            ((7, 2, 3), (2, 8), (2, 8)),
            lambda x, h, c: mb.lstm(
                x=x,
                initial_h=h,
                initial_c=c,
                direction="bidirectional",
                weight_ih=np.ones((16, 3), half),
                weight_hh=np.ones((16, 4), half),
                weight_ih_back=np.ones((16, 3), half),
                weight_hh_back=np.ones((16, 4), half),
            )[0],
            2 * 7 * 2 * 16 * (3 + 4),
        ),  # fmt: skip
        "relu": ((x,), lambda a: mb.relu(x=a), 0),
    }


def write_program(path: Path, inputs, body) -> Path:
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import Function, Program, types

    from pdconvert.emit.coreml import write_package

    placeholders = {f"x{i}": mb.placeholder(shape=shape, dtype=types.fp16) for i, shape in enumerate(inputs)}
    program = Program()
    with Function(placeholders, opset_version=ct.target.iOS18) as function:
        function.set_outputs([body(*function.inputs.values())])
    program.add_function("main", function)
    write_package(path, program, "iOS18", {})
    return path


def test_work_of_products(tmp_path: Path) -> None:
    from coremltools.converters.mil import Builder as mb

    for name, (inputs, body, count) in products(mb).items():
        path = write_program(tmp_path / f"{name}.mlpackage", inputs, body)
        assert inspect_path(path)["functions"]["main"]["cost"]["flops"] == 2 * count, name


def test_bytes_moved(tmp_path: Path, packages: Path) -> None:
    from coremltools.converters.mil import Builder as mb

    def body(x):
        weight = np.ones((64, 8, 1, 1), np.float16)
        return mb.add(x=mb.conv(x=x, weight=weight), y=np.float16(1))

    path = write_program(tmp_path / "x.mlpackage", [(1, 8, 1, 10)], body)
    assert inspect_path(path)["functions"]["main"]["cost"] == {
        "flops": 2 * 64 * 10 * 8,
        "weight_bytes": 2 * 64 * 8 + 2,
        "activation_bytes": 2 * 10 * (8 + 64 + 64 + 64),
        "unsized_ops": 0,
    }
    compressed = inspect_path(packages / "small.mlpackage")["functions"]["main"]
    assert compressed["cost"]["weight_bytes"] == compressed["weight_bytes"]


def test_a_gather_moves_the_rows_that_it_gives(tmp_path: Path) -> None:
    from coremltools.converters.mil import Builder as mb

    def body(x):
        return mb.gather(x=np.ones((5000, 4), np.float16), indices=mb.cast(x=x, dtype="int32"), axis=0)

    path = write_program(tmp_path / "x.mlpackage", [(3,)], body)
    cost = inspect_path(path)["functions"]["main"]["cost"]
    assert (cost["weight_bytes"], cost["activation_bytes"]) == (0, 3 * (2 + 4) + 2 * 3 * 4 * 2)


def write_safetensors(path: Path, tensors: dict[str, tuple[str, int]]) -> None:
    header, begin = {}, 0
    for name, (dtype, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [size], "data_offsets": [begin, begin + size]}
        begin += size
    text = json.dumps({"__metadata__": {"format": "mlx"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(begin))


@pytest.fixture
def build(packages: Path, tmp_path: Path) -> Path:
    """A build folder with a package and decode weights."""
    shutil.copytree(packages / "small.mlpackage", tmp_path / "prefill.mlpackage")
    (tmp_path / "decode").mkdir()
    config = {"model_type": "llama", "quantization": {"bits": 8, "group_size": 64}}
    (tmp_path / "decode" / "config.json").write_text(json.dumps(config))
    tensors = {"a.weight": ("U32", 64), "a.scales": ("F16", 4), "b.weight": ("U32", 32)}
    write_safetensors(tmp_path / "decode" / "model.safetensors", tensors)
    manifest = {"schema": "1.0", "name": "x", "verdict": "pass", "prefill": {"package": "prefill.mlpackage"}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    return tmp_path


def test_a_build(build: Path) -> None:
    report = inspect_path(build)
    assert (report["kind"], report["name"], report["verdict"]) == ("build", "x", "pass")
    assert list(report["prefill"]["functions"]) == ["main"]
    assert report["decode"] == {
        "model_type": "llama",
        "quantization": {"bits": 8, "group_size": 64},
        "tensors": {"F16": {"tensors": 1, "bytes": 4}, "U32": {"tensors": 2, "bytes": 96}},
        "weight_bytes": 100,
    }


def test_a_build_of_several_packages(build: Path) -> None:
    names = [f"part_{number}.mlpackage" for number in (1, 2)]
    for name in names:
        shutil.copytree(build / "prefill.mlpackage", build / name)
    manifest = json.loads((build / "manifest.json").read_text())
    manifest["prefill"] = {"parts": [{"package": name} for name in names]}
    (build / "manifest.json").write_text(json.dumps(manifest))
    report = inspect_path(build)
    assert "prefill" not in report
    assert [part["path"] for part in report["parts"]] == [str(build / name) for name in names]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda b: (b / "decode" / "config.json").unlink(),
            "config.json is missing; the build is incomplete",
        ),
        (lambda b: (b / "decode" / "config.json").write_text("{"), "is not JSON"),
        (lambda b: (b / "manifest.json").write_text("{"), "not JSON"),
        (lambda b: (b / "manifest.json").write_text("{}"), "no schema version"),
        (
            lambda b: (b / "manifest.json").write_text('{"schema": "2.0"}'),
            f"schema 2.0 is newer than {SCHEMA}",
        ),
        (lambda b: (b / "manifest.json").write_text('{"schema": "1.3"}'), "no `prefill` section"),
        (lambda b: shutil.rmtree(b / "prefill.mlpackage"), "prefill.mlpackage: no such package"),
        (
            lambda b: (b / "decode" / "model.safetensors").write_bytes(b"version https://git-lfs"),
            "not a safetensors file, or truncated",
        ),
        (lambda b: (b / "decode" / "model.safetensors").write_bytes(b""), "or truncated"),
        (
            lambda b: (b / "decode" / "model.safetensors").write_bytes(
                (b / "decode" / "model.safetensors").read_bytes()[:-1]
            ),
            "truncated: tensor b.weight ends at byte",
        ),
    ],
)
def test_a_damaged_build(build: Path, damage, message: str) -> None:
    damage(build)
    with pytest.raises(InputError) as caught:
        inspect_path(build)
    assert message in str(caught.value)


def test_what_is_neither_a_package_nor_a_build(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "model.mlmodelc").mkdir()
    cases = {
        "none": "no such package",
        "file": "not a folder",
        "": "is neither a build (no manifest.json) nor an .mlpackage (no Manifest.json)",
        "model.mlmodelc": "is compiled for one device; give the .mlpackage that it was made from",
    }
    for name, message in cases.items():
        with pytest.raises(InputError) as caught:
            inspect_path(tmp_path / name)
        assert message in str(caught.value)


def test_a_decode_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the build is incomplete"):
        inspect_decode(tmp_path / "decode")
