"""Cases of the rules on numbers."""

import numpy as np
from lint_case import Case
from lint_programs import Example, conv, half, mb


def _norm(scaled, floor=2.0**-13):
    """RMSNorm along the channels, plain or divided by its row maximum with or without a floor."""

    def body(inputs):
        x = inputs["x"]
        if scaled:
            peak = mb.reduce_max(x=mb.abs(x=x), axes=[1], keep_dims=True)
            x = mb.real_div(x=x, y=mb.maximum(x=peak, y=np.float16(floor)) if floor else peak)
        mean = mb.reduce_mean(x=mb.mul(x=x, y=x), axes=[1], keep_dims=True)
        return mb.mul(x=x, y=mb.rsqrt(x=mean, epsilon=np.float16(1e-5)))

    return body


def _layer_norm(inputs):
    x = inputs["x"]
    centred = mb.sub(x=x, y=mb.reduce_mean(x=x, axes=[1], keep_dims=True))
    variance = mb.reduce_mean(x=mb.square(x=centred), axes=[1], keep_dims=True)
    return mb.mul(x=centred, y=mb.rsqrt(x=variance, epsilon=np.float16(1e-5)))


def _masked(value, shape=(1, 64, 1, 64)):
    mask = np.triu(np.full(shape[1:2] + shape[3:], value, np.float16)).reshape(shape)
    return lambda i: mb.softmax(x=mb.add(x=conv(i["x"]), y=mask), axis=1)


def _row_mask(inputs):
    mask = np.zeros((1, 64, 1, 1), np.float16)
    mask[:, 32:] = -1e4
    return mb.softmax(x=mb.add(x=conv(inputs["x"]), y=mask), axis=1)


def _in_fp32(inputs):
    return mb.relu(x=mb.cast(x=mb.exp(x=mb.cast(x=mb.relu(x=inputs["x"]), dtype="fp32")), dtype="fp16"))


def _boundary(inputs):
    return mb.cast(x=mb.relu(x=mb.cast(x=inputs["x"], dtype="fp16")), dtype="fp32")


FP32_INPUT = {"dtypes": {"x": "fp32"}}

NUMERICS = [
    Case(
        "fp32-inside",
        "exp in fp32",
        Example(lambda i: mb.exp(x=i["x"]), **FP32_INPUT),
        Example(_boundary, **FP32_INPUT),
    ),
    Case(
        "float-casts",
        "cast from fp16 to fp32",
        Example(lambda i: mb.exp(x=mb.cast(x=mb.relu(x=i["x"]), dtype="fp32"))),
        Example(_boundary, **FP32_INPUT),
    ),
    Case(
        "boundary-casts",
        "cast from fp32 to fp16",
        Example(lambda i: mb.relu(x=mb.cast(x=i["x"], dtype="fp16")), **FP32_INPUT),
        Example(_in_fp32),
    ),
    Case(
        "squares-overflow",
        "mul feeds a mean of squares and is not scaled",
        Example(_norm(scaled=False)),
        Example(_norm(scaled=True)),
    ),
    Case(
        "squares-overflow",
        "pow feeds a mean of squares and is not scaled",
        Example(lambda i: mb.reduce_sum(x=mb.pow(x=conv(i["x"]), y=np.float16(2)), axes=[1])),
        Example(lambda i: mb.reduce_sum(x=mb.pow(x=conv(i["x"]), y=np.float16(3)), axes=[1])),
    ),
    Case(
        "squares-overflow",
        "reduce_l2_norm on values that are not scaled",
        Example(lambda i: mb.reduce_l2_norm(x=i["x"], axes=[1])),
        Example(lambda i: mb.reduce_l2_norm(x=mb.sigmoid(x=i["x"]), axes=[1])),
    ),
    Case(
        "norm-zero-row",
        "division by the row maximum without a floor",
        Example(_norm(scaled=True, floor=0)),
        Example(_norm(scaled=True)),
    ),
    Case(
        "unfused-layer-norm",
        "layer norm written as single ops",
        Example(_layer_norm),
        Example(lambda i: mb.layer_norm(x=i["x"], axes=[1], epsilon=np.float16(1e-5))),
    ),
    Case(
        "pow",
        "pow with exponent 3.0",
        Example(lambda i: mb.pow(x=i["x"], y=np.float16(3))),
        Example(lambda i: mb.mul(x=i["x"], y=i["x"])),
    ),
    Case(
        "mask-constant",
        "constant with infinite or NaN elements before a softmax",
        Example(_masked(-np.inf)),
        Example(_masked(-4e4)),
    ),
    Case(
        "mask-constant",
        "constant with -65504.0 before a softmax",
        Example(_masked(-65504)),
        Example(lambda i: mb.add(x=i["x"], y=half(64))),
    ),
    Case("baked-mask", "constant mask of 8192 bytes", Example(_masked(-1e4)), Example(_row_mask)),
    Case("silu", "silu", Example(lambda i: mb.silu(x=i["x"])), Example(lambda i: mb.sigmoid(x=i["x"]))),
]
