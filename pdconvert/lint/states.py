"""Rules on states."""

from collections.abc import Iterator

from pdconvert.executors.mil.view import FunctionView, Op, Value, reads_state, walk_back
from pdconvert.lint.paths import LAYOUT_OPS
from pdconvert.lint.rule import Found, function_rule
from pdconvert.lint.targets import CHIPS, STATES

MAX_STATES = 2
STATE_STEP = 32


@function_rule(
    "state-count",
    "fatal",
    title="Programs with more than two states compiled and then failed to run",
    source="CoreML-LLM: three failed at predict (documentation); SqueezeBits: 56 had to become 2 (second-hand)",
    mend="join the states of all layers into one for keys and one for values, or pass the cache as input and output",
)
def state_count(function: FunctionView) -> Iterator[Found]:
    """More than two states."""
    if len(function.states) > MAX_STATES:
        yield Found(f"{len(function.states)} states", name=next(iter(function.states)))


@function_rule(
    "state-shapes",
    "fatal",
    title="States of unlike shapes fail",
    source=STATES,
    mend="give all states one shape, padded if need be",
    chips=tuple(chip.name for chip in CHIPS if chip.equal_states.value),
)
def state_shapes(function: FunctionView) -> Iterator[Found]:
    """States that differ in shape."""
    shapes = sorted({value.shape for value in function.states.values()})
    if len(shapes) > 1:
        yield Found(
            f"states of {len(shapes)} shapes: {', '.join(map(str, shapes))}", name=next(iter(function.states))
        )


@function_rule(
    "state-axis",
    "fatal",
    title="A state with an axis of unsuited size fails on the Neural Engine",
    source="coremltools#2631: 270 fails and 256 works on M4 (issue); (20, 8, 512, 80) fails until 80 is padded to 128"
    " (second-hand)",
    mend="pad every axis but the first to a multiple of 32 or a power of two",
)
def state_axis(function: FunctionView) -> Iterator[Found]:
    """A state with an axis, other than the first, whose size is neither a multiple of 32 nor a power of two, or a last
    axis that is not a multiple of 32."""
    for name, value in function.states.items():
        for axis, size in enumerate(value.shape):
            last = axis == len(value.shape) - 1
            fits = size % STATE_STEP == 0 or (not last and size & (size - 1) == 0)
            if (axis > 0 or last) and not fits:
                yield Found(f"state with axis {axis} of {size}", name=name, value=value)


@function_rule(
    "shifted-cache",
    "fatal",
    title="A state shifted by one row, in a program with a tied head, is refused by the Neural Engine compiler (-14)",
    source="CoreML-LLM `DECODE_STATE_LAYOUTS.md` (documentation); without the tied head others use the shift",
    mend="write the new row by a blend with a mask, or keep the embedding out of the program",
)
def shifted_cache(function: FunctionView) -> Iterator[Found]:
    """`concat` of a state's later rows with new ones, where one weight is both gathered from and multiplied by."""
    if not _has_tied_head(function):
        return
    for op in function.of_type("concat"):
        values = op.inputs.get("values", ())
        if len(values) > 1 and _is_shifted_state(values[0], op):
            yield Found("state without its first rows, followed by new rows", op)


def _is_shifted_state(value: Value, joined: Op) -> bool:
    op = value.maker
    if op is None or op.type != "slice_by_index":
        return False
    begin, axis = op.param("begin"), joined.axis()
    mask = op.param("begin_mask") or [False] * len(value.shape)
    x = op.input("x")
    if x is None or begin is None or len(begin) <= axis or mask[axis] or begin[axis] <= 0:
        return False
    return reads_state(x) or any(
        reads_state(maker.out) for maker in walk_back(x, LAYOUT_OPS, 8) if maker.outputs
    )


def _has_tied_head(function: FunctionView) -> bool:
    def records(name: str, *types: str) -> set[tuple[str, int]]:
        values = [value for op in function.of_type(*types) for value in op.inputs.get(name, ())]
        return {record for value in values if value.is_constant for record in value.records()}

    multiplied = records("weight", "conv", "linear") | records("y", "matmul") | records("x", "matmul")
    return bool(records("x", "gather") & multiplied)
