"""Small packages written by hand, one for each thing that a rule must see or must let pass."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pdconvert.emit.coreml import write_package
from pdconvert.lint.report import Finding, Report, lint_path
from pdconvert.quiet import quiet_coremltools

ct = quiet_coremltools()

from coremltools.converters.mil import Builder as mb  # noqa: E402
from coremltools.converters.mil.mil import Function, Program, types  # noqa: E402

DTYPES = {"fp16": types.fp16, "fp32": types.fp32, "int32": types.int32}
Shape = tuple[Any, ...]
Body = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Example:
    """A program of one function.

    Attributes:
        body: takes the inputs and states by name and returns the output, or several.
        inputs: shapes by name, fp16.
        dtypes: element types of inputs that are not fp16.
        states: shapes by name, fp16.
        system: "iOS16" to "iOS18".
    """

    body: Body
    inputs: Mapping[str, Shape] = field(default_factory=lambda: {"x": (1, 64, 1, 64)})
    dtypes: Mapping[str, str] = field(default_factory=dict)
    states: Mapping[str, Shape] = field(default_factory=dict)
    system: str = "iOS18"

    def function(self) -> Function:
        """Its MIL function."""
        placeholders = {
            name: mb.placeholder(shape=shape, dtype=DTYPES[self.dtypes.get(name, "fp16")])
            for name, shape in self.inputs.items()
        }
        for name, shape in self.states.items():
            placeholders[name] = mb.state_tensor_placeholder(shape, dtype=types.fp16)
        with Function(placeholders, opset_version=getattr(ct.target, self.system)) as function:
            results = self.body(function.inputs)
            function.set_outputs(list(results) if isinstance(results, list | tuple) else [results])
        return function

    def save(self, path: Path) -> Path:
        """Write it as a package."""
        return save(path, {"main": self}, self.system)


def save(path: Path, functions: Mapping[str, Example], system: str = "iOS18") -> Path:
    """Write a package of several functions."""
    program = Program()
    for name, example in functions.items():
        program.add_function(name, example.function())
    program.default_function_name = next(iter(functions))
    program.export_as_multifunction = len(functions) > 1
    write_package(path, program, system, {})
    return path


def lint(example: Example, path: Path, targets: Sequence[str] = ()) -> Report:
    """What the rules find in an example."""
    return lint_path(example.save(path / "example.mlpackage"), targets)


def of(report: Report, rule: str) -> list[Finding]:
    """A rule's findings."""
    return [finding for finding in report.findings if finding.rule == rule]


def half(*shape: int, seed: int = 0) -> np.ndarray:
    """Small random fp16 numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def codes(dtype: Any, *shape: int) -> np.ndarray:
    """Random codes 0 to 7."""
    return np.random.default_rng(0).integers(0, 8, shape).astype(dtype)


def conv(x: Any, channels: int = 64, **weight: Any) -> Any:
    """A 1x1 convolution with a plain weight."""
    return mb.conv(x=x, weight=half(channels, x.shape[1], 1, 1), **weight)
