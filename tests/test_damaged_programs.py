"""Programs that do not hold together: `exec`, `inspect` and `lint` say so in one line, whatever is wrong in them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from pdconvert.cli import main
from pdconvert.executors.mil.proto import model_pb2

TYPES = {"fp16": 10, "fp32": 11, "int32": 23, "string": 2}


class Draft:
    """A program of one function, x (2, 4) to y, written field by field."""

    def __init__(self) -> None:
        self.model = model_pb2().Model()
        self.model.specificationVersion = 9
        self.function = self.model.mlProgram.functions["main"]
        self.function.opset = "CoreML8"
        self.block = self.function.block_specializations["CoreML8"]
        self.block.outputs.append("y")
        item = self.function.inputs.add()
        item.name = "x"
        self.tensor(item.type, "fp32", (2, 4))

    def tensor(self, proto: Any, dtype: str, shape: tuple[int | None, ...]) -> None:
        proto.tensorType.dataType = TYPES[dtype]
        proto.tensorType.rank = len(shape)
        for size in shape:
            dimension = proto.tensorType.dimensions.add()
            if size is None:
                dimension.unknown.variadic = False
            else:
                dimension.constant.size = size

    def state(self, dtype: str, shape: tuple[int | None, ...]) -> None:
        item = self.function.inputs.add()
        item.name = "s"
        self.tensor(item.type.stateType.wrappedType, dtype, shape)

    def const(self, name: str, dtype: str, shape: tuple[int, ...], field: str, values: list[Any]) -> None:
        op = self.block.operations.add()
        op.type = "const"
        self.tensor(op.attributes["val"].type, dtype, shape)
        getattr(op.attributes["val"].immediateValue.tensor, field).values.extend(values)
        output = op.outputs.add()
        output.name = name
        self.tensor(output.type, dtype, shape)

    def op(self, op_type: str, output: str = "y", **inputs: str | list[str]) -> None:
        op = self.block.operations.add()
        op.type = op_type
        for name, values in inputs.items():
            for value in [values] if isinstance(values, str) else values:
                op.inputs[name].arguments.add().name = value
        made = op.outputs.add()
        made.name = output
        self.tensor(made.type, "fp32", (2, 4))

    def save(self, folder: Path) -> Path:
        place = folder / "Data" / "com.apple.CoreML" / "model.mlmodel"
        place.parent.mkdir(parents=True)
        place.write_bytes(self.model.SerializeToString())
        entries = {"A": {"path": "com.apple.CoreML/model.mlmodel"}}
        manifest = {"fileFormatVersion": "1.0.0", "itemInfoEntries": entries, "rootModelIdentifier": "A"}
        (folder / "Manifest.json").write_text(json.dumps(manifest))
        return folder


def _huge(p: Draft) -> None:
    p.const("c", "fp32", (2**32, 2**32), "floats", [])
    p.op("add", x="x", y="c")


def _words(p: Draft) -> None:
    p.const("c", "fp32", (1,), "strings", ["abc"])
    p.op("add", x="x", y="c")


def _numbers(p: Draft) -> None:
    p.const("c", "string", (), "floats", [3.0])
    p.op("cast", x="x", dtype="c")


def _word_as_tensor(p: Draft) -> None:
    p.const("c", "string", (), "strings", ["zz"])
    p.op("add", x="x", y="c")


def _word_as_axis(p: Draft) -> None:
    p.const("c", "string", (), "strings", ["zz"])
    p.op("softmax", x="x", axis="c")


def _number_as_equation(p: Draft) -> None:
    p.const("c", "int32", (), "ints", [1])
    p.op("einsum", values=["x", "x"], equation="c")


def _cycle(p: Draft) -> None:
    p.op("constexpr_cast", "a", source_val="b")
    p.op("constexpr_cast", "b", source_val="a")
    p.op("add", x="x", y="b")


def _no_output(p: Draft) -> None:
    p.const("c", "fp32", (), "floats", [1.0])
    del p.block.operations[0].outputs[:]
    p.op("relu", x="x")


def _twice(p: Draft) -> None:
    p.op("relu", x="x")
    p.op("abs", x="x")


def _control(p: Draft) -> None:
    p.op("re\n\x1b[2Jlu", x="x")


def _state(dtype: str, shape: tuple[int | None, ...]) -> Callable[[Draft], None]:
    def make(p: Draft) -> None:
        p.state(dtype, shape)
        p.op("read_state", input="s")

    return make


DAMAGE: dict[str, Callable[[Draft], None]] = {
    "a constant of 2^64 elements": _huge,
    "words for numbers": _words,
    "numbers for a word": _numbers,
    "a word as a tensor": _word_as_tensor,
    "a word as an axis": _word_as_axis,
    "a number as an equation": _number_as_equation,
    "constants made of each other": _cycle,
    "a constant without an output": _no_output,
    "two values of one name": _twice,
    "an op type with control characters": _control,
    "a state of unknown size": _state("fp16", (None,)),
    "a state of 2^64 elements": _state("fp16", (2**62, 4)),
    "a state of words": _state("string", (2,)),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_one_line_says_what_is_wrong(name: str, tmp_path: Path) -> None:
    draft = Draft()
    DAMAGE[name](draft)
    package = draft.save(tmp_path / "p.mlpackage")
    np.savez(tmp_path / "in.npz", x=np.ones((2, 4), np.float32))
    for command in (["exec", "--inputs", str(tmp_path / "in.npz")], ["inspect"], ["lint"]):
        result = CliRunner().invoke(main, [command[0], str(package), *command[1:]])
        if command[0] == "exec" or result.exit_code == 2:
            assert result.exit_code == 2, result.output
            assert len(result.stderr.splitlines()) == 1 and str(package) in result.stderr
            assert "\x1b" not in result.stderr
        else:
            assert result.exit_code in (0, 1), result.output


@pytest.mark.parametrize("path", ["a\0b", "..\nx"])
def test_a_manifest_with_a_path_that_no_file_has(path: str, tmp_path: Path) -> None:
    draft = Draft()
    draft.op("relu", x="x")
    package = draft.save(tmp_path / "p.mlpackage")
    manifest = json.loads((package / "Manifest.json").read_text())
    manifest["itemInfoEntries"]["A"]["path"] = path
    (package / "Manifest.json").write_text(json.dumps(manifest))
    result = CliRunner().invoke(main, ["inspect", str(package)])
    assert result.exit_code == 2 and "no path that a file can have" in result.stderr


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"rootModelIdentifier": ["A"], "itemInfoEntries": {"A": {}}}']
)
def test_a_manifest_of_another_form(text: str, tmp_path: Path) -> None:
    package = Draft().save(tmp_path / "p.mlpackage")
    (package / "Manifest.json").write_text(text)
    result = CliRunner().invoke(main, ["inspect", str(package)])
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["Manifest.json", "Data/com.apple.CoreML/weights/weight.bin", "in.npz"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(name: str, tmp_path: Path) -> None:
    draft = Draft()
    draft.op("add", x="x", y="x")
    attributes = draft.block.operations[0].attributes
    draft.tensor(attributes["unused"].type, "fp32", (2, 4))
    attributes["unused"].blobFileValue.fileName = "@model_path/weights/weight.bin"
    package = draft.save(tmp_path / "p.mlpackage")
    np.savez(tmp_path / "in.npz", x=np.ones((2, 4), np.float32))
    place = (tmp_path if name == "in.npz" else package) / name
    place.unlink(missing_ok=True)
    place.parent.mkdir(exist_ok=True)
    os.mkfifo(place)
    result = CliRunner().invoke(main, ["exec", str(package), "--inputs", str(tmp_path / "in.npz")])
    assert result.exit_code == 2 and "not a regular file" in result.stderr
