"""Rules on indexing: gathers, scatters, slices, and integer arithmetic."""

from collections.abc import Iterator

from pdconvert.executors.mil.values import RUN_TIME
from pdconvert.executors.mil.view import FunctionView, Op, walk_back
from pdconvert.lint.rule import Found, function_rule
from pdconvert.lint.targets import CHIPS, SLICES

ANEMLL_NOTES = "Anemll, notes for contributors (documentation)"
UINT16_ROWS = 65536
GATHERS = ("gather", "gather_along_axis", "gather_nd")
SCATTERS = ("scatter", "scatter_along_axis", "scatter_nd")
_BOUNDS = {
    "slice_by_index": ("begin", "end", "stride"),
    "slice_by_size": ("begin", "size"),
    "slice_update": ("begin", "end", "stride"),
}
_ARITHMETIC = ("add", "sub", "mul", "floor_div", "mod", "maximum", "minimum", "range_1d", "cumsum", "select")
_COMPARISONS = ("greater", "greater_equal", "less", "less_equal", "equal", "not_equal")


@function_rule(
    "gather",
    "perf",
    title="Gathers were seen to run on the CPU, which cuts the graph there",
    source="more-ane-transformers notes (documentation): tables of at most 32768 rows at best; Apple: position tables"
    " are inputs",
    mend="look rows up on the host and make them an input (prefill.embedding: host; pass rope_as_input)",
)
def gather(function: FunctionView) -> Iterator[Found]:
    """`gather` and its kin with computed indices or a computed table."""
    for op in function.of_type(*GATHERS):
        table = op.input("x")
        makers = walk_back(table, frozenset({"cast"}), 3) if table is not None else ()
        if all(maker.type != "shape" for maker in makers):  # a size is no row of a table
            yield Found(f"{op.type} from {_table(op)}", op)


@function_rule(
    "gather-ids",
    "silent",
    title="Core ML may narrow the indices of a gather to 16 bits, which cannot name all rows of a large table",
    source="ExecuTorch#7616: ids became uint16 on the Neural Engine (pull request)",
    mend="look rows up on the host (prefill.embedding: host)",
)
def gather_ids(function: FunctionView) -> Iterator[Found]:
    """`gather` from a table of more than 65536 rows."""
    for op in function.of_type("gather"):
        table = op.input("x")
        if table is None or not table.shape:
            continue
        rows = table.shape[op.param("axis", 0) % len(table.shape)]
        if rows > UINT16_ROWS:
            yield Found(f"gather from {rows} rows", op, value=table)


@function_rule(
    "slice-saturation",
    "silent",
    title="A slice of the last axis that does not begin at 0 turns values beyond 4094 into infinity",
    source=SLICES,
    mend="slice another axis, for instance the channel axis (pass eager_gqa_attention), or from 0",
    chips=tuple(chip.name for chip in CHIPS if chip.slice_saturates.value),
)
def slice_saturation(function: FunctionView) -> Iterator[Found]:
    """`slice_by_index`, `slice_by_size` or `split` that reads the last axis from a place other than 0."""
    for op in function.of_type("slice_by_index", "slice_by_size", "split"):
        x = op.input("x")
        if x is None or not x.shape or not x.is_float:
            continue
        if op.type == "split":
            axis = op.param("axis", -1)
            if len(op.outputs) > 1 and axis % len(x.shape) == len(x.shape) - 1:
                yield Found(f"split of the last axis in {len(op.outputs)}", op)
            continue
        begin = _last_begin(op, x.shape[-1])
        if begin != 0:
            yield Found(
                f"{op.type} of the last axis from {'a run-time place' if begin is None else begin}", op
            )


@function_rule(
    "run-time-bounds",
    "fatal",
    title="The Neural Engine compiler refuses slices whose bounds are known only at run time",
    source=f"{ANEMLL_NOTES}: `Failed to retrieve parameter end`",
    mend="slice at fixed places; select by a mask that is an input",
)
def run_time_bounds(function: FunctionView) -> Iterator[Found]:
    """`slice_by_index`, `slice_by_size` or `slice_update` with computed bounds."""
    for op in function.of_type(*_BOUNDS):
        computed = [
            n for n in _BOUNDS[op.type] if any(not value.is_constant for value in op.inputs.get(n, ()))
        ]
        if computed:
            yield Found(f"{op.type} with {' and '.join(computed)} known at run time only", op)


@function_rule(
    "scatter",
    "fatal",
    title="The Neural Engine has no scatter",
    source=f"{ANEMLL_NOTES}; ANEForge (reverse-engineered)",
    mend="blend with a mask that is an input, or return new rows and let the host write them",
)
def scatter(function: FunctionView) -> Iterator[Found]:
    """`scatter` and its kin."""
    for op in function.of_type(*SCATTERS):
        yield Found(op.type, op)


@function_rule(
    "integer-ops",
    "perf",
    title="Positions and masks computed from integers keep part of the graph off the Neural Engine",
    source=f"{ANEMLL_NOTES}: comparisons and select on int32; its own models contain some",
    mend="compute positions and masks on the host and make them inputs",
)
def integer_ops(function: FunctionView) -> Iterator[Found]:
    """Arithmetic, comparison or selection with a computed int32 operand or result."""
    for op in function.of_type(*_ARITHMETIC, *_COMPARISONS):
        if any(v.dtype == "int32" for v in (*op.computed(), *op.outputs)):
            yield Found(f"{op.type} on int32", op)


def _last_begin(op: Op, size: int) -> int | None:
    """Where a slice begins on the last axis, None where that is computed."""
    mask = op.param("begin_mask") or [False]
    if op.type == "slice_by_index" and mask[-1]:
        return 0
    begin = op.input("begin")
    if begin is not None and begin.maker is not None and begin.maker.type == "concat":
        begin = begin.maker.inputs["values"][-1]  # joined of places of which only some are computed
    places = begin.python() if begin is not None else None
    last = places[-1] if isinstance(places, list) else places
    return last if last is None or last >= 0 or size == RUN_TIME else last + size


def _table(op: Op) -> str:
    table = op.input("x")
    if table is None or not table.is_constant:
        return "a computed tensor"
    return f"a constant of {'x'.join(map(str, table.shape))}"
