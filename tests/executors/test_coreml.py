"""The Core ML executor: on macOS the real one against `mil`; elsewhere what it asks of coremltools."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mil_programs import ct, mb, save_program, types

from pdconvert.errors import InputError
from pdconvert.executors import open_executor
from pdconvert.executors.coreml import CoremlSession

INPUTS = {"x": np.arange(6, dtype=np.float16).reshape(2, 3), "rows": np.array([1, 0], np.int32)}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def body(v: Mapping[str, Any]) -> dict[str, Any]:
        picked = mb.gather(x=v["x"], indices=v["rows"], axis=0)
        total = mb.add(x=mb.read_state(input=v["memory"]), y=picked)
        return {"out": mb.coreml_update_state(state=v["memory"], value=total)}

    path = tmp_path_factory.mktemp("coreml") / "p.mlpackage"
    return save_program(path, INPUTS, body, states={"memory": ((2, 3), types.fp16)})


class FakeModel:
    """Stands for coremltools' MLModel, whose predictions need macOS."""

    def __init__(self, path: str, *, compute_units: Any, function_name: str | None) -> None:
        self.asked = (Path(path).name, compute_units, function_name)
        self.given: list[tuple[dict, Any]] = []

    def make_state(self) -> str:
        return "a state"

    def predict(self, inputs: dict, state: Any = None) -> dict[str, np.ndarray]:
        self.given.append((inputs, state))
        return {"out": inputs["x"][inputs["rows"]], "extra": np.zeros(1)}


def test_what_core_ml_is_asked(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ct.models, "MLModel", FakeModel)
    monkeypatch.setattr(sys, "platform", "darwin")
    session = open_executor(package, compute_units="cpu_only")
    assert isinstance(session, CoremlSession)
    assert (session.kind, session.reason) == ("coreml", "this is macOS")
    out = session.run(
        {"x": torch.from_numpy(INPUTS["x"]).float(), "rows": INPUTS["rows"]}, session.make_state()
    )
    assert (
        out["out"].dtype == torch.float32
        and out["out"].tolist() == [[3, 4, 5], [0, 1, 2]]
        and set(out) == {"out"}
    )
    model: Any = session._model
    assert model.asked == ("p.mlpackage", ct.ComputeUnit.CPU_ONLY, None)
    ((given, state),) = model.given
    assert (given["x"].dtype, given["rows"].dtype, state) == (np.float16, np.int32, "a state")
    with pytest.raises(InputError, match="there is no input 'y'; the inputs are x, rows"):
        session.run({"y": INPUTS["x"]})


class FakeState:
    """Stands for coremltools' MLState."""

    def __init__(self) -> None:
        self.held = {"memory": np.zeros((2, 3), np.float16)}

    def read_state(self, name: str) -> np.ndarray:
        return self.held[name]

    def write_state(self, name: str, value: np.ndarray) -> None:
        self.held[name] = value


def test_states_are_read_as_copies_and_written_in_fp16(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ct.models, "MLModel", FakeModel)
    session, state = CoremlSession(package), FakeState()
    read = session.read_state(state, "memory")
    read[0] = 1 / 3
    assert not state.held["memory"].any()
    session.write_state(state, "memory", read.astype(np.float32))
    assert state.held["memory"].dtype == np.float16
    np.testing.assert_array_equal(session.read_state(state, "memory"), read)
    assert session.rounds_states


def test_unknown_compute_units(package: Path) -> None:
    with pytest.raises(
        InputError, match="compute units 'npu' are not one of all, cpu_and_ne, cpu_and_gpu, cpu_only"
    ):
        CoremlSession(package, compute_units="npu")


def test_core_ml_agrees_with_mil_where_there_is_one(package: Path) -> None:
    reference = open_executor(package, kind="mil", mode="fp16")
    if sys.platform != "darwin":
        with pytest.raises(InputError, match="Core ML runs on macOS only"):
            open_executor(package, kind="coreml")
        return
    session = open_executor(package, kind="coreml", compute_units="cpu_only")
    states = session.make_state(), reference.make_state()
    for _ in range(2):
        got, want = session.run(INPUTS, states[0]), reference.run(INPUTS, states[1])
        torch.testing.assert_close(got["out"], want["out"], rtol=1e-3, atol=1e-3)


def test_placement_is_by_estimated_cost(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan as coremltools gives it on macOS: an op on each unit, and a constant without an estimate."""
    from types import SimpleNamespace

    from coremltools.models.compute_plan import MLComputePlan

    def device(name: str) -> Any:
        return SimpleNamespace(preferred_compute_device=type(name, (), {})())

    ops = {
        "conv": (device("MLNeuralEngineComputeDevice"), SimpleNamespace(weight=0.6)),
        "gather": (device("MLCPUComputeDevice"), SimpleNamespace(weight=0.2)),
        "const": (None, None),
    }

    class Plan:
        model_structure = SimpleNamespace(
            program=SimpleNamespace(
                functions={"main": SimpleNamespace(block=SimpleNamespace(operations=list(ops)))}
            )
        )

        def get_compute_device_usage_for_mlprogram_operation(self, op: str) -> Any:
            return ops[op][0]

        def get_estimated_cost_for_mlprogram_operation(self, op: str) -> Any:
            return ops[op][1]

    asked = []

    def load_from_path(path: str, compute_units: Any) -> Plan:
        asked.append((path, compute_units))
        return Plan()

    monkeypatch.setattr(ct.models, "MLModel", FakeModel)
    monkeypatch.setattr(FakeModel, "get_compiled_model_path", lambda self: "p.mlmodelc", raising=False)
    monkeypatch.setattr(MLComputePlan, "load_from_path", load_from_path)
    assert CoremlSession(package).placement() == pytest.approx({"ne": 0.75, "cpu": 0.25})
    assert asked == [("p.mlmodelc", ct.ComputeUnit.CPU_AND_NE)]
    ops.clear()
    Plan.model_structure.program.functions["main"].block.operations.clear()
    assert CoremlSession(package).placement() == {}
