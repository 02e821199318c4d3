"""Cases of the rules on layout and sizes."""

from lint_case import Case
from lint_programs import Example, conv, half, mb

SEQUENCE = {"x": (1, 64, 64)}
RANK_5 = {"x": (1, 2, 2, 32, 64)}


def _layers(number):
    def body(inputs):
        x = inputs["x"]
        for _ in range(number):
            x = mb.silu(x=mb.softmax(x=conv(x), axis=1))
        return x

    return body


LAYOUT = [
    Case(
        "linear-op",
        "linear instead of a 1x1 conv",
        Example(lambda i: mb.linear(x=i["x"], weight=half(32, 64)), SEQUENCE),
        Example(lambda i: mb.matmul(x=conv(i["x"]), y=i["x"], transpose_y=True)),
    ),
    Case(
        "linear-op",
        "matmul with a constant operand instead of a 1x1 conv",
        Example(lambda i: mb.matmul(x=i["x"], y=half(64, 32)), SEQUENCE),
        Example(
            lambda i: mb.einsum(values=(i["x"], i["y"]), equation="nchw,nwhu->nchu"),
            {"x": (1, 64, 1, 64), "y": (1, 64, 1, 32)},
        ),
    ),
    Case(
        "conv-rank",
        "conv on a tensor of rank 3",
        Example(lambda i: mb.conv(x=i["x"], weight=half(64, 64, 1)), SEQUENCE),
        Example(lambda i: conv(i["x"])),
    ),
    Case(
        "io-last-axis",
        "input of type fp16, last axis 1: 32 times the memory",
        Example(lambda i: mb.relu(x=mb.reshape(x=i["x"], shape=[1, 1, 1, 64])), {"x": (1, 64, 1, 1)}),
        Example(lambda i: mb.relu(x=i["x"])),
    ),
    Case(
        "inner-last-axis",
        "last axis of 1",
        Example(
            lambda i: mb.relu(x=mb.transpose(x=mb.transpose(x=i["x"], perm=[0, 1, 3, 2]), perm=[0, 1, 3, 2]))
        ),
        Example(lambda i: mb.transpose(x=i["x"], perm=[0, 1, 3, 2])),
    ),
    Case(
        "rank-above-5",
        "reshape of rank 6",
        Example(lambda i: mb.reshape(x=i["x"], shape=[1, 2, 2, 2, 8, 64])),
        Example(lambda i: mb.reshape(x=i["x"], shape=[1, 2, 2, 16, 64])),
    ),
    Case(
        "rank-5",
        "matmul on a tensor of rank 5",
        Example(lambda i: mb.matmul(x=i["x"], y=i["x"], transpose_y=True), RANK_5),
        Example(lambda i: mb.relu(x=i["x"]), RANK_5),
    ),
    Case(
        "last-axis-copy",
        "transpose touches the last axis",
        Example(lambda i: mb.transpose(x=i["x"], perm=[0, 3, 2, 1])),
        Example(lambda i: mb.transpose(x=mb.reshape(x=i["x"], shape=[1, 4, 16, 64]), perm=[0, 2, 1, 3])),
    ),
    Case(
        "last-axis-copy",
        "concat touches the last axis",
        Example(lambda i: mb.concat(values=(i["x"], mb.relu(x=i["x"])), axis=-1)),
        Example(lambda i: mb.concat(values=(i["n"], i["n"]), axis=-1), {"n": (2,)}, {"n": "int32"}),
    ),
    Case(
        "last-axis-copy",
        "concat touches the last axis",
        Example(lambda i: mb.concat(values=(i["x"], mb.relu(x=i["x"])), axis=-1)),
        Example(lambda i: mb.concat(values=(i["x"], mb.relu(x=i["x"])), axis=1)),
    ),
    Case(
        "last-axis-copy",
        "reshape touches the last axis",
        Example(lambda i: mb.reshape(x=i["x"], shape=[1, 64, 8, 8])),
        Example(lambda i: mb.transpose(x=i["x"], perm=[0, 2, 1, 3])),
    ),
    Case(
        "axis-limit",
        "channel axis 1 of 17000",
        Example(lambda i: mb.reduce_max(x=conv(i["x"], 17000), axes=[1]), {"x": (1, 8, 1, 32)}),
        Example(lambda i: mb.reduce_max(x=conv(i["x"], 16384), axes=[1]), {"x": (1, 8, 1, 32)}),
    ),
    Case(
        "many-layers",
        "about 16 layers, 48 ops",
        Example(_layers(16)),
        Example(_layers(15)),
    ),
]
