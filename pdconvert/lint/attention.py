"""Rules on attention, position embedding and the head."""

from collections.abc import Iterator

from pdconvert.executors.mil.values import RUN_TIME
from pdconvert.executors.mil.view import FunctionView
from pdconvert.lint.layout import APPLE_RULES
from pdconvert.lint.paths import attention_products, feeds_product
from pdconvert.lint.rule import Found, function_rule

LARGE_HEAD = 16384
"""Output channels from which projects split a head; also the axis limit of older chips."""


@function_rule(
    "softmax-last-axis",
    "info",
    title="Apple runs the softmax along the key axis of (1, keys, heads, queries); others along the last axis",
    source="Apple, coreai-models `sdpa.py`, against Anemll and ExecuTorch `static_attention.py` (code)",
    mend="compare both orders on the device",
)
def softmax_last_axis(function: FunctionView) -> Iterator[Found]:
    """`softmax` along the last axis."""
    for op in function.of_type("softmax"):
        if op.axis() == len(op.out.shape) - 1:
            yield Found("softmax along the last axis", op)


@function_rule(
    "heads-in-one-product",
    "info",
    title="Published Neural Engine graphs compute attention one head at a time",
    source="Apple, ml-ane-transformers, principle 3; Qualcomm ai-hub-models (code); speed not measured here",
    mend="compare with single heads on the device (eager_gqa_attention: {heads: single})",
)
def heads_in_one_product(function: FunctionView) -> Iterator[Found]:
    """A product of two computed tensors next to a softmax, with more than one head in its leading axes."""
    for op in attention_products(function):
        heads = 1
        for size in op.out.shape[:-2]:
            heads *= max(size, 1)
        if heads > 1:
            yield Found(f"{op.type} over {heads} heads at once", op)


@function_rule(
    "fused-attention",
    "silent",
    title="Fused attention gives wrong numbers on the Neural Engine in some releases",
    source="NVMAI: NaN and infinity on M3 from 2048 keys (documentation); ExecuTorch#15833, #16057, #16144: wrong"
    " numbers on iOS 26 until it was taken apart (issues)",
    mend="write matmul, add, softmax, matmul (pass eager_gqa_attention)",
)
def fused_attention(function: FunctionView) -> Iterator[Found]:
    """`scaled_dot_product_attention`."""
    for op in function.of_type("scaled_dot_product_attention"):
        key = op.input("key")
        keys = key.shape[-2] if key is not None and len(key.shape) > 1 else RUN_TIME
        yield Found(f"fused attention over {'?' if keys == RUN_TIME else keys} keys", op)


@function_rule(
    "repeated-keys",
    "perf",
    title="Repeating keys and values for grouped queries costs memory traffic",
    source="ExecuTorch#16144: 10 to 15 % faster without the repeat (measured)",
    mend="multiply each group by its own key head and let it broadcast (pass eager_gqa_attention)",
)
def repeated_keys(function: FunctionView) -> Iterator[Found]:
    """`tile`, or `concat` or `stack` of one tensor with itself, whose result is an operand of a product of tensors."""
    for op in function.of_type("tile", "concat", "stack"):
        if op.type == "tile":
            repeats = max(op.param("reps", [1]), default=1)
        else:
            values = op.inputs.get("values", ())
            repeats = max((sum(one is other for other in values) for one in values), default=1)
        if repeats > 1 and feeds_product(op.out):
            yield Found(f"{op.type} repeats a tensor {repeats} times for a product", op)


@function_rule(
    "rope-in-graph",
    "silent",
    title="Angles computed in fp16 are wrong for positions beyond about 2048",
    source=f"{APPLE_RULES}; 0seba/coremlmodels: cos and sin are inputs there (code)",
    mend="compute cos and sin on the host in float64 and make them inputs (pass rope_as_input)",
)
def rope_in_graph(function: FunctionView) -> Iterator[Found]:
    """`sin` or `cos` of a computed fp16 tensor."""
    for op in function.of_type("sin", "cos"):
        if op.out.dtype == "fp16":
            yield Found(f"{op.type} computed in fp16", op)


@function_rule(
    "large-head",
    "info",
    title="Projects split a large head, and measure opposite effects of it",
    source="Anemll: 16 parts; 0seba/coremlmodels: parts of 6144 (code); CoreML-LLM, notes of 2026-04-28: 16 parts were"
    " 4.6 % slower on A19 with 262144 rows; more-ane-transformers saw no gain",
    mend="measure both; for prefill leave logits out",
)
def large_head(function: FunctionView) -> Iterator[Found]:
    """A projection with at least 16384 output channels."""
    for op in function.of_type("conv", "linear"):
        channels = op.out.shape[1 if op.type == "conv" else -1]
        if channels >= LARGE_HEAD:
            yield Found(f"{op.type} with {channels} output channels", op)


@function_rule(
    "all-logits",
    "perf",
    title="A prefill needs the logits of its last row at most",
    source="Apple, coreai-models, the function `prompt_opt` (code)",
    mend="select the row before the head, or leave the head out (prefill.outputs: kv)",
)
def all_logits(function: FunctionView) -> Iterator[Found]:
    """An output with at least 16384 channels for more than one row."""
    for name, value in function.outputs.items():
        if not value.shape or RUN_TIME in value.shape:
            continue
        channels = max(value.shape)
        rows = value.elements // channels
        if channels >= LARGE_HEAD and rows > 1 and value.maker is not None:
            yield Found(
                f"output of {rows} rows with {channels} channels", value.maker, name=name, value=value
            )
