"""Sessions: modes, inputs and outputs, memory reuse, run-time shapes, several functions."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mil_programs import ct, get_new_symbol, mb, save_program, types

from pdconvert.errors import InputError
from pdconvert.executors import open_executor
from pdconvert.executors.mil import MilSession, Package
from pdconvert.executors.mil.trace import Tracer
from pdconvert.executors.mil.weights import WeightCache


def randoms(seed: int, *shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def test_fp16_mode_rounds_each_result_and_overflows(tmp_path: Path) -> None:
    x = np.array([300.0, 1.0, 0.1, 1e-4], np.float16)
    path = save_program(
        tmp_path / "p.mlpackage",
        {"x": x},
        lambda v: {"square": mb.mul(x=v["x"], y=v["x"]), "root": mb.sqrt(x=mb.mul(x=v["x"], y=v["x"]))},
    )
    exact, rounded = (MilSession(path, mode=mode).run({"x": x}) for mode in ("fp32", "fp16"))
    square = x.astype(np.float32) ** 2
    np.testing.assert_array_equal(exact["square"], square)
    with np.errstate(over="ignore"):
        half = square.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(rounded["square"], half)
    assert half[0] == np.inf and half[3] < 1.1e-8
    np.testing.assert_allclose(exact["root"], x.astype(np.float32), rtol=1e-6)
    np.testing.assert_array_equal(rounded["root"], np.sqrt(half).astype(np.float16).astype(np.float32))


def test_fp32_values_of_a_program_stay_fp32_in_fp16_mode(tmp_path: Path) -> None:
    x = randoms(0, 50)
    path = save_program(
        tmp_path / "p.mlpackage",
        {"x": x},
        lambda v: {"wide": mb.mul(x=v["x"], y=v["x"]), "narrow": mb.cast(x=v["x"], dtype="fp16")},
    )
    out = MilSession(path, mode="fp16").run({"x": x})
    np.testing.assert_array_equal(out["wide"], x * x)
    np.testing.assert_array_equal(out["narrow"], x.astype(np.float16).astype(np.float32))


def test_inputs_of_type_fp16_are_rounded_in_fp16_mode_only(tmp_path: Path) -> None:
    path = save_program(
        tmp_path / "p.mlpackage", {"x": np.zeros(3, np.float16)}, lambda v: {"out": mb.relu(x=v["x"])}
    )
    x = torch.tensor([0.1, 1000.3, 7e4])
    assert MilSession(path).run({"x": x})["out"].equal(x)
    assert MilSession(path, mode="fp16").run({"x": x})["out"].equal(x.half().float())


@pytest.fixture(scope="module")
def two_inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("two") / "two.mlpackage"
    inputs = {"x": randoms(0, 2, 3), "rows": np.array([1, 0], np.int32)}
    return save_program(
        path,
        inputs,
        lambda v: {"picked": mb.gather(x=v["x"], indices=v["rows"], axis=0, validate_indices=True)},
    )


GOOD = {"x": np.zeros((2, 3), np.float32), "rows": np.array([0], np.int32)}
BAD_INPUTS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"x": np.zeros((2, 3))}, "input 'rows' is missing; its inputs are x, rows"),
    "left over": ({**GOOD, "z": 1}, "there is no input 'z'; its inputs are x, rows"),
    "rank": ({**GOOD, "x": np.zeros((2, 3, 1))}, "input 'x' has shape [2, 3, 1], expected [2, 3]"),
    "size": ({**GOOD, "x": np.zeros((2, 4)), "rows": np.array([0, 1])}, "input 'x' has shape [2, 4], expected [2, 3]"),
    "float for int": ({**GOOD, "rows": np.zeros(2)}, "input 'rows' has type torch.float64, expected int32"),
    "index": ({**GOOD, "rows": np.array([0, 5])}, "op gather 'gather_0' (number 3 of function main) failed: index 5"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_inputs(name: str, two_inputs: Path) -> None:
    given, message = BAD_INPUTS[name]
    with pytest.raises(InputError) as caught:
        MilSession(two_inputs).run(given)
    assert message in str(caught.value) and str(two_inputs) in str(caught.value)


def test_every_kind_of_float_is_taken(two_inputs: Path) -> None:
    session = MilSession(two_inputs)
    x = randoms(1, 2, 3, dtype=np.float16)
    rows = np.array([1, 0])
    outs = [
        session.run({"x": given, "rows": rows})["picked"].tolist()
        for given in (x, x.astype(np.float64), torch.from_numpy(x), torch.from_numpy(x.astype(np.float32)))
    ]
    assert all(out == outs[0] for out in outs)


def test_mode_and_executor_names_are_checked(two_inputs: Path) -> None:
    with pytest.raises(InputError, match="mode 'int8' is not one of fp32, fp16"):
        MilSession(two_inputs, mode="int8")
    with pytest.raises(InputError, match="executor 'gpu' is not one of auto, mil, coreml"):
        open_executor(two_inputs, kind="gpu")


def test_open_executor_says_which_ran_and_why(two_inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    session = open_executor(two_inputs)
    assert (session.kind, session.reason) == ("mil", "Core ML runs on macOS only, this is linux")
    assert open_executor(two_inputs, kind="mil").reason == "asked for"
    with pytest.raises(InputError, match="Core ML runs on macOS only, this is linux"):
        open_executor(two_inputs, kind="coreml")
    assert session.run({"x": np.ones((2, 3)), "rows": np.array([0, 1])})["picked"].sum() == 6


def test_results_belong_to_the_caller(tmp_path: Path) -> None:
    """An output is never the memory of an input, of a constant, of a state or of another output."""
    x = randoms(0, 4, 4)

    def body(v: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "same": v["x"],
            "view": mb.transpose(x=v["x"], perm=[1, 0]),
            "fixed": mb.const(val=np.ones((4, 4), np.float32)),
            "held": mb.cast(x=mb.read_state(input=v["s"]), dtype="fp32"),
        }

    session = MilSession(
        save_program(tmp_path / "p.mlpackage", {"x": x}, body, states={"s": ((4, 4), types.fp16)})
    )
    state, given = session.make_state(), torch.from_numpy(x.copy())
    for value in session.run({"x": given}, state).values():
        value += 1
    assert given.equal(torch.from_numpy(x)) and not state["s"].any()
    again = session.run({"x": given}, state)
    assert (
        again["fixed"].equal(torch.ones(4, 4)) and again["view"].equal(given.t()) and not again["held"].any()
    )


def _random_program(seed: int) -> tuple[Callable, Callable]:
    """A random chain of ops that share, overwrite, join and cut values: the program, and numpy's result."""
    rng = np.random.default_rng(seed)
    choices = [
        (int(rng.integers(0, 12)), int(rng.integers(0, 99)), int(rng.integers(0, 99))) for _ in range(40)
    ]

    def run(x: Any, y: Any, ops: Mapping[int, Callable]) -> list[Any]:
        values = [x, y]
        for kind, first, second in choices:
            values.append(ops[kind](values[first % len(values)], values[second % len(values)]))
        return values[-3:]

    program: dict[int, Callable] = {
        0: lambda a, b: mb.add(x=a, y=b),
        1: lambda a, b: mb.sub(x=a, y=b),
        2: lambda a, b: mb.mul(x=a, y=mb.tanh(x=b)),
        3: lambda a, b: mb.transpose(x=a, perm=[0, 2, 1]),
        4: lambda a, b: mb.reverse(x=a, axes=[1]),
        5: lambda a, b: mb.reshape(x=mb.reshape(x=a, shape=[2, 9]), shape=[2, 3, 3]),
        6: lambda a, b: mb.concat(values=[mb.slice_by_size(x=a, begin=[0, 0, 0], size=[1, 3, 3]),
                                          mb.slice_by_size(x=b, begin=[1, 0, 0], size=[1, 3, 3])], axis=0),
        7: lambda a, b: mb.slice_update(x=a, update=mb.slice_by_size(x=b, begin=[0, 0, 0], size=[1, 3, 3]),
                                        begin=[1, 0, 0], end=[2, 3, 3]),
        8: lambda a, b: mb.add(x=mb.split(x=a, num_splits=2, axis=0)[0], y=b),
        9: lambda a, b: mb.silu(x=a),
        10: lambda a, b: mb.square(x=mb.tanh(x=a)),
        11: lambda a, b: mb.real_div(x=a, y=mb.add(x=mb.square(x=b), y=np.float32(1))),
    }  # fmt: skip

    def updated(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        out = a.copy()
        out[1:2] = b[:1]
        return out

    reference: dict[int, Callable] = {
        0: lambda a, b: a + b,
        1: lambda a, b: a - b,
        2: lambda a, b: a * np.tanh(b),
        3: lambda a, b: a.transpose(0, 2, 1),
        4: lambda a, b: a[:, ::-1],
        5: lambda a, b: a,
        6: lambda a, b: np.concatenate([a[:1], b[1:]]),
        7: updated,
        8: lambda a, b: a[:1] + b,
        9: lambda a, b: a / (1 + np.exp(-a)),
        10: lambda a, b: np.tanh(a) ** 2,
        11: lambda a, b: a / (b * b + 1),
    }
    return (lambda x, y: run(x, y, program)), (lambda x, y: run(x, y, reference))


def test_writing_into_inputs_never_changes_a_result(tmp_path: Path) -> None:
    x, y = randoms(0, 2, 3, 3), randoms(1, 2, 3, 3)
    pairs = [_random_program(seed) for seed in range(25)]

    def body(v: Mapping[str, Any]) -> dict[str, Any]:
        return {f"p{n}_{k}": out for n, (p, _) in enumerate(pairs) for k, out in enumerate(p(v["x"], v["y"]))}

    session = MilSession(save_program(tmp_path / "p.mlpackage", {"x": x, "y": y}, body))
    assert sum(step.target >= 0 for step in session.plan.steps) > 100
    for _ in range(2):
        out = session.run({"x": x, "y": y})
        for number, (_, reference) in enumerate(pairs):
            for place, want in enumerate(reference(x.astype(np.float64), y.astype(np.float64))):
                np.testing.assert_allclose(out[f"p{number}_{place}"], want, rtol=1e-3, atol=1e-4)


def test_constants_are_folded_once_and_the_cache_bound_holds(tmp_path: Path) -> None:
    weights = [randoms(n, 256, 128, dtype=np.float16) for n in range(4)]
    x = randoms(9, 1, 128)

    def body(v: Mapping[str, Any]) -> dict[str, Any]:
        total = v["x"]
        for weight in weights:
            flipped = mb.transpose(x=mb.const(val=weight.astype(np.float32)), perm=[1, 0])
            total = mb.matmul(x=mb.matmul(x=total, y=flipped), y=mb.const(val=weight.astype(np.float32)))
        return {"out": total}

    package = Package.open(save_program(tmp_path / "p.mlpackage", {"x": x}, body))
    results = []
    for limit in (0, 300_000, 10_000_000):
        session = MilSession(package, weight_cache_bytes=limit)
        assert [step.info.op_type for step in session.plan.steps] == ["matmul"] * 8 + ["identity"]
        results += [session.run({"x": x})["out"] for _ in range(2)]
        assert session.cache.kept_bytes <= limit
    assert all(result.equal(results[0]) for result in results)


# --- packages in the manner of other tools -----------------------------------------------------------


def test_symbolic_lengths_and_run_time_bounds(tmp_path: Path) -> None:
    """One program for all lengths: sizes come from `shape`, bounds of a slice from arithmetic on them."""

    def body(v: Mapping[str, Any]) -> dict[str, Any]:
        sizes = mb.shape(x=v["x"])
        count = mb.slice_by_index(x=sizes, begin=[1], end=[2])
        half = mb.floor_div(x=count, y=np.int32(2))
        begin = mb.concat(values=[np.array([0], np.int32), half, np.array([1], np.int32)], axis=0)
        end = mb.concat(values=[np.array([2], np.int32), count, np.array([4], np.int32)], axis=0)
        tail = mb.slice_by_index(x=v["x"], begin=begin, end=end)
        pairs = mb.reshape(x=v["x"], shape=[2, -1, 2, 2])
        shaped = mb.reshape(x=mb.transpose(x=pairs, perm=[0, 2, 1, 3]), shape=mb.concat(
            values=[np.array([4], np.int32), count, np.array([2], np.int32)], axis=0))  # fmt: skip
        steps = mb.range_1d(start=np.int32(0), end=mb.squeeze(x=count, axes=[0]), step=np.int32(1))
        return {"tail": tail, "shaped": mb.softmax(x=shaped, axis=-1), "steps": steps}

    symbolic = (2, get_new_symbol(), 4)
    path = save_program(
        tmp_path / "p.mlpackage",
        {"x": (symbolic, types.fp32)},
        body,
        inputs_as=[ct.TensorType("x", (2, ct.RangeDim(1, 64, default=4), 4))],
    )
    session = MilSession(path)
    assert session.function.inputs["x"].shape == (2, -1, 4)
    for count in (1, 4, 9):
        x = torch.randn(2, count, 4)
        out = session.run({"x": x})
        assert out["tail"].equal(x[:, count // 2 :, 1:])
        wanted = x.reshape(2, count, 2, 2).transpose(1, 2).reshape(4, count, 2).softmax(-1)
        torch.testing.assert_close(out["shaped"], wanted)
        assert out["steps"].tolist() == list(range(count))
    with pytest.raises(InputError, match=r"input 'x' has shape \[2, 4, 5\], expected \[2, -1, 4\]"):
        session.run({"x": torch.zeros(2, 4, 5)})


def test_sixty_caches_as_inputs_and_outputs(tmp_path: Path) -> None:
    caches = {f"cache_{n}": randoms(n, 1, 2, 4, 3, dtype=np.float16) for n in range(60)}
    inputs = {"x": randoms(99, 1, 2, 1, 3, dtype=np.float16), **caches}

    def body(v: Mapping[str, Any]) -> dict[str, Any]:
        return {
            f"{name}_out": mb.concat(
                values=[mb.slice_by_index(x=v[name], begin=[0, 0, 1, 0], end=[1, 2, 4, 3]), v["x"]], axis=2
            )
            for name in caches
        }

    out = MilSession(save_program(tmp_path / "p.mlpackage", inputs, body)).run(inputs)
    assert len(out) == 60
    for name, cache in caches.items():
        wanted = np.concatenate([cache[:, :, 1:], inputs["x"]], 2).astype(np.float32)
        np.testing.assert_array_equal(out[f"{name}_out"], wanted)


def test_two_functions_over_one_weight_file_hold_it_once(tmp_path: Path) -> None:
    weight = randoms(0, 200, 300, dtype=np.float16)
    for tokens in (1, 5):
        save_program(
            tmp_path / f"f{tokens}.mlpackage",
            {"x": np.zeros((tokens, 300), np.float16)},
            lambda v: {"out": mb.linear(x=v["x"], weight=mb.const(val=weight))},
        )
    descriptor = ct.utils.MultiFunctionDescriptor()
    for tokens in (1, 5):
        descriptor.add_function(str(tmp_path / f"f{tokens}.mlpackage"), "main", f"rows_{tokens}")
    descriptor.default_function_name = "rows_5"
    ct.utils.save_multifunction(descriptor, str(tmp_path / "both.mlpackage"))
    package = Package.open(tmp_path / "both.mlpackage")
    assert package.function_names == ["rows_1", "rows_5"] and package.default_function == "rows_5"
    cache = WeightCache(10_000_000)
    for name, tokens in (("rows_1", 1), ("rows_5", 5)):
        x = randoms(tokens, tokens, 300)
        out = MilSession(package, name, cache=cache).run({"x": x})["out"]
        np.testing.assert_allclose(out, x @ weight.T.astype(np.float32), rtol=1e-3, atol=1e-3)
        assert cache.kept_bytes == weight.size * 4


def test_a_split_head(tmp_path: Path) -> None:
    """A head of many parts whose logits are joined, or left apart."""
    parts = [randoms(n, 40, 16, dtype=np.float16) for n in range(8)]
    x = randoms(9, 1, 16, 1, 3, dtype=np.float16)

    def body(v: Mapping[str, Any]) -> dict[str, Any]:
        logits = [mb.conv(x=v["x"], weight=mb.const(val=part[:, :, None, None])) for part in parts]
        return {"joined": mb.concat(values=logits, axis=1), **{f"part_{n}": p for n, p in enumerate(logits)}}

    out = MilSession(save_program(tmp_path / "p.mlpackage", {"x": x}, body)).run({"x": x})
    wanted = np.concatenate(parts).astype(np.float32) @ x[0, :, 0].astype(np.float32)
    np.testing.assert_allclose(out["joined"][0, :, 0], wanted, rtol=1e-4, atol=1e-4)
    assert torch.cat([out[f"part_{n}"] for n in range(8)], 1).equal(out["joined"])


def test_a_trace_names_the_first_op_that_overflows(tmp_path: Path) -> None:
    x = np.array([[400.0, 2e-5, 3.0]], np.float16)

    def body(v: Mapping[str, Any]) -> dict[str, Any]:
        square = mb.mul(x=v["x"], y=v["x"], name="square")
        return {
            "out": mb.rsqrt(
                x=mb.reduce_mean(x=square, axes=[-1], name="mean"), epsilon=np.float16(0), name="norm"
            )
        }

    tracer = Tracer(Package.open(save_program(tmp_path / "p.mlpackage", {"x": x}, body)))
    rows = {row.name: row for row in tracer.run({"x": x}).rows}
    square = rows["square"]
    assert (square.op.op_type, square.nonfinite, square.nonfinite_fp32, square.flushed) == ("mul", 1, 0, 1)
    assert square.sqnr_db == -np.inf and square.lost_db == np.inf and square.fp16_share > 1
    assert rows["mean"].sqnr_db == -np.inf and rows["norm"].flushed == 1
