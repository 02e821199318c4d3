"""States: updated in place where that changes nothing, copied where it would."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mil_programs import mb, save_program, types

from pdconvert.errors import InputError
from pdconvert.executors.mil import MilSession, Package
from pdconvert.executors.mil.trace import Tracer


def randoms(seed: int, *shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def cache_program(path: Path, tokens: int = 6, layers: int = 2) -> Path:
    """A step that writes a row into a cache state at a run-time position, for some layers, and reads all of it."""

    def body(v: Mapping[str, Any]) -> dict[str, Any]:
        totals = []
        for layer in range(layers):
            old = mb.read_state(input=v["cache"])
            end = mb.add(x=v["position"], y=np.int32(1))
            begin = mb.concat(
                values=[np.array([layer], np.int32), v["position"], np.array([0], np.int32)], axis=0
            )
            stop = mb.concat(values=[np.array([layer + 1], np.int32), end, np.array([4], np.int32)], axis=0)
            row = mb.reshape(x=mb.mul(x=v["row"], y=np.float16(layer + 1)), shape=[1, 1, 4])
            new = mb.slice_update(x=old, update=row, begin=begin, end=stop)
            whole = mb.coreml_update_state(state=v["cache"], value=new)
            totals.append(mb.reduce_sum(x=whole, axes=[0, 1]))
        return {f"total{n}": total for n, total in enumerate(totals)}

    inputs = {"row": np.zeros(4, np.float16), "position": np.zeros(1, np.int32)}
    return save_program(path, inputs, body, states={"cache": ((layers, tokens, 4), types.fp16)})


@pytest.mark.parametrize("mode", ["fp32", "fp16"])
def test_a_cache_is_updated_in_place(mode: str, tmp_path: Path) -> None:
    session = MilSession(cache_program(tmp_path / "p.mlpackage"), mode=mode)
    state = session.make_state()
    address, expected = state["cache"].data_ptr(), np.zeros((2, 6, 4), np.float32)
    for position in (0, 3, 1, 3):
        row = randoms(position, 4, dtype=np.float16)
        out = session.run({"row": row, "position": np.array([position], np.int32)}, state)
        for layer in range(2):
            expected[layer, position] = (row * np.float16(layer + 1)).astype(np.float32)
            np.testing.assert_allclose(out[f"total{layer}"], expected.sum((0, 1)), rtol=2e-3, atol=1e-2)
        np.testing.assert_array_equal(state["cache"], expected)
        assert state["cache"].data_ptr() == address


def test_two_conversations_have_two_states(tmp_path: Path) -> None:
    session = MilSession(cache_program(tmp_path / "p.mlpackage"))
    one, two = session.make_state(), session.make_state()
    given = {"row": np.ones(4, np.float16), "position": np.array([0], np.int32)}
    session.run(given, one)
    assert one["cache"].sum() == 12 and two["cache"].sum() == 0


def test_a_state_must_be_given(tmp_path: Path) -> None:
    session = MilSession(cache_program(tmp_path / "p.mlpackage"))
    given = {"row": np.ones(4, np.float16), "position": np.array([0], np.int32)}
    with pytest.raises(InputError, match=r"has states \(cache\); pass state=session.make_state\(\)"):
        session.run(given)
    with pytest.raises(InputError, match="function main has states"):
        session.run(given, {"other": torch.zeros(1)})


def test_old_content_that_is_read_later_survives_the_update(tmp_path: Path) -> None:
    """The value read before an update keeps the old content; an update that goes nowhere changes nothing."""

    def body(v: Mapping[str, Any]) -> dict[str, Any]:
        before = mb.read_state(input=v["s"])
        lost = mb.slice_update(x=before, update=v["x"], begin=[0], end=[2])
        new = mb.slice_update(x=before, update=v["x"], begin=[2], end=[4])
        after = mb.coreml_update_state(state=v["s"], value=new)
        return {"before": mb.add(x=before, y=np.float16(0)), "lost": lost, "after": after}

    x = np.array([1, 2], np.float16)
    session = MilSession(
        save_program(tmp_path / "p.mlpackage", {"x": x}, body, states={"s": ((4,), types.fp16)})
    )
    state = session.make_state()
    first, second = session.run({"x": x}, state), session.run({"x": x + 10}, state)
    assert [first[k].tolist() for k in ("before", "lost", "after")] == [
        [0, 0, 0, 0],
        [1, 2, 0, 0],
        [0, 0, 1, 2],
    ]
    assert [second[k].tolist() for k in ("before", "lost", "after")] == [
        [0, 0, 1, 2],
        [11, 12, 1, 2],
        [0, 0, 11, 12],
    ]
    assert state["s"].tolist() == [0, 0, 11, 12]


def test_a_part_that_is_read_after_a_later_update_is_copied_and_not_the_whole(tmp_path: Path) -> None:
    """K and V in one state: K's rows are read after V's are written, as caches of many layers do."""

    def body(v: Mapping[str, Any]) -> dict[str, Any]:
        totals = []
        for layer in range(3):
            old = mb.read_state(input=v["s"])
            new = mb.slice_update(x=old, update=v["x"], begin=[2 * layer, 0], end=[2 * layer + 1, 4])
            keys = mb.coreml_update_state(state=v["s"], value=new)
            row = mb.slice_by_index(x=keys, begin=[2 * layer, 0], end=[2 * layer + 1, 4])
            flat = mb.reshape(x=row, shape=[4])
            double = mb.add(x=v["x"], y=row)
            new = mb.slice_update(
                x=keys, update=double, begin=[2 * layer, 0], end=[2 * layer + 2, 4], stride=[2, 1]
            )
            values = mb.coreml_update_state(state=v["s"], value=new)
            totals.append(mb.add(x=mb.reduce_sum(x=values, axes=[0]), y=flat))
        return {f"total{n}": total for n, total in enumerate(totals)}

    x = np.array([[1, 2, 3, 4]], np.float16)
    path = save_program(tmp_path / "p.mlpackage", {"x": x}, body, states={"s": ((8, 4), types.fp16)})
    session = MilSession(path)
    assert [s.target for s in session.plan.steps if s.info.op_type == "slice_update"] == [0] * 6
    state = session.make_state()
    address = state["s"].data_ptr()
    out = session.run({"x": x}, state)
    assert [out[f"total{n}"].tolist() for n in range(3)] == [[3, 6, 9, 12], [5, 10, 15, 20], [7, 14, 21, 28]]
    assert state["s"].data_ptr() == address


@pytest.mark.parametrize("mode", ["fp32", "fp16"])
@pytest.mark.parametrize("reads", ["nothing", "a part", "all", "through another state"])
def test_a_blend_into_a_state_keeps_what_was_read_before(reads: str, mode: str, tmp_path: Path) -> None:
    """state = state · kept + new, in place where nothing of the old content is needed afterwards."""

    def body(v: Mapping[str, Any]) -> dict[str, Any]:
        old = mb.read_state(input=v["s"])
        part = mb.slice_by_index(x=old, begin=[1, 0], end=[2, 4])
        rest = mb.mul(x=old, y=v["kept"])
        if reads == "through another state":
            mb.coreml_update_state(state=v["t"], value=old)
        mb.coreml_update_state(state=v["s"], value=mb.add(x=rest, y=v["new"]))
        seen = mb.read_state(input=v["t"])
        if reads == "a part":
            seen = part
        if reads == "all":
            seen = old
        return {"seen": mb.mul(x=seen, y=np.float16(2))}

    inputs = {"kept": np.ones((1, 4), np.float16), "new": np.zeros((8, 4), np.float16)}
    states = dict.fromkeys("st", ((8, 4), types.fp16))
    session = MilSession(save_program(tmp_path / "p.mlpackage", inputs, body, states=states), mode=mode)
    state = session.make_state()
    address, expected = state["s"].data_ptr(), np.zeros((8, 4), np.float32)
    for seed in range(3):
        kept = np.array([[1, 0, 1, seed % 2]], np.float16)
        new = randoms(seed, 8, 4, dtype=np.float16) * (1 - kept)
        out = session.run({"kept": kept, "new": new}, state)["seen"]
        before = {"nothing": np.zeros((8, 4)), "a part": expected[1:2]}.get(reads, expected)
        np.testing.assert_array_equal(out, 2 * before)
        expected = expected * kept + new
        np.testing.assert_array_equal(state["s"], expected)
        if mode == "fp32" and reads in ("nothing", "a part"):
            assert state["s"].data_ptr() == address


def test_states_take_inputs_constants_views_and_each_other(tmp_path: Path) -> None:
    def body(v: Mapping[str, Any]) -> dict[str, Any]:
        a, b = mb.read_state(input=v["a"]), mb.read_state(input=v["b"])
        mb.coreml_update_state(state=v["a"], value=b)  # swap
        swapped = mb.coreml_update_state(state=v["b"], value=a)
        mb.coreml_update_state(state=v["c"], value=v["x"])
        flat = mb.reshape(x=mb.concat(values=[v["x"], swapped], axis=0), shape=[2, 4])
        part = mb.slice_by_index(
            x=flat, begin=[0, 0], end=[0, 4], squeeze_mask=[True, False], end_mask=[True, True]
        )
        mb.coreml_update_state(state=v["d"], value=part)
        c, d = mb.read_state(input=v["c"]), mb.read_state(input=v["d"])
        return {"out": mb.concat(values=[a, b, c, d], axis=0)}

    states = dict.fromkeys("abcd", ((4,), types.fp16))
    x = np.arange(4, dtype=np.float16)
    session = MilSession(save_program(tmp_path / "p.mlpackage", {"x": x}, body, states=states))
    state = session.make_state()
    state["a"].copy_(torch.tensor([1.0, 1, 1, 1]))
    state["b"].copy_(torch.tensor([2.0, 2, 2, 2]))
    given = torch.from_numpy(x.astype(np.float32))
    out = session.run({"x": given}, state)["out"]
    assert out.tolist() == [1] * 4 + [2] * 4 + [0, 1, 2, 3] * 2
    assert state["a"].tolist() == [2] * 4 and state["b"].tolist() == [1] * 4
    session.run({"x": given}, state)
    assert state["a"].tolist() == [1] * 4 and state["b"].tolist() == [2] * 4
    assert given.tolist() == [0, 1, 2, 3]


def test_a_trace_carries_states_from_run_to_run(tmp_path: Path) -> None:
    tracer = Tracer(Package.open(cache_program(tmp_path / "p.mlpackage")))
    for position in range(3):
        trace = tracer.run({"row": np.ones(4, np.float16), "position": np.array([position], np.int32)})
        assert trace.outputs["total0"].tolist() == [3.0 * position + 1] * 4
    assert trace.states["cache"].sum() == 3 * 12
