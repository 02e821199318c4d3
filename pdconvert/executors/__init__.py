"""Executors run what was emitted. `open_executor` picks one for a package and says which, and why.

| kind | where | what it is |
|---|---|---|
| `mil` | any machine | our interpreter of ML programs on the CPU, in fp32 or emulated fp16 |
| `coreml` | macOS | Core ML itself, on the compute units asked for |

The decode folder has one executor only, MLX (`executors/mlx.py`).
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pdconvert.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from pdconvert.executors.mil.weights import WeightCache

KINDS = ("auto", "mil", "coreml")


class Executor(Protocol):
    """One function of a package, ready to run.

    Attributes:
        kind: `mil` or `coreml`.
        reason: why this one runs.
        rounds_states: whether states of type fp16 hold nothing finer.
    """

    kind: str
    reason: str

    @property
    def rounds_states(self) -> bool: ...

    def make_state(self) -> Any:
        """Return zeroed buffers for the function's states."""

    def read_state(self, state: Any, name: str) -> "np.ndarray":
        """Return what a state holds; the array may share its memory."""

    def write_state(self, state: Any, name: str, value: "np.ndarray") -> None:
        """Put an array of the state's shape into it."""

    def run(
        self, inputs: "Mapping[str, np.ndarray | torch.Tensor]", state: Any = None
    ) -> "dict[str, torch.Tensor]":
        """Run once: every input by name; outputs by name, floats as float32."""


def open_executor(
    package: str | Path,
    function: str | None = None,
    *,
    kind: str = "auto",
    mode: str = "fp32",
    compute_units: str = "cpu_and_ne",
    weight_cache_bytes: int | None = None,
    cache: "WeightCache | None" = None,
) -> Executor:
    """Open one function of a package.

    Args:
        package: path of an `.mlpackage`.
        function: name of the function; the package's default one where None.
        kind: `mil`, `coreml`, or `auto`: Core ML on macOS, else `mil`.
        mode: `fp32` or `fp16`; of the `mil` executor only, Core ML computes in what the device has.
        compute_units: `all`, `cpu_and_ne`, `cpu_and_gpu` or `cpu_only`; of Core ML only.
        weight_cache_bytes: how many bytes of materialised weights `mil` keeps between runs; 0 where there
            is one run only.
        cache: of `mil`: shared by the sessions of one package, whose functions have weights in common.

    Raises:
        InputError: the package cannot be run, or Core ML was asked for where there is none.
    """
    if kind not in KINDS:
        raise InputError(f"executor {kind!r} is not one of {', '.join(KINDS)}")
    is_mac = sys.platform == "darwin"
    if kind == "coreml" and not is_mac:
        raise InputError(
            f"executor coreml: Core ML runs on macOS only, this is {sys.platform}; use --executor mil"
        )
    if kind == "coreml" or (kind == "auto" and is_mac):
        from pdconvert.executors.coreml import CoremlSession

        why = "asked for" if kind == "coreml" else "this is macOS"
        return CoremlSession(package, function, compute_units=compute_units, reason=why)
    from pdconvert.executors.mil import MilSession

    why = "asked for" if kind == "mil" else f"Core ML runs on macOS only, this is {sys.platform}"
    return MilSession(
        package, function, mode=mode, reason=why, weight_cache_bytes=weight_cache_bytes, cache=cache
    )
