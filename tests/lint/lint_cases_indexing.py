"""Cases of the rules on indexing and on states."""

import numpy as np
from lint_case import Case
from lint_programs import Example, half, mb

IDS = {"ids": (1, 64)}
INTS = {"dtypes": {"ids": "int32"}}
STATE = (1, 4, 64, 64)


def _rows(rows):
    return lambda i: mb.gather(x=half(rows, 4), indices=i["ids"], axis=0)


def _slice(axis, start):
    def body(inputs):
        x = inputs["x"]
        begin, end = [0] * 4, list(x.shape)
        begin[axis], end[axis] = start, start + 16
        return mb.slice_by_index(x=x, begin=begin, end=end)

    return body


def _slice_at(inputs):
    begin = mb.concat(values=[np.int32([0, 0, 0]), inputs["place"]], axis=0)
    return mb.slice_by_size(x=inputs["x"], begin=begin, size=[1, 64, 1, 32])


def _slice_channels_at(inputs):
    begin = mb.concat(values=[np.int32([0]), inputs["place"], np.int32([0, 0])], axis=0)
    return mb.slice_by_size(x=inputs["x"], begin=begin, size=[1, 32, 1, 64])


def _last_size(inputs):
    """A slice of a shape, which is integers."""
    return mb.slice_by_index(x=inputs["place"], begin=[1], end=[2])


def _touch(states):
    """Add the input to each state."""

    def body(inputs):
        return [
            mb.coreml_update_state(
                state=inputs[name], value=mb.add(x=mb.read_state(input=inputs[name]), y=inputs["x"])
            )
            for name in states
        ]

    return body


def _states(**shapes):
    return Example(_touch(shapes), {"x": (1,)}, states=shapes)


def _shift(tied):
    """Shift a cache by one row and append a new one, with an embedding that is the head as well or is not."""

    def body(inputs):
        table = mb.const(val=half(32, 64))
        head = table if tied else mb.const(val=half(32, 64, seed=1))
        row = mb.gather(x=table, indices=inputs["ids"], axis=0)
        cache = mb.read_state(input=inputs["cache"])
        rest = mb.slice_by_index(x=cache, begin=[0, 1, 0], end=[1, 64, 64])
        new = mb.coreml_update_state(
            state=inputs["cache"], value=mb.concat(values=[rest, mb.reshape(x=row, shape=[1, 1, 64])], axis=1)
        )
        return mb.linear(x=new, weight=head)

    return Example(body, {"ids": (1, 1)}, INTS["dtypes"], {"cache": (1, 64, 64)})


INDEXING = [
    Case(
        "gather",
        "gather from a constant of 32x4",
        Example(_rows(32), IDS, **INTS),
        Example(lambda i: mb.relu(x=i["x"])),
    ),
    Case(
        "gather-ids",
        "gather from 65537 rows",
        Example(_rows(65537), IDS, **INTS),
        Example(_rows(65536), IDS, **INTS),
    ),
    Case(
        "slice-saturation",
        "slice_by_index of the last axis from 16",
        Example(_slice(3, 16)),
        Example(_slice(1, 16)),
    ),
    Case(
        "slice-saturation",
        "split of the last axis in 2",
        Example(lambda i: mb.split(x=i["x"], num_splits=2, axis=-1)),
        Example(lambda i: mb.split(x=i["x"], num_splits=2, axis=1)),
    ),
    Case(
        "slice-saturation",
        "slice_by_size of the last axis from a run-time place",
        Example(_slice_at, {"x": (1, 64, 1, 64), "place": (1,)}, {"place": "int32"}),
        Example(lambda i: mb.slice_by_size(x=i["x"], begin=[0, 8, 0, 0], size=[1, 8, 1, 64])),
    ),
    Case(
        "slice-saturation",
        "slice_by_size of the last axis from a run-time place",
        Example(_slice_at, {"x": (1, 64, 1, 64), "place": (1,)}, {"place": "int32"}),
        Example(_slice_channels_at, {"x": (1, 64, 1, 64), "place": (1,)}, {"place": "int32"}),
    ),
    Case(
        "slice-saturation",
        "slice_by_index of the last axis from 16",
        Example(_slice(3, 16)),
        Example(_last_size, {"place": (4,)}, {"place": "int32"}),
    ),
    Case(
        "run-time-bounds",
        "slice_by_size with begin known at run time only",
        Example(_slice_at, {"x": (1, 64, 1, 64), "place": (1,)}, {"place": "int32"}),
        Example(_slice(3, 16)),
    ),
    Case(
        "scatter",
        "scatter",
        Example(
            lambda i: mb.scatter(data=half(8, 64), indices=i["ids"], updates=half(1, 64), axis=0),
            {"ids": (1,)},
            **INTS,
        ),
        Example(_rows(8), IDS, **INTS),
    ),
    Case(
        "integer-ops",
        "greater_equal on int32",
        Example(lambda i: mb.cast(x=mb.greater_equal(x=i["ids"], y=np.int32(3)), dtype="fp16"), IDS, **INTS),
        Example(lambda i: mb.cast(x=mb.greater_equal(x=i["x"], y=np.float16(3)), dtype="fp16")),
    ),
    Case("state-count", "3 states", _states(a=STATE, b=STATE, c=STATE), _states(a=STATE, b=STATE)),
    Case(
        "state-shapes",
        "states of 2 shapes: (1, 2, 64, 64), (1, 4, 64, 64)",
        _states(a=STATE, b=(1, 2, 64, 64)),
        _states(a=STATE, b=STATE),
    ),
    Case("state-axis", "state with axis 3 of 80", _states(a=(20, 8, 512, 80)), _states(a=(20, 8, 512, 128))),
    Case("state-axis", "state with axis 2 of 270", _states(a=(1, 8, 270, 64)), _states(a=(3, 8, 256, 64))),
    Case(
        "shifted-cache",
        "state without its first rows, followed by new rows",
        _shift(tied=True),
        _shift(tied=False),
    ),
]
