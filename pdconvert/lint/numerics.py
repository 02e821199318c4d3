"""Rules on numbers: element types, norms, squares, and values that fp16 does not hold."""

from collections.abc import Iterator

import numpy as np

from pdconvert.executors.mil.view import FunctionView, Op, Value, walk_back
from pdconvert.lint.layout import APPLE_RULES
from pdconvert.lint.paths import LAYOUT_OPS, reaching_softmax
from pdconvert.lint.rule import Found, function_rule

WIDE_TYPES = ("fp32", "fp64", "bf16")
LOWEST_MASK = -40000.0
FP16_ROOT = 256
"""The square of a larger number is infinite in fp16."""

_MASKING = ("add", "sub", "mul", "select", "maximum", "minimum", "scaled_dot_product_attention")
_FLOORS = frozenset({"maximum", "add", "clip", "threshold"})
_TO_MAXIMUM = LAYOUT_OPS | _FLOORS | {"mul", "inverse", "real_div", "abs", "cast"}
_BOUNDED = frozenset(
    {"sigmoid", "sigmoid_hard", "softmax", "tanh", "scaled_tanh", "sin", "cos", "erf", "softsign", "l2_norm"}
)


@function_rule(
    "fp32-inside",
    "silent",
    title="The Neural Engine computes in fp16: an fp32 op runs on the CPU or GPU and cuts the graph there",
    source=f"{APPLE_RULES}; measured: removing two fp32 ops took one encoder from 13 Neural Engine regions to 1 and"
    " from 13.2 to 4.6 ms (coreai-model-zoo `ane-region-count-and-fp32-ops.md`)",
    mend="convert with fp16 precision; keep fp32 to casts right at inputs and outputs",
)
def fp32_inside(function: FunctionView) -> Iterator[Found]:
    """An op with an fp32 result, other than a cast to an output of the function, or to the classifier at its end."""
    for op in function.computed_ops:
        wide = [value for value in op.outputs if value.dtype in WIDE_TYPES]
        if wide and not (op.type == "cast" and _ends(function, op)):
            yield Found(f"{op.type} in {wide[0].dtype}", op, value=wide[0])


def _ends(function: FunctionView, op: Op) -> bool:
    """Whether an op's result is an output of the function, or goes into the classifier at its end."""
    return function.is_output(op.out) or {user.type for user in op.out.users} == {"classify"}


@function_rule(
    "float-casts",
    "perf",
    title="Each change of float type inside the graph is a place where it is cut",
    source="coreai-model-zoo `ane-region-count-and-fp32-ops.md` (measured: about 0.7 ms a cut on one encoder)",
    mend="compute the ops between the casts in fp16",
)
def float_casts(function: FunctionView) -> Iterator[Found]:
    """A cast between float types that neither takes an input of the function nor gives an output."""
    for op, before, after in _float_casts(function):
        if before.maker is not None and not function.is_output(op.out):
            yield Found(f"cast from {before.dtype} to {after.dtype}", op)


@function_rule(
    "boundary-casts",
    "info",
    title="Inputs and outputs in fp32 are cast on the way",
    source=f"{APPLE_RULES}: no fp32 but at the boundary",
    mend="declare the input or output as fp16 (iOS 16 and later)",
)
def boundary_casts(function: FunctionView) -> Iterator[Found]:
    """A cast between float types at an input or output of the function."""
    for op, before, after in _float_casts(function):
        if before.maker is None or function.is_output(op.out):
            yield Found(f"cast from {before.dtype} to {after.dtype}", op)


def _float_casts(function: FunctionView) -> Iterator[tuple[Op, Value, Value]]:
    for op in function.of_type("cast"):
        before, after = op.input("x"), op.out
        if (
            before is not None
            and before.dtype in ("fp16", *WIDE_TYPES)
            and after.dtype in ("fp16", *WIDE_TYPES)
        ):
            yield op, before, after


@function_rule(
    "squares-overflow",
    "silent",
    title="Squares summed in a norm are infinite in fp16 where a value is beyond 255.9",
    source="coremltools `frontend/torch/ops.py`, rms_norm, a comment (code); measured by this project: SmolLM2-135M's"
    " residual peaks at 23,850, and the plain norm leaves nothing of its logits in emulated fp16",
    mend="divide by the largest value of the row before squaring, or use layer_norm of [x, -x] (pass safe_rms_norm)",
)
def squares_overflow(function: FunctionView) -> Iterator[Found]:
    """A square in fp16 that feeds a mean or sum, of a value not divided by its row maximum or bounded otherwise."""
    for op in function.of_type("square", "pow", "mul"):
        root = _square_root(op)
        if root is None or op.out.dtype != "fp16" or _is_bounded(root):
            continue
        if any(user.type in ("reduce_mean", "reduce_sum") for user in _users(op.out)):
            yield Found(f"{op.type} feeds a mean of squares and is not scaled", op)
    for op in function.of_type("reduce_sum_square", "reduce_l2_norm"):
        x = op.input("x")
        if x is not None and op.out.dtype == "fp16" and not _is_bounded(x):
            yield Found(f"{op.type} on values that are not scaled", op)


@function_rule(
    "norm-zero-row",
    "silent",
    title="A row of zeros divided by its own maximum is NaN; padded rows can be zero",
    source="coremltools `frontend/torch/ops.py`, rms_norm (code): divides by max|x|, and adds epsilon only after that",
    mend="put a floor under the maximum, and scale epsilon with it (pass safe_rms_norm)",
)
def norm_zero_row(function: FunctionView) -> Iterator[Found]:
    """A division by the largest absolute value of an axis that has no floor above zero."""
    for op in function.of_type("real_div"):
        divisor = op.input("y")
        if divisor is None:
            continue
        makers = list(walk_back(divisor, LAYOUT_OPS, 4))
        if makers and makers[-1].type == "reduce_max" and all(m.type in LAYOUT_OPS for m in makers[:-1]):
            x = makers[-1].input("x")
            if x is not None and x.maker is not None and x.maker.type == "abs":
                yield Found("division by the row maximum without a floor", op)


@function_rule(
    "unfused-layer-norm",
    "perf",
    title="coremltools fuses a layer norm into one op on some axes only",
    source="0seba/coremlmodels `graph_passes.py`, which replaces that pass (code)",
    mend="write the norm as one layer_norm op; move the normalized axis last around it if needed",
)
def unfused_layer_norm(function: FunctionView) -> Iterator[Found]:
    """A tensor minus its own mean, squared and averaged: a layer norm in pieces."""
    for op in function.of_type("sub"):
        x, mean = op.input("x"), op.input("y")
        if x is None or mean is None or mean.maker is None or mean.maker.type != "reduce_mean":
            continue
        if mean.maker.input("x") is x and any(_square_root(user) is op.out for user in op.out.users):
            yield Found("layer norm written as single ops", op)


@function_rule(
    "pow",
    "perf",
    title="`pow` is reported to be harmful on the Neural Engine",
    source="SqueezeBits, on Core ML LLMs (second-hand)",
    mend="write mul(x, x), or mul(x, mul(x, x)); use the op gelu for its tanh form",
)
def power(function: FunctionView) -> Iterator[Found]:
    """`pow`."""
    for op in function.of_type("pow"):
        exponent = op.param("y")
        yield Found(
            f"pow with exponent {exponent if isinstance(exponent, int | float) else 'of a tensor'}", op
        )


@function_rule(
    "mask-constant",
    "silent",
    title="A mask constant that is infinite, or leaves fp16 no room below it, can give NaN",
    source="Apple: -4e4, since the Neural Engine mishandles -inf (documentation); coremltools#2669: the lowest fp32"
    " value made a whole model NaN. CoreML-LLM found -inf harmless on a Mac, perhaps on its CPU",
    mend="use -1e4 to -4e4, and let every row see at least one key",
)
def mask_constant(function: FunctionView) -> Iterator[Found]:
    """A float constant with an element that is not finite or is below -4e4, on the way to a softmax."""
    for op, value in _constants_before_softmax(function):
        array = value.array()
        if array is None or array.dtype.kind != "f" or array.size == 0:
            continue
        finite = bool(np.isfinite(array).all())
        lowest = float(array.min())
        if not finite or lowest < LOWEST_MASK:
            yield Found(
                f"constant with {lowest if finite else 'infinite or NaN elements'} before a softmax",
                op,
                value=value,
            )


@function_rule(
    "baked-mask",
    "perf",
    title="A mask that is a constant is stored in every function",
    source="NVMAI: 64 MB a function (documentation)",
    mend="make the mask an input",
)
def baked_mask(function: FunctionView) -> Iterator[Found]:
    """A constant over two axes with elements below -1000, or a constant condition, on the way to a softmax."""
    for op, value in _constants_before_softmax(function):
        if sum(size > 1 for size in value.shape) < 2:
            continue
        array = value.array()
        if array is not None and (array.dtype.kind == "b" or bool((array < -1000).any())):
            yield Found(f"constant mask of {value.size_bytes} bytes", op, value=value)


@function_rule(
    "silu",
    "info",
    title="Sources disagree on `silu`: lowered to an fp32 op, or kept as one fused op",
    source="Apple, coreai-models `common_issues.md` against its own `export/ios.py` (code; Core AI, not Core ML)",
    mend="compare with x * sigmoid(x) on the device",
)
def silu(function: FunctionView) -> Iterator[Found]:
    """`silu`."""
    for op in function.of_type("silu"):
        yield Found("silu", op)


def _square_root(op: Op) -> Value | None:
    """The value that an op squares."""
    x, y = op.input("x"), op.input("y")
    if x is None or x.is_constant:
        return None
    if op.type == "square" or (op.type == "mul" and x is y):
        return x
    return x if op.type == "pow" and op.param("y") == 2 else None


def _is_bounded(value: Value) -> bool:
    """Whether a value is known to be small: divided by its row maximum, or of a bounded function."""
    op = value.maker
    if op is None:
        return False
    if op.type in _BOUNDED:
        return True
    if op.type == "clip":
        low, high = op.param("alpha"), op.param("beta")
        return low is not None and high is not None and max(abs(low), abs(high)) < FP16_ROOT
    if op.type in LAYOUT_OPS:
        return any(_is_bounded(x) for x in op.computed())
    factors = (
        [op.input("y")]
        if op.type == "real_div"
        else [op.input("x"), op.input("y")]
        if op.type == "mul"
        else []
    )
    return any(
        maker.type == "reduce_max"
        for factor in factors
        if factor is not None
        for maker in walk_back(factor, _TO_MAXIMUM, 8)
    )


def _users(value: Value) -> Iterator[Op]:
    """Ops that take a value, also through ops that only change its layout or type."""
    for op in value.users:
        if op.type in LAYOUT_OPS:
            yield from _users(op.out)
        else:
            yield op


def _constants_before_softmax(function: FunctionView) -> Iterator[tuple[Op, Value]]:
    for op in reaching_softmax(function):
        if op.type in _MASKING:
            for value in op.values():
                if value.held is not None and value.dtype != "string":
                    yield op, value
