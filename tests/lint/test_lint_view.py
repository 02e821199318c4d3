"""The neutral view of a program that rules read."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lint_programs import Example, conv, half, mb

from pdconvert.errors import InputError
from pdconvert.executors.mil import MilSession, Package
from pdconvert.executors.mil.view import reads_state, view_package, walk_back


def view(example: Example, tmp_path: Path):
    (function,) = view_package(Package.open(example.save(tmp_path / "x.mlpackage"))).functions
    return function


def test_ops_inputs_and_makers(tmp_path: Path) -> None:
    function = view(Example(lambda i: mb.add(x=conv(i["x"]), y=i["x"], name="sum")), tmp_path)
    product, total = function.ops
    assert (product.type, total.type, total.name) == ("conv", "add", "sum")
    assert total.input("x").maker is product
    assert total.input("y") is function.inputs["x"]
    assert function.inputs["x"].users == [product, total]
    assert (total.out.shape, total.out.dtype, total.out.size_bytes) == ((1, 64, 1, 64), "fp16", 8192)
    assert function.is_output(total.out) and not function.is_output(product.out)
    assert product.param("groups") == 1
    assert product.param("pad_type") == "valid"
    assert product.param("missing", 7) == 7
    assert product.computed() == [function.inputs["x"]]
    weight = product.input("weight")
    assert weight.is_constant and list(weight.records().values()) == [8192]
    assert np.array_equal(weight.array(), half(64, 64, 1, 1))


def test_what_is_made_of_constants_is_constant(tmp_path: Path) -> None:
    def body(inputs):
        codes = np.ones((64, 64, 1, 1), np.int8)
        weight = mb.constexpr_blockwise_shift_scale(data=codes, scale=half(64, 1, 1, 1))
        return mb.conv(x=inputs["x"], weight=mb.identity(x=weight))

    function = view(Example(body), tmp_path)
    assert [op.type for op in function.ops] == ["constexpr_blockwise_shift_scale", "identity", "conv"]
    assert [op.type for op in function.computed_ops] == ["conv"]
    weight = function.ops[-1].input("weight")
    assert weight.is_constant and weight.array() is None
    assert sorted(weight.records().values()) == [128, 4096]


def test_inner_blocks_are_seen(tmp_path: Path) -> None:
    def body(inputs):
        return mb.while_loop(
            _cond=lambda n, x: mb.less(x=n, y=np.int32(3)),
            _body=lambda n, x: (mb.add(x=n, y=np.int32(1)), mb.pow(x=x, y=np.float16(2), name="inner")),
            loop_vars=(mb.squeeze(x=inputs["n"]), inputs["x"]),
            name="loop",
        )

    example = Example(body, {"n": (1,), "x": (1, 8)}, {"n": "int32"})
    function = view(example, tmp_path)
    inner = next(op for op in function.ops if op.type == "pow")
    loop = next(op for op in function.ops if op.type == "while_loop")
    assert inner.scope == (loop.name,)
    assert not inner.is_constant
    assert inner.input("x").maker is loop


def test_states(tmp_path: Path) -> None:
    def body(inputs):
        total = mb.add(x=mb.read_state(input=inputs["total"]), y=inputs["x"])
        return mb.coreml_update_state(state=inputs["total"], value=total)

    function = view(Example(body, {"x": (1, 32)}, states={"total": (1, 32)}), tmp_path)
    assert list(function.inputs) == ["x"]
    assert function.states["total"].is_state
    add = next(op for op in function.ops if op.type == "add")
    assert reads_state(add.input("x")) and not reads_state(add.out)


def test_walk_back_stops_at_the_first_other_op(tmp_path: Path) -> None:
    function = view(
        Example(lambda i: mb.reshape(x=mb.squeeze(x=mb.exp(x=mb.abs(x=i["x"])), axes=[2]), shape=[64, 64])),
        tmp_path,
    )
    through = frozenset({"reshape", "squeeze"})
    assert [op.type for op in walk_back(function.ops[-1].out, through, 9)] == ["reshape", "squeeze", "exp"]
    assert [op.type for op in walk_back(function.ops[-1].out, through, 2)] == ["reshape", "squeeze"]


def test_a_program_that_does_not_hold_together(tmp_path: Path) -> None:
    package = Package.open(Example(lambda i: mb.relu(x=i["x"])).save(tmp_path / "x.mlpackage"))
    operations = package.block("main").operations
    operations[0].inputs["x"].arguments[0].name = "nowhere"
    wanted = (
        r"op relu '.*' \(number 0 of function main\): an input is 'nowhere', which nothing before it computes"
    )
    with pytest.raises(InputError, match=wanted):
        view_package(package)


def test_constants_made_of_each_other_are_read_once(tmp_path: Path) -> None:
    """Each of 60 is the one before added to itself: without a memory that would be 2^60 reads."""

    def doubled(i: Mapping[str, Any]) -> Any:
        value = mb.constexpr_blockwise_shift_scale(
            data=np.ones((1, 64, 1, 64), np.int8), scale=np.full((1, 64, 1, 1), 0.5, np.float16)
        )
        return mb.add(x=i["x"], y=value)

    package = Package.open(Example(doubled).save(tmp_path / "x.mlpackage"))
    operations = package.block("main").operations
    last = copy.deepcopy(operations[-1])
    del operations[-1]
    name = last.inputs["y"].arguments[0].name
    for step in range(60):
        made = operations.add()
        made.CopyFrom(last)
        made.outputs[0].name = f"made_{step}"
        for side in ("x", "y"):
            made.inputs[side].arguments[0].name = name
        name = made.outputs[0].name
    last.inputs["y"].arguments[0].name = name
    operations.add().CopyFrom(last)
    function = view_package(package).functions[0]
    assert len(function.ops[-1].inputs["y"][0].records()) == 2
    inputs = {"x": np.zeros((1, 64, 1, 64), np.float32)}
    result = MilSession(package, "main", mode="fp32").run(inputs)
    assert float(next(iter(result.values())).max()) == 2.0**59
