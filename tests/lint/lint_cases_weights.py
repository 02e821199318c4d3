"""Cases of the rules on weights."""

import numpy as np
from lint_case import Case
from lint_programs import Example, codes, half, mb, types

INT4, UINT4 = types.np_int4_dtype, types.np_uint4_dtype


def _scaled(*scales, dtype=INT4):
    def body(inputs):
        weight = mb.constexpr_blockwise_shift_scale(data=codes(dtype, 64, 64, 1, 1), scale=half(*scales))
        return mb.conv(x=inputs["x"], weight=weight)

    return body


def _sparse(*scales):
    """Every second weight, with scales."""

    def body(inputs):
        mask = (np.arange(64 * 64) % 2).reshape(64, 64, 1, 1).astype(types.np_uint1_dtype)
        mask, values = mb.constexpr_sparse_blockwise_shift_scale(
            data_mask=mask, nonzero_data=codes(np.int8, 64 * 32), scale=half(*scales)
        )
        return mb.conv(x=inputs["x"], weight=mb.constexpr_sparse_to_dense(nonzero_data=values, mask=mask))

    return body


def _scaled_matmul(*scales):
    def body(inputs):
        weight = mb.constexpr_blockwise_shift_scale(data=codes(INT4, 64, 64), scale=half(*scales))
        return mb.matmul(x=inputs["x"], y=weight)

    return body


def _tables(*groups, scale=None):
    def body(inputs):
        lut = half(*groups, 16, 1)
        weight = mb.constexpr_lut_to_dense(indices=codes(UINT4, 64, 64, 1, 1), lut=lut)
        if scale:
            weight = mb.constexpr_blockwise_shift_scale(data=weight, scale=half(*scale))
        return mb.conv(x=inputs["x"], weight=weight)

    return body


def _coded_tables(scales, *groups):
    """A table of 8-bit entries with scales, as coremltools 9.0 saves a table with a scale per output channel."""

    def body(inputs):
        shape = (*groups, 16, 1)
        lut = mb.constexpr_blockwise_shift_scale(data=codes(np.int8, *shape), scale=half(*scales))
        weight = mb.constexpr_lut_to_dense(indices=codes(UINT4, 64, 64, 1, 1), lut=lut)
        return mb.conv(x=inputs["x"], weight=weight)

    return body


def _old_table(inputs):
    weight = mb.constexpr_lut_to_dense(
        indices=codes(np.uint8, 2048), lut=half(16), shape=np.uint32([64, 64, 1, 1])
    )
    return mb.conv(x=inputs["x"], weight=weight)


WEIGHTS = [
    Case(
        "blockwise-weights",
        "weight with one scale for each block of 1x32x1x1",
        Example(_scaled(64, 2, 1, 1)),
        Example(_scaled(64, 1, 1, 1)),
    ),
    Case(
        "blockwise-weights",
        "weight with one scale for each block of 1x32x1x1",
        Example(_sparse(64, 2, 1, 1)),
        Example(_sparse(64, 1, 1, 1)),
    ),
    Case(
        "blockwise-weights",
        "weight with one scale for each block of 1x64",
        Example(_scaled_matmul(64, 1), {"x": (1, 64, 64)}),
        Example(_scaled_matmul(1, 64), {"x": (1, 64, 64)}),
    ),
    Case(
        "lut-groups",
        "one table for 4 output channels",
        Example(_tables(16, 1, 1, 1)),
        Example(_tables(8, 1, 1, 1)),
    ),
    Case(
        "lut-groups",
        "tables for groups of axis 1, a form that was not measured",
        Example(_tables(1, 4, 1, 1)),
        Example(_old_table, system="iOS16"),
    ),
    Case("int8-folds", "8-bit weight", Example(_sparse(64, 1, 1, 1)), Example(_tables(8, 1, 1, 1))),
    Case(
        "int8-folds",
        "8-bit weight",
        Example(_scaled(64, 1, 1, 1, dtype=np.int8)),
        Example(_scaled(64, 1, 1, 1)),
    ),
    Case(
        "int8-folds",
        "8-bit weight",
        Example(_scaled(64, 1, 1, 1, dtype=np.int8)),
        Example(_coded_tables((1, 1, 1, 1, 1, 1), 8, 1, 1, 1)),
    ),
    Case(
        "blockwise-weights",
        "weight with one scale for each block of 1x32x1x1",
        Example(_scaled(64, 2, 1, 1)),
        Example(_coded_tables((1, 1, 1, 1, 16, 1), 1, 1, 1, 1)),
    ),
    Case(
        "scaled-palette",
        "table with scales",
        Example(_coded_tables((64, 1, 1, 1, 1, 1), 64, 1, 1, 1)),
        Example(_coded_tables((1, 1, 1, 1, 1, 1), 1, 1, 1, 1)),
    ),
    Case(
        "palette-ios18",
        "weight in tables, form of iOS 18",
        Example(_tables(1, 1, 1, 1)),
        Example(_old_table, system="iOS16"),
    ),
    Case(
        "scaled-palette",
        "table with a scale",
        Example(_tables(8, 1, 1, 1, scale=(64, 1, 1, 1))),
        Example(_tables(8, 1, 1, 1)),
    ),
]
