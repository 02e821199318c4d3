"""The op tables: every MIL op type up to iOS 18 has a row or stands in `REFUSED` with a reason."""

from pdconvert.executors.mil.ops import (
    activation,
    compression,
    elementwise,
    indexing,
    normalization,
    products,
    reduction,
    shape,
)
from pdconvert.executors.mil.ops.row import OpRow

OPS: dict[str, OpRow] = {
    **elementwise.ROWS,
    **activation.ROWS,
    **reduction.ROWS,
    **shape.ROWS,
    **indexing.ROWS,
    **products.ROWS,
    **normalization.ROWS,
    **compression.ROWS,
}

STATE_OPS = frozenset({"read_state", "write_state", "coreml_update_state"})
"""Ops that the session itself runs, since they touch buffers that outlive a call."""

REFUSED: dict[str, str] = {
    "cond": "a branch depends on run-time values; convert the model with the branch decided",
    "while_loop": "loops have no fixed op sequence; unroll the loop when converting",
}
"""Op types that are not run, and why."""

__all__ = ["OPS", "REFUSED", "STATE_OPS", "OpRow"]
