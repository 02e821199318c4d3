"""Core ML as an executor, on macOS.

This file is written against the documented interface of coremltools' `MLModel` and cannot be run on
Linux, where it was written; the macOS job of the public CI runs its tests.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pdconvert.errors import InputError
from pdconvert.executors.mil.package import FunctionInfo, Package
from pdconvert.quiet import quiet_coremltools

COMPUTE_UNITS = {
    "all": "ALL",
    "cpu_and_ne": "CPU_AND_NE",
    "cpu_and_gpu": "CPU_AND_GPU",
    "cpu_only": "CPU_ONLY",
}
_UNITS = {"MLNeuralEngineComputeDevice": "ne", "MLGPUComputeDevice": "gpu", "MLCPUComputeDevice": "cpu"}
_NUMPY = {"fp16": np.float16, "fp32": np.float32, "int32": np.int32, "int8": np.int8, "bool": np.bool_}


class CoremlSession:
    """One function of a package, run by Core ML.

    Attributes:
        function: inputs, outputs and states, as the program gives them.
        compute_units: what Core ML may use; it decides itself where each op runs.
        kind: `coreml`; which executor this is.
        reason: why it was chosen.
    """

    kind = "coreml"

    def __init__(
        self,
        package: str | Path,
        function: str | None = None,
        *,
        compute_units: str = "cpu_and_ne",
        reason: str = "asked for",
    ) -> None:
        """Compile and load the function.

        Raises:
            InputError: unknown compute units, no such function, or Core ML refuses the package.
        """
        if compute_units not in COMPUTE_UNITS:
            raise InputError(f"compute units {compute_units!r} are not one of {', '.join(COMPUTE_UNITS)}")
        opened = Package.open(package)
        self.function: FunctionInfo = opened.function(function)
        self.compute_units = compute_units
        self.reason = reason
        coremltools = quiet_coremltools()
        several = len(opened.function_names) > 1
        try:
            self._model = coremltools.models.MLModel(
                str(package),
                compute_units=coremltools.ComputeUnit[COMPUTE_UNITS[compute_units]],
                function_name=self.function.name if several else None,
            )
        except RuntimeError as error:
            raise InputError(
                f"{package}: Core ML cannot load function {self.function.name}: {error}"
            ) from error

    def placement(self) -> dict[str, float]:
        """The share of the estimated cost that Core ML plans for each unit, by "ne", "gpu", "cpu".

        {} where it gives no plan; ops without an estimate (constants) count for nothing.
        """
        from coremltools.models.compute_plan import MLComputePlan

        units = quiet_coremltools().ComputeUnit[COMPUTE_UNITS[self.compute_units]]
        plan = MLComputePlan.load_from_path(self._model.get_compiled_model_path(), compute_units=units)
        program = plan.model_structure.program
        shares: dict[str, float] = {}
        function = program.functions.get(self.function.name) or program.functions.get("main")
        for op in function.block.operations if function else ():
            usage = plan.get_compute_device_usage_for_mlprogram_operation(op)
            cost = plan.get_estimated_cost_for_mlprogram_operation(op)
            if usage is not None and cost is not None:
                unit = _UNITS[type(usage.preferred_compute_device).__name__]
                shares[unit] = shares.get(unit, 0.0) + cost.weight
        total = sum(shares.values())
        return {unit: share / total for unit, share in shares.items()} if total else {}

    def make_state(self) -> Any:
        """Return Core ML's own state object, all zero."""
        return self._model.make_state()

    rounds_states = True
    """States of Core ML hold fp16 and nothing finer."""

    def read_state(self, state: Any, name: str) -> np.ndarray:
        """Return what a state holds."""
        return np.array(state.read_state(name))

    def write_state(self, state: Any, name: str, value: np.ndarray) -> None:
        """Put an array of the state's shape into it."""
        state.write_state(name, np.ascontiguousarray(value, np.float16))

    def run(
        self, inputs: Mapping[str, np.ndarray | torch.Tensor], state: Any = None
    ) -> dict[str, torch.Tensor]:
        """Run the function once.

        Args:
            inputs: every input by name.
            state: from `make_state`; needed where the function has states.

        Returns:
            Outputs by name; floats as float32.

        Raises:
            InputError: inputs that Core ML does not take.
        """
        given = {}
        for name, value in inputs.items():
            info = self.function.inputs.get(name)
            if info is None:
                raise InputError(
                    f"there is no input {name!r}; the inputs are {', '.join(self.function.inputs)}"
                )
            array = value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
            given[name] = array.astype(_NUMPY.get(info.dtype, array.dtype), copy=False)
        try:
            found = self._model.predict(given, state) if state is not None else self._model.predict(given)
        except RuntimeError as error:
            raise InputError(f"Core ML failed on function {self.function.name}: {error}") from error
        return {name: _tensor(found[name]) for name in self.function.outputs}


def _tensor(value: Any) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(value))
    return tensor.float() if tensor.is_floating_point() else tensor
