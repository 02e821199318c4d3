"""Constants that the ops of a function share."""

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Function, Program

from pdconvert.lowering.builder import CONV_DEFAULTS, Builder, constant, mb

FORMS = [True, False, 1, 0, "same", np.float16(1), [1, 0], [True, False], [1, 0, 0, 1]]


def function(build) -> Function:
    """A function of one input (1, 4, 1, 8), with what `build` makes of it as its output."""
    program = Program()
    inputs = {"x": Builder.placeholder(shape=(1, 4, 1, 8), dtype=ct.converters.mil.mil.types.fp16)}
    with Function(inputs, opset_version=ct.target.iOS18) as made:
        made.set_outputs([build(made.inputs["x"])])
    program.add_function("main", made)
    return made


def constants(made: Function) -> list[object]:
    return [op.outputs[0] for op in made.operations if op.op_type == "const"]


@pytest.mark.parametrize("value", FORMS, ids=repr)
def test_a_value_is_one_constant_of_its_type(value: object) -> None:
    def build(x):
        first, second = constant(value), constant(value)
        assert first is second
        np.testing.assert_array_equal(first.val, value)
        assert all(constant(other) is not first for other in FORMS if repr(other) != repr(value))
        return mb.identity(x=x)

    function(build)


def test_ops_of_a_function_share_their_parameters_and_those_of_another_do_not() -> None:
    weight = np.zeros((4, 4, 1, 1), np.float16)

    def build(x):
        for name in ("first", "second", "third"):
            x = mb.conv(x=x, weight=Builder.const(val=weight), **CONV_DEFAULTS, name=name)
        return mb.transpose(x=x, perm=[0, 1, 3, 2])

    one, other = function(build), function(build)
    assert len(constants(one)) == len(set(map(repr, CONV_DEFAULTS.values()))) + 3 + 1  # weights, an order
    assert not set(map(id, constants(one))) & set(map(id, constants(other)))


def test_the_written_defaults_are_those_of_coremltools() -> None:
    weight = np.zeros((4, 4, 1, 1), np.float16)
    made = function(lambda x: Builder.conv(x=x, weight=weight))
    conv = next(op for op in made.operations if op.op_type == "conv")
    for name, value in CONV_DEFAULTS.items():
        np.testing.assert_array_equal(conv.inputs[name].val, value)
