"""Cases of the rules on attention and the head."""

from lint_case import Case
from lint_programs import Example, conv, half, mb

HEADS = {"q": (1, 4, 32, 64), "k": (1, 4, 32, 64), "v": (1, 4, 32, 64)}
SHARED = {"q": (1, 4, 32, 64), "k": (1, 1, 32, 64), "v": (1, 1, 32, 64)}
ONE_HEAD = dict.fromkeys(HEADS, (1, 1, 32, 64))


def _eager(inputs):
    weights = mb.softmax(x=mb.matmul(x=inputs["k"], y=inputs["q"], transpose_x=True), axis=2)
    return mb.matmul(x=inputs["v"], y=weights)


def _tiled(inputs):
    return _eager({"q": inputs["q"]} | {n: mb.tile(x=inputs[n], reps=[1, 4, 1, 1]) for n in "kv"})


def _joined(inputs):
    return _eager({"q": inputs["q"]} | {n: mb.concat(values=[inputs[n]] * 4, axis=1) for n in "kv"})


def _fused(inputs):
    return mb.scaled_dot_product_attention(query=inputs["q"], key=inputs["k"], value=inputs["v"])


ATTENTION = [
    Case(
        "softmax-last-axis",
        "softmax along the last axis",
        Example(lambda i: mb.softmax(x=i["x"], axis=-1)),
        Example(lambda i: mb.softmax(x=i["x"], axis=1)),
    ),
    Case(
        "heads-in-one-product",
        "matmul over 4 heads at once",
        Example(_eager, HEADS),
        Example(_eager, ONE_HEAD),
        2,
    ),
    Case("fused-attention", "fused attention over 32 keys", Example(_fused, HEADS), Example(_eager, HEADS)),
    Case(
        "repeated-keys",
        "tile repeats a tensor 4 times for a product",
        Example(_tiled, SHARED),
        Example(_eager, SHARED),
        2,
    ),
    Case(
        "repeated-keys",
        "concat repeats a tensor 4 times for a product",
        Example(_joined, SHARED),
        Example(_eager, HEADS),
        2,
    ),
    Case(
        "rope-in-graph",
        "cos computed in fp16",
        Example(lambda i: mb.cos(x=i["x"])),
        Example(lambda i: mb.mul(x=i["x"], y=half(64))),
    ),
    Case(
        "large-head",
        "conv with 16384 output channels",
        Example(lambda i: conv(i["x"], 16384), {"x": (1, 8, 1, 32)}),
        Example(lambda i: conv(i["x"], 6144), {"x": (1, 8, 1, 32)}),
    ),
    Case(
        "all-logits",
        "output of 32 rows with 16384 channels",
        Example(lambda i: conv(i["x"], 16384), {"x": (1, 8, 1, 32)}),
        Example(lambda i: conv(i["x"], 16384), {"x": (1, 8, 1, 1)}),
    ),
]
