"""The first op at fault, from rows of a trace."""

import math

import pytest

from pdconvert.executors.mil.graph import OpInfo
from pdconvert.executors.mil.trace import TraceRow
from pdconvert.forensics import find_fault

MADE_BY = {
    "input_layernorm": "safe_rms_norm",
    "self_attn": "eager_gqa_attention",
    "mlp.down_proj": "linear_to_conv2d",
}


def row(name, op="mul", inputs=("x",), sqnr=70.0, entering=72.0, nonfinite=0, fp32=0, flushed=0):
    info = OpInfo("main", 7, op, (name,), (), inputs)
    return TraceRow(info, name, "fp16", (1,), -1.0, 2.0, 0.1, nonfinite, fp32, flushed, sqnr, entering)


def test_a_sound_trace_has_no_fault():
    rows = [row("layers_0_mlp_mul"), row("layers_0_add", "add", ("layers_0_mlp_mul",), 66.0, 70.0)]
    assert find_fault(rows, MADE_BY) is None


def test_rounding_of_exact_inputs_is_no_loss():
    assert find_fault([row("layers_0_input_layernorm_div", sqnr=70.0, entering=math.inf)]) is None


def test_overflow_comes_before_any_loss():
    rows = [
        row("layers_3_input_layernorm_mean", "reduce_mean", sqnr=20.0),
        row("layers_3_input_layernorm_rsqrt", "rsqrt", ("layers_3_input_layernorm_mean",), 20.0, 20.0),
        row("layers_4_add", "add", ("a", "b"), -math.inf, 60.0, nonfinite=3),
    ]
    fault = find_fault(rows, MADE_BY)
    assert (fault.kind, fault.name, fault.block, fault.made_by) == (
        "overflow",
        "layers_4_add",
        "layers.4",
        None,
    )
    assert "scale_residual" in fault.sentence()


def test_what_is_infinite_in_fp32_already_is_not_fp16s_fault():
    assert find_fault([row("layers_0_mask", sqnr=math.inf, nonfinite=5, fp32=5)]) is None


def test_a_loss_that_nobody_takes_over_does_not_count():
    rows = [
        row("layers_0_input_layernorm_mul_2", inputs=("e", "e"), sqnr=40.0),
        row("layers_0_input_layernorm_add", "add", ("m", "layers_0_input_layernorm_mul_2"), 70.0, 40.0),
    ]
    assert find_fault(rows, MADE_BY) is None
    rows[1] = row("layers_0_input_layernorm_add", "add", ("m", "layers_0_input_layernorm_mul_2"), 41.0, 40.0)
    assert find_fault(rows, MADE_BY).name == "layers_0_input_layernorm_mul_2"


@pytest.mark.parametrize(
    ("name", "op", "inputs", "maker", "advice"),
    [
        ("layers_2_input_layernorm_mul", "mul", ("h", "h"), "safe_rms_norm", "safe_rms_norm"),
        ("layers_2_mlp_down_proj_conv2d_6", "conv", ("h",), "linear_to_conv2d", "scale_residual"),
        ("layers_2_self_attn_matmul", "matmul", ("q", "k"), "eager_gqa_attention", "fold_attention_scale"),
        ("layers_2_mlp_mul_15", "mul", ("g", "u"), None, "no pass of this version mends it"),
        ("some_tensor", "mul", ("g", "u"), None, "no pass of this version mends it"),
    ],
)
def test_block_maker_and_advice(name, op, inputs, maker, advice):
    fault = find_fault([row(name, op, inputs, -math.inf, nonfinite=1)], MADE_BY)
    assert fault.made_by == maker
    assert fault.block == ("layers.2" if name.startswith("layers_2") else None)
    assert advice in fault.sentence()
    assert fault.to_json()["sqnr_db"] == "-inf"
