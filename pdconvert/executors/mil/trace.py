"""Trace a function op by op: ranges, overflow, flushed values, and what fp16 loses against fp32.

Both modes run in lock-step on the same inputs, so that only one op's outputs are held at a time.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from pdconvert.executors.mil.package import Package
from pdconvert.executors.mil.plan import OpInfo
from pdconvert.executors.mil.session import MilSession, State
from pdconvert.executors.mil.values import round_fp16
from pdconvert.executors.mil.weights import WeightCache, default_cache_bytes

FP16_MAX = 65504.0


@dataclass(frozen=True)
class TraceRow:
    """What one output of one op held.

    Attributes:
        op: the op.
        name: of the output.
        dtype: its type in the program.
        shape: its shape in this run.
        low: smallest finite value, in fp32 mode; NaN where there is none.
        high: largest finite value, in fp32 mode.
        fp16_share: largest magnitude in fp32 mode over 65,504; above 1 it does not fit fp16.
        nonfinite: how many elements are infinite or NaN in fp16 mode.
        nonfinite_fp32: how many are so in fp32 mode already.
        flushed: how many are zero in fp16 mode and not in fp32 mode.
        sqnr_db: 10 log10(sum of squares / sum of squared differences), fp16 against fp32; infinite
            where they are equal, minus infinite where only fp16 is not finite; NaN for integers.
        input_sqnr_db: the lowest `sqnr_db` among the op's inputs; infinite where it has none.
    """

    op: OpInfo
    name: str
    dtype: str
    shape: tuple[int, ...]
    low: float
    high: float
    fp16_share: float
    nonfinite: int
    nonfinite_fp32: int
    flushed: int
    sqnr_db: float
    input_sqnr_db: float

    @property
    def lost_db(self) -> float:
        """How much lower this output's SQNR is than the worst of the op's inputs; never below 0.

        Scores under a mask of -4e4 have an SQNR near 120 dB, which the mask alone makes, so a softmax seems
        to lose what they had lost before.
        """
        if math.isnan(self.sqnr_db) or self.sqnr_db == math.inf:
            return 0.0
        return max(0.0, self.input_sqnr_db - self.sqnr_db)


@dataclass
class Trace:
    """Result of a traced run.

    Attributes:
        rows: one for each output of each op, in order.
        outputs: of the function, in fp16 mode.
        reference: of the function, in fp32 mode.
        states: buffers of the function's states after the run, in fp16 mode.
    """

    rows: list[TraceRow] = field(default_factory=list)
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    reference: dict[str, torch.Tensor] = field(default_factory=dict)
    states: State = field(default_factory=dict)


class Tracer:
    """Runs one function in both modes; states live on from one `run` to the next."""

    def __init__(
        self, package: Package, function: str | None = None, *, weight_cache_bytes: int | None = None
    ) -> None:
        """Open both sessions.

        Args:
            package: the package.
            function: name of the function; the default one where None.
            weight_cache_bytes: of both sessions together.
        """
        cache = WeightCache(default_cache_bytes() if weight_cache_bytes is None else weight_cache_bytes)
        self.exact = MilSession(package, function, mode="fp32", cache=cache)
        self.rounded = MilSession(package, function, mode="fp16", cache=cache)
        self._states = (self.exact.make_state(), self.rounded.make_state())

    def set_states(self, values: Mapping[str, np.ndarray]) -> None:
        """Let the next run go on from these states, by name."""
        for name, value in values.items():
            for session, state in zip((self.exact, self.rounded), self._states, strict=True):
                session.write_state(state, name, value)

    def run(self, inputs: Mapping[str, np.ndarray | torch.Tensor]) -> Trace:
        """Run once in both modes.

        Raises:
            InputError: as `MilSession.run`.
        """
        trace = Trace(states=self._states[1])
        trace.rows.extend(self._rows(inputs, trace))
        return trace

    def _rows(self, inputs: Mapping[str, np.ndarray | torch.Tensor], trace: Trace) -> Iterator[TraceRow]:
        sqnr = {
            name: _sqnr_db(value, round_fp16(value))
            for name, info in self.exact.function.inputs.items()
            if info.dtype == "fp16" and name in inputs
            for value in [torch.as_tensor(inputs[name]).float()]
        }
        exact = self.exact.steps(inputs, self._states[0], outputs=trace.reference)
        rounded = self.rounded.steps(inputs, self._states[1], outputs=trace.outputs)
        for (op, wanted), (_, got) in zip(exact, rounded, strict=True):
            entering = min((sqnr.get(name, math.inf) for name in op.inputs), default=math.inf)
            for name, info, want, result in zip(op.outputs, op.types, wanted, got, strict=False):
                row = trace_row(op, name, info.dtype, want, result, entering)
                if not math.isnan(row.sqnr_db):
                    sqnr[name] = row.sqnr_db
                yield row


def trace_row(
    op: OpInfo, name: str, dtype: str, want: torch.Tensor, got: torch.Tensor, input_sqnr_db: float
) -> TraceRow:
    """Compare one output in fp32 mode (`want`) and fp16 mode (`got`)."""
    shape = tuple(want.shape)
    if not want.is_floating_point() or not want.numel():
        values = want.double() if want.numel() else torch.full((1,), math.nan)
        share = float(values.abs().max()) / FP16_MAX
        low, high = float(values.min()), float(values.max())
        return TraceRow(op, name, dtype, shape, low, high, share, 0, 0, 0, math.nan, input_sqnr_db)
    finite = torch.isfinite(want)
    missing = want.numel() - int(finite.sum())
    held = want[finite] if missing else want
    low, high = (float(held.min()), float(held.max())) if held.numel() else (math.nan, math.nan)
    share = max(abs(low), abs(high)) / FP16_MAX if not missing else math.inf
    lost = int((~torch.isfinite(got)).sum())
    flushed = int(((got == 0) & (want != 0)).sum())
    return TraceRow(
        op, name, dtype, shape, low, high, share, lost, missing, flushed, _sqnr_db(want, got), input_sqnr_db
    )


def _sqnr_db(want: torch.Tensor, got: torch.Tensor) -> float:
    finite = torch.isfinite(want)
    if not bool(torch.isfinite(got[finite]).all()):
        return -math.inf
    signal = want[finite].double()
    noise = float((signal - got[finite].double()).square().sum())
    if noise == 0:
        return math.inf
    power = float(signal.square().sum())
    return 10 * math.log10(power / noise) if power else -math.inf
