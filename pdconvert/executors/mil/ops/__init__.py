"""The op tables: every MIL op type up to iOS 18 has a row or stands in `REFUSED` with a reason.

What has no oracle on this side of a device (its documentation leaves the result open, and coremltools
cannot compute it either) is refused rather than guessed.
"""

from pdconvert.executors.mil.ops import (
    activation,
    compression,
    elementwise,
    indexing,
    normalization,
    pooling,
    products,
    recurrent,
    reduction,
    resizing,
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
    **pooling.ROWS,
    **resizing.ROWS,
    **recurrent.ROWS,
    **compression.ROWS,
}

STATE_OPS = frozenset({"read_state", "write_state", "coreml_update_state"})
"""Ops that the session itself runs, since they touch buffers that outlive a call."""

_LISTS = "lists of tensors are not run; convert the model with tensors of a fixed shape instead"
_RANDOM = (
    "its result is random on a device too, so there is nothing to compare; pass the numbers in as an input"
)

REFUSED: dict[str, str] = {
    "cond": "a branch depends on run-time values; convert the model with the branch decided",
    "while_loop": "loops are not run; unroll the loop when converting",
    "make_list": _LISTS,
    "list_gather": _LISTS,
    "list_length": _LISTS,
    "list_read": _LISTS,
    "list_scatter": _LISTS,
    "list_write": _LISTS,
    "random_bernoulli": _RANDOM,
    "random_categorical": _RANDOM,
    "random_normal": _RANDOM,
    "random_uniform": _RANDOM,
    "classify": "it returns a dictionary of class names; convert the model without a classifier configuration",
    "conv_quantized": "it is experimental and no ML program contains it; weights are compressed by constexpr ops",
    "crop_resize": "MIL leaves open how box edges are sampled; cut and resize with slices and resize_bilinear",
    "gru": "MIL's formula and its default for reset_after disagree; write it out with matmul",
    "l2_pool": "MIL leaves open whether the squares are summed or averaged; write it with square, avg_pool and sqrt",
    "non_maximum_suppression": "MIL leaves open what unused rows hold; convert the model without its last step",
}
"""Op types that are not run: why, and what to do."""

__all__ = ["OPS", "REFUSED", "STATE_OPS", "OpRow"]
