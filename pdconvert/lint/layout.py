"""Rules on layout: which ops multiply, which axis comes last, how many axes there are, and copies."""

from collections.abc import Iterator

from pdconvert.executors.mil import dtypes
from pdconvert.executors.mil.values import RUN_TIME
from pdconvert.executors.mil.view import FunctionView, Op, Value
from pdconvert.lint.rule import Found, function_rule

APPLE_RULES = "Apple, coreai-models `neural_engine_rules.md` (documentation)"
MAX_RANK = 5
ALIGNMENT_BYTES = 64
ENGINE_TYPES = ("fp16", "int8", "uint8", "int16")


@function_rule(
    "linear-op",
    "perf",
    title="Apple's code for the Neural Engine has projections as 1x1 convolutions on (batch, channels, 1, positions)",
    source=f"Apple, ml-ane-transformers, principle 1; {APPLE_RULES}",
    mend="write the projection as a 1x1 conv on a tensor of rank 4 (pass linear_to_conv2d)",
)
def linear_op(function: FunctionView) -> Iterator[Found]:
    """`linear`, and `matmul` or `einsum` with one constant operand."""
    for op in function.of_type("linear", "matmul", "einsum"):
        operands = op.inputs.get("values") or [v for n in ("x", "y") for v in op.inputs.get(n, ())]
        constant = [value for value in operands if value.is_constant and len(value.shape) > 1]
        if op.type == "linear":
            yield Found("linear instead of a 1x1 conv", op)
        elif constant:
            yield Found(f"{op.type} with a constant operand instead of a 1x1 conv", op)


@function_rule(
    "conv-rank",
    "perf",
    title="The layout of the Neural Engine is (batch, channels, 1, positions)",
    source=APPLE_RULES,
    mend="give the tensor a height of 1, so that it is (batch, channels, 1, positions)",
)
def conv_rank(function: FunctionView) -> Iterator[Found]:
    """`conv` whose input is not of rank 4."""
    for op in function.of_type("conv"):
        x = op.input("x")
        if x is not None and len(x.shape) != 4:
            yield Found(f"conv on a tensor of rank {len(x.shape)}", op, value=x)


@function_rule(
    "io-last-axis",
    "perf",
    title="Inputs, outputs and states are stored with their last axis padded to 64 bytes",
    source=f"{APPLE_RULES}: a last axis of 1 costs 32 times the memory in fp16, 64 times in int8",
    mend="put the longest axis last, a multiple of 32 elements in fp16",
)
def io_last_axis(function: FunctionView) -> Iterator[Found]:
    """An input, output or state in fp16 or a smaller type whose last axis does not fill 64 bytes."""
    roles = (("input", function.inputs), ("state", function.states), ("output", function.outputs))
    for role, values in roles:
        for name, value in values.items():
            if value.dtype not in ENGINE_TYPES or not value.shape or value.shape[-1] == RUN_TIME:
                continue
            used = value.shape[-1] * dtypes.BY_NAME[value.dtype].bits // 8
            padded = -(-used // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            if padded != used:
                times = f"{padded / used:.3g} times the memory"
                text = f"{role} of type {value.dtype}, last axis {value.shape[-1]}: {times}"
                yield Found(text, name=name, value=value)


@function_rule(
    "inner-last-axis",
    "info",
    title="A last axis of 1 inside the graph may be padded to 64 bytes as well",
    source=f"{APPLE_RULES}; stated for buffers, what the compiler does inside is not",
    mend="keep positions or channels on the last axis",
)
def inner_last_axis(function: FunctionView) -> Iterator[Found]:
    """A tensor in fp16 or a smaller type with a last axis of 1 and more than one element, not an output."""
    for op in function.computed_ops:
        for value in op.outputs:
            if value.dtype in ENGINE_TYPES and value.shape[-1:] == (1,) and value.elements > 1:
                if not function.is_output(value):
                    yield Found("last axis of 1", op, value=value)
                break


@function_rule(
    "rank-above-5",
    "fatal",
    title="The Neural Engine takes tensors of at most rank 5",
    source=APPLE_RULES,
    mend="merge axes, so that no tensor has more than 4",
)
def rank_above_5(function: FunctionView) -> Iterator[Found]:
    """A computed tensor of rank 6 or more."""
    for op, value in _results(function):
        if len(value.shape) > MAX_RANK:
            yield Found(f"{op.type} of rank {len(value.shape)}", op, value=value)


@function_rule(
    "rank-5",
    "info",
    title="Core ML sometimes fails at run time on attention with tensors of rank 5",
    source="ExecuTorch `static_attention.py`, a comment (code)",
    mend="keep attention at rank 4",
)
def rank_5(function: FunctionView) -> Iterator[Found]:
    """`matmul`, `einsum` or `softmax` with a tensor of rank 5."""
    for op in function.of_type("matmul", "einsum", "softmax"):
        ranks = [len(value.shape) for value in (*op.computed(), op.out)]
        if MAX_RANK in ranks:
            yield Found(f"{op.type} on a tensor of rank 5", op)


@function_rule(
    "run-time-shape",
    "silent",
    title="A range of input sizes runs on the Neural Engine for the default shape only",
    source=f"Apple engineer, developer.apple.com/forums/thread/724930; {APPLE_RULES}: shapes are fully static",
    mend="one function for each shape, or enumerated shapes; pad the input",
)
def run_time_shape(function: FunctionView) -> Iterator[Found]:
    """An input whose size is a range, or is not known before the program runs."""
    for name, value in function.inputs.items():
        kind = function.flexible.get(name)
        if kind == "range" or (kind is None and RUN_TIME in value.shape):
            yield Found(f"input of shape ({', '.join(map(_size, value.shape))})", name=name, value=value)


@function_rule(
    "enumerated-shapes",
    "info",
    title="Enumerated shapes can each run on the Neural Engine, with exceptions",
    source="Apple engineer, developer.apple.com/forums/thread/724930; coremltools#1909: not with a layer norm",
    mend="one function for each shape",
)
def enumerated_shapes(function: FunctionView) -> Iterator[Found]:
    """An input with enumerated shapes."""
    for name, kind in function.flexible.items():
        if kind == "enumerated":
            yield Found("input with enumerated shapes", name=name, value=function.inputs.get(name))


@function_rule(
    "last-axis-copy",
    "perf",
    title="Concat, transpose and reshape that touch the last axis copy memory",
    source=APPLE_RULES,
    mend="keep positions last from input to output and move the other axes only",
)
def last_axis_copy(function: FunctionView) -> Iterator[Found]:
    """`concat` along the last axis, `transpose` that moves it, `reshape` that changes its size."""
    for op in function.of_type("concat", "transpose", "reshape"):
        if op.out.is_float and _moves_last_axis(op):
            yield Found(f"{op.type} touches the last axis", op)


def _moves_last_axis(op: Op) -> bool:
    rank = len(op.out.shape)
    if rank == 0 or op.out.elements == 1:
        return False
    if op.type == "concat":
        return op.axis() == rank - 1
    x = op.input("x")
    if x is None or not x.shape:
        return False
    if op.type == "transpose":
        order = [axis % rank for axis in op.param("perm", range(rank))]
        moved = [axis for axis in order if x.shape[axis] != 1]
        return order[-1] != rank - 1 and moved != sorted(moved)
    return x.shape[-1] != op.out.shape[-1]


def _results(function: FunctionView) -> Iterator[tuple[Op, Value]]:
    for op in function.computed_ops:
        for value in op.outputs:
            yield op, value


def _size(size: int) -> str:
    return "?" if size == RUN_TIME else str(size)
