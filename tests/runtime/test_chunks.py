"""Which function takes which tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdconvert.errors import InputError
from pdconvert.runtime.chunks import plan_chunks, reach
from pdconvert.runtime.manifest import Function


def function(tokens: int, past: int = 0) -> Function:
    return Function(f"{tokens}+{past}", tokens, past, (), ())


LADDER = (function(128), function(128, 512), function(128, 1024), function(32, 512), function(1, 512))


@pytest.mark.parametrize(
    ("start", "tokens", "expected"),
    [
        (0, 1, ["32+512"]),
        (0, 100, ["128+0"]),
        (0, 128, ["128+0"]),
        (0, 129, ["128+0", "32+512"]),
        (0, 300, ["128+0", "128+512", "128+512"]),
        (512, 128, ["128+512"]),
        (513, 128, ["128+1024"]),
        (640, 20, ["128+1024"]),
    ],
)
def test_each_call_takes_the_function_that_costs_least(start, tokens, expected):
    assert [chunk.function.name for chunk in plan_chunks(LADDER, start, tokens)] == expected


def test_a_context_that_no_function_holds_is_refused():
    assert reach(LADDER) == 1152
    assert reach([function(128)]) == 128
    with pytest.raises(InputError, match="holds a context of 1152 tokens, and 1153 are needed"):
        plan_chunks(LADDER, 0, 1153)


@given(st.integers(0, 1024), st.integers(1, 400))
def test_chunks_cover_the_run_without_gap(start, tokens):
    if start + tokens > reach(LADDER) - 128:
        return
    position = start
    for chunk in plan_chunks(LADDER, start, tokens):
        assert chunk.start == position and 1 <= chunk.length <= chunk.function.tokens
        assert chunk.function.past >= position or position == 0
        position += chunk.length
    assert position == start + tokens
