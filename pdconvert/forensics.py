"""Where fp16 and fp32 part: the first op at fault in a trace, who made it, and what would help."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pdconvert.executors.mil.trace import Trace, TraceRow

LOSS_DB = 20.0
"""One op that loses this much against the worst of its inputs is at fault."""

ROUNDING_DB = 72.0
"""What rounding an exact value to fp16 leaves: more than this no op can be said to lose."""

PASSED_ON_DB = 6.0
"""A reader of a lossy tensor that is no better than this much above it has taken over the loss."""

Kind = Literal["overflow", "loss"]

BLOCK = re.compile(r"^(layers)_(\d+)_|^(head)_|^(embedding)_")
SQUARES = ("square", "pow")


@dataclass(frozen=True)
class Fault:
    """The first op that went wrong in fp16.

    Attributes:
        kind: "overflow", not finite in fp16 although finite in fp32; or "loss", many dB in one op.
        op_type, name: of the op and of its output, which is the tensor at fault.
        function, position: the function, and the op's place in it.
        low, high: the tensor's range in fp32.
        nonfinite, flushed: elements that overflowed, and that became zero.
        sqnr_db, lost_db: of the tensor in fp16 against fp32, and against the op's worst input.
        block: such as "layers.3"; None for a package with other names.
        made_by: the pass, or "family", that the op comes from; None where the build does not say.
        advice: which pass would help.
    """

    kind: Kind
    op_type: str
    name: str
    function: str
    position: int
    low: float
    high: float
    nonfinite: int
    flushed: int
    sqnr_db: float
    lost_db: float
    block: str | None
    made_by: str | None
    advice: str

    def sentence(self) -> str:
        """The fault in one line."""
        where = f" of block {self.block}" if self.block else ""
        maker = f", made by {self.made_by}," if self.made_by else ""
        if self.kind == "overflow":
            what = f"overflows fp16 ({self.nonfinite} values; its range is {self.low:.4g} … {self.high:.4g})"
        else:
            flushed = f", {self.flushed} values flushed to zero" if self.flushed else ""
            what = f"loses {self.lost_db:.0f} dB in fp16 (range {self.low:.4g} … {self.high:.4g}{flushed})"
        return f"{self.op_type} {self.name}{where}{maker} {what}: {self.advice}"

    def to_json(self) -> dict[str, Any]:
        """Plain data; infinite numbers as text."""
        return {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        } | {"sentence": self.sentence()}


def find_fault(
    rows: Sequence[TraceRow], made_by: Mapping[str, str] | None = None, loss_db: float = LOSS_DB
) -> Fault | None:
    """The first row that overflows; without one, the first that loses `loss_db` for good; None without either.

    A loss counts if an op that reads the tensor has it too: the square of a tiny epsilon may lose its last
    bits, and the sum that it goes into is none the worse.

    Args:
        rows: of a trace, in order.
        made_by: module path of a block, as in the manifest's `graph.made_by` → pass or family.
    """
    for row in rows:
        if row.nonfinite > row.nonfinite_fp32:
            return _fault(row, "overflow", made_by or {})
    readers: dict[str, list[float]] = {}
    for row in rows:
        for name in row.op.inputs:
            readers.setdefault(name, []).append(row.sqnr_db)
    for row in rows:
        kept = readers.get(row.name, [row.sqnr_db])
        if _lost_db(row) >= loss_db and min(kept) <= row.sqnr_db + PASSED_ON_DB:
            return _fault(row, "loss", made_by or {})
    return None


def block_and_scope(name: str) -> tuple[str | None, str]:
    """The block that a tensor of a package belongs to, such as "layers.3", and the rest of its name."""
    match = BLOCK.match(name)
    if not match:
        return None, ""
    return f"layers.{match[2]}" if match[1] else match[3] or match[4], name[match.end() :]


def _lost_db(row: TraceRow) -> float:
    """How much lower the output's SQNR is than its worst input's, exact inputs counting as rounded ones."""
    return 0.0 if math.isnan(row.sqnr_db) else min(row.input_sqnr_db, ROUNDING_DB) - row.sqnr_db


def _fault(row: TraceRow, kind: Kind, made_by: Mapping[str, str]) -> Fault:
    block, scope = block_and_scope(row.name)
    paths = [path for path in made_by if scope.startswith(path.replace(".", "_"))]
    maker = made_by[max(paths, key=len)] if paths else None
    return Fault(
        kind=kind,
        op_type=row.op.op_type,
        name=row.name,
        function=row.op.function,
        position=row.op.position,
        low=row.low,
        high=row.high,
        nonfinite=row.nonfinite,
        flushed=row.flushed,
        sqnr_db=row.sqnr_db,
        lost_db=_lost_db(row),
        block=block,
        made_by=maker,
        advice=_advice(row, scope),
    )


def _advice(row: TraceRow, scope: str) -> str:
    squares = row.op.op_type in SQUARES or (row.op.op_type == "mul" and len(set(row.op.inputs)) == 1)
    if "norm" in scope and squares:
        return "use the pass safe_rms_norm, which divides by the row's maximum before it squares"
    if "norm" not in scope and row.op.op_type == "add" and not scope.startswith(("self_attn", "mlp")):
        return "the residual stream leaves fp16; use the pass scale_residual"
    if scope.startswith("self_attn"):
        return "use the pass fold_attention_scale, or scale_residual if the tensor is the projection's output"
    if "down_proj" in scope or "o_proj" in scope:
        return "the branch's output leaves fp16 before it is added; use the pass scale_residual"
    return "no pass of this version mends it; leave the layer out of the package, or report it with the trace"


def summary(
    trace: Trace, made_by: Mapping[str, str] | None = None, loss_db: float = LOSS_DB
) -> dict[str, Any]:
    """A trace in short: how many ops, the widest tensors, and the first fault."""
    fault = find_fault(trace.rows, made_by, loss_db)
    widest = sorted(
        trace.rows, key=lambda row: -row.fp16_share if math.isfinite(row.fp16_share) else -math.inf
    )[:5]
    return {
        "ops": len(trace.rows),
        "widest": [{"name": row.name, "fp16_share": round(row.fp16_share, 4)} for row in widest],
        "fault": fault.to_json() if fault else None,
    }
