"""Running exported models with ONNX Runtime on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pdconvert.emit.vectors import Case
from pdconvert.errors import InputError
from pdconvert.export.graph import AFTER

ERRORS_ONLY = 3
"""ONNX Runtime's log level."""
EXACT_PRODUCTS = "session.qdq_matmulnbits_accuracy_level", "1"
"""Products with de-quantized weights in float32."""


def open_session(model: Path, options: Any = None, **more: Any) -> Any:
    """An `InferenceSession` of a model.

    ONNX Runtime makes one node of a de-quantized weight and its MatMul, and by its own default rounds activations to 8
    bits there; here they stay float32.

    Raises:
        InputError: ONNX Runtime does not load it.
    """
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as errors

    options = options or onnxruntime.SessionOptions()
    options.log_severity_level = ERRORS_ONLY
    options.add_session_config_entry(*EXACT_PRODUCTS)
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"], **more)
    except (errors.Fail, errors.InvalidGraph, errors.NotImplemented, errors.InvalidArgument) as error:
        raise InputError(f"{model}: ONNX Runtime does not load it: {str(error).splitlines()[0]}") from error


def feed(case: Case) -> dict[str, np.ndarray]:
    """A test vector as an exported model takes it: floats widened to float32, states among the inputs."""
    given: Mapping[str, np.ndarray] = {**case.inputs, **case.states}
    return {
        name: value.astype(np.float32) if value.dtype == np.float16 else value
        for name, value in given.items()
    }


def run_case(session: Any, case: Case) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Outputs of a test vector by name, and what the states hold afterwards."""
    names = [output.name for output in session.get_outputs()]
    found = dict(zip(names, session.run(names, feed(case)), strict=True))
    states = {name: found.pop(name + AFTER) for name in case.states}
    return found, states
