"""coremltools' builder of MIL programs, with one constant for equal parameters of a function's ops.

Every convolution has the same strides, every transpose one of a few orders. Left to itself the builder makes a
constant for each parameter of each op: half of all ops of a program, and much of the time that it takes to build,
write and open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from coremltools.converters.mil import Builder
from coremltools.converters.mil.mil import Var
from coremltools.converters.mil.mil.block import curr_block

CONV_DEFAULTS = {
    "strides": [1, 1],
    "pad_type": "valid",
    "pad": [0, 0, 0, 0],
    "dilations": [1, 1],
    "groups": 1,
}
"""What the builder would write for a convolution that says nothing of them."""

SHARED = "pdconvert_constants"
"""Attribute of a block of coremltools that holds its constants, so that they live as long as it does."""


def constant(value: bool | int | str | np.float16 | list[int] | list[bool]) -> Var:
    """The constant of the function that is being built which has this value and type."""
    held: dict[tuple[str, str], Var] = vars(curr_block()).setdefault(SHARED, {})
    key = (type(value).__name__, repr(value))
    if key not in held:
        entries = (
            np.array(value, bool if isinstance(value[0], bool) else np.int32)
            if isinstance(value, list)
            else value
        )
        held[key] = Builder.const(val=entries, name=f"constant_{len(held)}")
    return held[key]


class _SharingBuilder:
    """`mb`, of which every op takes its parameters from `constant`."""

    def __getattr__(self, op: str) -> Callable[..., Var]:
        make = getattr(Builder, op)

        def build(*, name: str | None = None, **arguments: Any) -> Var:
            given = {key: value for key, value in arguments.items() if value is not None}
            found = {key: value if _is_computed(value) else constant(value) for key, value in given.items()}
            return make(**found) if name is None else make(**found, name=name)

        return build


def _is_computed(value: Any) -> bool:
    return isinstance(value, Var) or (isinstance(value, list | tuple) and isinstance(value[0], Var))


mb = _SharingBuilder()
