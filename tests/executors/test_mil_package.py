"""Opening packages: what a good one says of itself, and one clear line for every damage."""

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from mil_programs import ct, mb, save_program, types

from pdconvert.cli import main
from pdconvert.errors import InputError
from pdconvert.executors.mil import MilSession, Package, ValueInfo, dtypes
from pdconvert.executors.mil.blob import BlobFile, unpack_bits
from pdconvert.executors.mil.proto import model_pb2

WEIGHT = np.arange(64 * 8, dtype=np.float16).reshape(64, 8)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with one weight in its file and one state."""

    def body(v: dict) -> dict:
        product = mb.linear(x=v["x"], weight=WEIGHT, name="product")
        kept = mb.add(x=mb.read_state(input=v["memory"]), y=product)
        return {"out": mb.coreml_update_state(state=v["memory"], value=kept)}

    path = tmp_path_factory.mktemp("packages") / "good.mlpackage"
    inputs = {"x": np.zeros((1, 8), np.float16)}
    return save_program(path, inputs, body, states={"memory": ((1, 64), types.fp16)})


@pytest.fixture
def damaged(good: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(good, tmp_path / "bad.mlpackage"))


def model_file(package: Path) -> Path:
    return package / "Data" / "com.apple.CoreML" / "model.mlmodel"


def weight_file(package: Path) -> Path:
    return package / "Data" / "com.apple.CoreML" / "weights" / "weight.bin"


def test_functions(good: Path) -> None:
    package = Package.open(good)
    assert package.function_names == ["main"]
    info = package.functions["main"]
    assert info.inputs == {"x": ValueInfo((1, 8), "fp16")}
    assert info.outputs == {"out": ValueInfo((1, 64), "fp16")}
    assert info.states == {"memory": ValueInfo((1, 64), "fp16", state=True)}


def test_opening_imports_neither_torch_nor_coremltools(good: Path) -> None:
    code = (
        "import sys; from pdconvert.executors.mil import Package; Package.open(sys.argv[1]).functions;"
        "print([m for m in ('torch', 'coremltools') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(good)], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_message_classes_are_those_of_coremltools() -> None:
    assert model_pb2().Model is ct.proto.Model_pb2.Model


def _edit_spec(change: Callable) -> Callable[[Path], None]:
    def apply(package: Path) -> None:
        spec = model_pb2().Model()
        spec.ParseFromString(model_file(package).read_bytes())
        change(spec)
        model_file(package).write_bytes(spec.SerializeToString())

    return apply


def _version(number: int) -> Callable[[Path], None]:
    return _edit_spec(lambda spec: setattr(spec, "specificationVersion", number))


def _edit_manifest(change: Callable) -> Callable[[Path], None]:
    def apply(package: Path) -> None:
        file = package / "Manifest.json"
        manifest = json.loads(file.read_text())
        change(manifest)
        file.write_text(json.dumps(manifest))

    return apply


def _operation(spec: object, kind: str) -> object:
    (block,) = spec.mlProgram.functions["main"].block_specializations.values()  # type: ignore[attr-defined]
    return next(op for op in block.operations if op.type == kind)


def _weights_elsewhere(name: str) -> Callable:
    def change(spec: object) -> None:
        (block,) = spec.mlProgram.functions["main"].block_specializations.values()  # type: ignore[attr-defined]
        for op in block.operations:
            for value in op.attributes.values():
                if value.WhichOneof("value") == "blobFileValue":
                    value.blobFileValue.fileName = name

    return change


def _patch(offset: int, data: bytes) -> Callable[[Path], None]:
    def apply(package: Path) -> None:
        with weight_file(package).open("r+b") as file:
            file.seek(offset)
            file.write(data)

    return apply


def _rename(kind: str, new: str) -> Callable:
    def change(spec: object) -> None:
        _operation(spec, kind).type = new  # type: ignore[attr-defined]

    return change


def _wrong_input(spec: object) -> None:
    _operation(spec, "linear").inputs["x"].arguments[0].name = "ghost"  # type: ignore[attr-defined]


def _extra_input(spec: object) -> None:
    linear = _operation(spec, "linear")
    linear.inputs["twist"].CopyFrom(linear.inputs["x"])  # type: ignore[attr-defined]


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no package": (lambda p: shutil.rmtree(p), "no such package; an .mlpackage is a folder"),
    "no manifest": (lambda p: (p / "Manifest.json").unlink(), "has no Manifest.json"),
    "manifest not JSON": (lambda p: (p / "Manifest.json").write_text("{"), "not readable as JSON"),
    "manifest a list": (lambda p: (p / "Manifest.json").write_text("[]"), "names no model"),
    "manifest without model": (_edit_manifest(lambda m: m["itemInfoEntries"].clear()), "names no model"),
    "model path outside": (
        _edit_manifest(lambda m: m["itemInfoEntries"][m["rootModelIdentifier"]].update(path="../../x")),
        "points outside the package",
    ),
    "no model file": (lambda p: model_file(p).unlink(), "the model file is missing"),
    "model file damaged": (lambda p: model_file(p).write_bytes(b"\x0a\xff\xff"), "not a Core ML model, or damaged"),
    "model file empty": (lambda p: model_file(p).write_bytes(b""), "holds no model"),
    "spec version too new": (_version(99), "specification version 99 is outside 6..9"),
    "spec version too old": (_version(4), "specification version 4 is outside 6..9"),
    "no function": (_edit_spec(lambda s: s.mlProgram.functions.clear()), "the program has no function"),
    "no block for the opset": (
        _edit_spec(lambda s: setattr(s.mlProgram.functions["main"], "opset", "CoreML5")),
        "no operations for its opset 'CoreML5'",
    ),
    "unknown op": (
        _edit_spec(_rename("linear", "quantum_linear")),
        "op quantum_linear 'product' (number 2 of function main): ",
    ),
    "refused op": (
        _edit_spec(_rename("linear", "gru")),
        "op gru 'product' (number 2 of function main): cannot be run: MIL",
    ),
    "op reads nothing": (_edit_spec(_wrong_input), "its input x is 'ghost', which nothing before it computes"),
    "op input unknown": (_edit_spec(_extra_input), "has an input 'twist' that this op type does not have"),
    "no weight file": (lambda p: weight_file(p).unlink(), "the weight file is missing; the package is incomplete"),
    "weight file empty": (lambda p: weight_file(p).write_bytes(b""), "the weight file cannot be read"),
    "weight file cut in its header": (lambda p: weight_file(p).write_bytes(b"\x01\0\0\0\x02\0\0\0"), "it is truncated"),
    "weight file cut in a record": (
        lambda p: weight_file(p).write_bytes(weight_file(p).read_bytes()[:200]),
        "truncated: the record at offset 64 ends at byte 1152 of 200",
    ),
    "weight file cut before a record": (
        lambda p: weight_file(p).write_bytes(weight_file(p).read_bytes()[:100]),
        "no weight record at offset 64 of 100 bytes",
    ),
    "storage version": (_patch(4, struct.pack("<I", 9)), "weight storage version 9"),
    "record marker": (_patch(64, b"\0\0\0\0"), "no weight record at offset 64 (its marker is 0x00000000)"),
    "record type": (_patch(68, struct.pack("<I", 3)), "holds uint8, the program expects fp16"),
    "record size": (_patch(72, struct.pack("<Q", 10)), "has 10 bytes, fp16 [64, 8] needs 1024"),
    "weights outside": (_edit_spec(_weights_elsewhere("@model_path/../../../x.bin")), "points outside the package"),
    "weights by absolute path": (_edit_spec(_weights_elsewhere("/etc/passwd")), "does not begin with @model_path/"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_told_in_one_line(name: str, damaged: Path) -> None:
    damage, message = DAMAGE[name]
    damage(damaged)
    with pytest.raises(InputError) as caught:
        _ = MilSession(damaged).plan
    text = str(caught.value)
    assert message in text
    assert str(damaged) in text
    assert "\n" not in text


@pytest.mark.parametrize("command", ["exec", "inspect", "lint"])
@pytest.mark.parametrize(
    "name",
    [
        "manifest without model",
        "no weight file",
        "weight file cut in a record",
        "spec version too new",
        "unknown op",
        "no package",
        "model file damaged",
    ],
)
def test_the_command_line_tells_it_in_one_line(
    name: str, command: str, damaged: Path, tmp_path: Path
) -> None:
    damage, message = DAMAGE[name]
    damage(damaged)
    inputs = tmp_path / "in.npz"
    np.savez(inputs, x=np.zeros((1, 8), np.float16))
    options = ["--inputs", str(inputs)] if command == "exec" else []
    result = CliRunner().invoke(main, [command, str(damaged), *options])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["inspect", "lint"])
def test_what_mil_knows_is_shown_though_it_cannot_be_run(command: str, damaged: Path) -> None:
    _edit_spec(_rename("linear", "while_loop"))(damaged)
    result = CliRunner().invoke(main, [command, str(damaged), "--json"])
    assert result.exit_code != 2
    assert command == "lint" or "while_loop" in result.stdout


@pytest.mark.parametrize("command", ["inspect", "lint"])
def test_an_unknown_op_inside_a_block_of_another_op_is_found(command: str, damaged: Path) -> None:
    def nest(spec: Any) -> None:
        function = spec.mlProgram.functions["main"]
        block = function.block_specializations[function.opset]
        linear = next(op for op in block.operations if op.type == "linear")
        inner = linear.blocks.add().operations.add()
        inner.type = "quantum_linear"
        inner.outputs.add().CopyFrom(linear.outputs[0])
        inner.outputs[0].name = "inner"
        linear.type = "while_loop"

    _edit_spec(nest)(damaged)
    result = CliRunner().invoke(main, [command, str(damaged)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "op quantum_linear 'inner' (number 0 of function main): this op type is not known" in result.stderr


def test_a_link_out_of_the_package_is_not_followed(damaged: Path, tmp_path: Path) -> None:
    outside = tmp_path / "elsewhere.bin"
    shutil.move(weight_file(damaged), outside)
    weight_file(damaged).symlink_to(outside)
    with pytest.raises(InputError, match="points outside the package"):
        _ = MilSession(damaged).plan


def test_unknown_function(good: Path) -> None:
    with pytest.raises(InputError, match="no function 'tail'; it has main"):
        MilSession(good, "tail")


@given(st.sampled_from([1, 2, 3, 4, 6]), st.lists(st.integers(0, 63), min_size=1, max_size=50), st.booleans())
def test_unpacking_bits(bits: int, numbers: list[int], signed: bool) -> None:
    signed = signed and bits == 4
    numbers = [n % 2**bits for n in numbers]
    stream = np.array([n >> b & 1 for n in numbers for b in range(bits)], np.uint8)
    dtype = dtypes.INT4 if signed else dtypes.BY_NAME[f"uint{bits}"]
    got = unpack_bits(np.packbits(stream, bitorder="little"), dtype, (len(numbers),))
    wanted = [n - 2**bits if signed and n >= 2 ** (bits - 1) else n for n in numbers]
    assert got.tolist() == wanted


def test_every_blob_type_that_coremltools_writes(tmp_path: Path) -> None:
    from coremltools.libmilstoragepython import _BlobStorageWriter

    path = tmp_path / "all.bin"
    writer = _BlobStorageWriter(str(path))
    numbers = np.array([1, 0, 1, 1, 0, 1, 0])
    offsets = {}
    for name, bits in (("int4", 8), ("uint1", 8), ("uint2", 8), ("uint3", 8), ("uint4", 8), ("uint6", 8), ("uint8", 8),
                       ("int8", 8), ("int16", 16), ("uint16", 16), ("int32", 32), ("uint32", 32)):  # fmt: skip
        kind = "int" if name.startswith("int") else "uint"
        offsets[name] = getattr(writer, f"write_{name}_data")(numbers.astype(f"{kind}{bits}"))
    offsets["fp32"] = writer.write_float_data(numbers.astype(np.float32))
    offsets["fp16"] = writer.write_fp16_data(numbers.astype(np.float16).view(np.uint16))
    del writer
    blob = BlobFile(path)
    assert blob.records == len(offsets)
    for name, offset in offsets.items():
        assert blob.read(offset, dtypes.BY_NAME[name], (7,)).tolist() == numbers.tolist(), name


def test_constants_that_do_not_fit_each_other(tmp_path: Path) -> None:
    """An error in a compressed weight names the op that decompresses it, not the one that uses it."""
    data, scale = np.zeros((6, 4), np.int8), np.ones((3, 1), np.float16)

    def body(v: dict) -> dict:
        weight = mb.constexpr_blockwise_shift_scale(data=data, scale=scale, name="weight")
        return {"out": mb.linear(x=v["x"], weight=weight)}

    path = save_program(tmp_path / "p.mlpackage", {"x": np.zeros((1, 4), np.float16)}, body)

    def change(spec: object) -> None:
        op = _operation(spec, "constexpr_blockwise_shift_scale")
        value = op.inputs["scale"].arguments[0].value  # type: ignore[attr-defined]
        value.type.tensorType.dimensions[0].constant.size = 4
        value.immediateValue.tensor.bytes.values = np.ones(4, np.float16).tobytes()

    _edit_spec(change)(path)
    message = r"op constexpr_blockwise_shift_scale 'weight' \(number 0 of function main\) failed: 6 elements cannot be"
    with pytest.raises(InputError, match=message):
        MilSession(path).run({"x": np.zeros((1, 4))})
