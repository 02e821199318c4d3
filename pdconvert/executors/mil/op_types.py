"""The names of all MIL op types up to iOS 18, for readers that do not load the executor's tables (and torch).

A test holds the list against the tables in `ops/` and against coremltools' registry.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdconvert.errors import InputError, printable

_NAMES = """
abs acos add affine argsort asin atan atanh avg_pool band_part batch_norm batch_to_space cast ceil
clamped_relu classify clip concat cond const constexpr_affine_dequantize constexpr_blockwise_shift_scale
constexpr_cast constexpr_lut_to_dense constexpr_lut_to_sparse constexpr_sparse_blockwise_shift_scale
constexpr_sparse_to_dense conv conv_quantized conv_transpose coreml_update_state cos cosh crop crop_resize
cumsum depth_to_space dequantize einsum elu equal erf exp exp2 expand_dims fill fill_like flatten2d floor
floor_div gather gather_along_axis gather_nd gelu greater greater_equal gru identity instance_norm inverse
l2_norm l2_pool layer_norm leaky_relu less less_equal linear linear_activation list_gather list_length
list_read list_scatter list_write local_response_norm log logical_and logical_not logical_or logical_xor
lstm make_list matmul max_pool maximum minimum mod mul non_maximum_suppression non_zero not_equal one_hot
pad pixel_shuffle pixel_unshuffle pow prelu quantize random_bernoulli random_categorical random_normal
random_uniform range_1d read_state real_div reduce_argmax reduce_argmin reduce_l1_norm reduce_l2_norm
reduce_log_sum reduce_log_sum_exp reduce_max reduce_mean reduce_min reduce_prod reduce_sum reduce_sum_square
relu relu6 resample reshape reshape_like resize resize_bilinear resize_nearest_neighbor reverse
reverse_sequence rnn round rsqrt scaled_dot_product_attention scaled_tanh scatter scatter_along_axis
scatter_nd select shape sigmoid sigmoid_hard sign silu sin sinh slice_by_index slice_by_size slice_update
sliding_windows softmax softplus softplus_parametric softsign space_to_batch space_to_depth split sqrt
square squeeze stack sub tan tanh threshold thresholded_relu tile topk transpose upsample_bilinear
upsample_nearest_neighbor while_loop write_state
"""

KNOWN = frozenset(_NAMES.split())
"""Every op type that a program may hold, run by the executor or not."""

UNKNOWN = "this op type is not known up to iOS 18"
"""Why an op of any other type is refused."""


def op_place(op_type: str, outputs: Sequence[str], position: int, function: str) -> str:
    """How messages name an op: type, first output, place among the operations of its block, function."""
    name = f" {outputs[0]!r}" if outputs else ""
    return f"op {printable(op_type)}{name} (number {position} of function {function})"


def check_known(package: Path, function: str, position: int, op: Any) -> None:
    """Refuse an op that no table of MIL ops knows: the program is damaged, or newer than this reader.

    Args:
        package: path of the package, for the message.
        function: name of the function.
        position: the op's place among the operations of its block, from 0.
        op: the protobuf `Operation`.

    Raises:
        InputError: the op's type is not in `KNOWN`.
    """
    if op.type not in KNOWN:
        where = op_place(op.type, [output.name for output in op.outputs], position, function)
        raise InputError(f"{package}: {where}: {UNKNOWN}; the package is damaged, or made for a newer system")
