"""The three layouts of K and V: what lies where, and conversions that undo each other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdconvert.runtime.handoff import KeysValues
from pdconvert.runtime.layouts import (
    LAYOUTS,
    graph_to_native,
    native_to_graph,
    native_to_pd,
    pack,
    packed_shape,
    pd_to_native,
    unpack,
)

SIZES = st.tuples(*[st.integers(1, 5)] * 3, st.integers(0, 5))
"""Layers, KV heads, channels, tokens."""


def numbered(layers: int, heads: int, dim: int, tokens: int) -> tuple[np.ndarray, ...]:
    """Native arrays in which every element has its own value."""
    values = np.arange(layers * heads * tokens * dim, dtype=np.float16)
    return tuple(values.reshape(layers, 1, heads, tokens, dim))


def test_every_element_is_where_the_table_says():
    layers, heads, dim, tokens = 3, 2, 4, 5
    native = numbered(layers, heads, dim, tokens)
    graph, pd, file = native_to_graph(native), native_to_pd(native), pack(native, "native")
    for layer, head, token, channel in np.ndindex(layers, heads, tokens, dim):
        value = native[layer][0, head, token, channel]
        assert graph[0, layer * heads + head, channel, token] == value
        assert pd[0, layer * tokens + token, head, channel] == value
        assert file[layer, head, token, channel] == value


@given(SIZES)
def test_conversions_undo_each_other(sizes):
    layers, heads, dim, tokens = sizes
    native = numbered(*sizes)
    for layout in LAYOUTS:
        packed = pack(native, layout)
        assert packed.shape == packed_shape(layout, layers, heads, dim, tokens)
        assert packed.flags.c_contiguous
        assert packed.dtype == np.float16
        again = unpack(packed, layout, layers)
        assert len(again) == layers
        for before, after in zip(native, again, strict=True):
            np.testing.assert_array_equal(before, after)
            assert after.flags.c_contiguous
            assert not np.shares_memory(packed, after)
        np.testing.assert_array_equal(pack(again, layout), packed)


@given(SIZES)
def test_the_graphs_layout_is_that_of_the_hand_off(sizes):
    native = numbered(*sizes)
    graph = native_to_graph(native)
    kv = KeysValues.from_graph(graph, graph, sizes[0], sizes[3], "rotated")
    for ours, theirs in zip(native, kv.keys, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(kv.graph_keys(), graph)


@pytest.mark.parametrize("convert", [graph_to_native, pd_to_native])
def test_rows_that_are_no_whole_layers_are_refused(convert):
    with pytest.raises(ValueError, match="7 rows are not a whole number for each of 2 layers"):
        convert(np.zeros((1, 7, 4, 4), np.float16), 2)


@pytest.mark.parametrize("convert", [graph_to_native, pd_to_native])
def test_a_batch_is_refused(convert):
    with pytest.raises(ValueError, match="reshape"):
        convert(np.zeros((2, 4, 4, 4), np.float16), 2)
