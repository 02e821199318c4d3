"""What the executor knows of one MIL op type."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

LIST_INPUTS = frozenset({"values", "ref_tensors", "begins", "ends", "end_masks"})
"""MIL inputs that hold a tuple of values, also where the tuple has one element."""


@dataclass(frozen=True)
class OpRow:
    """One row of the op table: an op type's function and how the session may call it.

    Attributes:
        fn: called as `fn(*tensors, **params)`. Tensors are torch tensors (None where an optional one is
            left out, a list for an input in `LIST_INPUTS`), params are Python values. It returns a
            tensor, or a tuple for an op with several outputs, and leaves its inputs as they are.
        tensors: names of the MIL inputs given as tensors, in the order of `fn`.
        optional: how many of the last `tensors` may be left out.
        params: names of the MIL inputs given as Python values, whether constant or computed.
        copies: outputs hold only values of the inputs, so rounding to fp16 changes nothing.
        view: the output may share memory with the first input.
        into: `fn` with one more positional argument after the tensors: an input to write the result
            into; None where there is no such form.
        targets: how many of the first tensors `into` may write into.
        bind: takes the params and returns `fn` with them worked in; used where all params are constant.
    """

    fn: Callable[..., Any]
    tensors: tuple[str, ...]
    params: tuple[str, ...] = ()
    optional: int = 0
    copies: bool = False
    view: bool = False
    into: Callable[..., Any] | None = None
    targets: int = 1
    bind: Callable[..., Callable[..., Any]] | None = None


def row(
    fn: Callable[..., Any], *, copies: bool = False, view: bool = False, into: Any = None, bind: Any = None
) -> OpRow:
    """Make a row from a Python function: positional arguments are tensors, keyword-only ones params."""
    tensors, params, optional = [], [], 0
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            params.append(parameter.name)
            continue
        tensors.append(parameter.name)
        optional += parameter.default is None
    return OpRow(fn, tuple(tensors), tuple(params), optional, copies=copies, view=view, into=into, bind=bind)


def builtin(fn: Callable[..., Any], tensors: str = "x", *, copies: bool = False, into: Any = None) -> OpRow:
    """Make a row from a torch function whose arguments are the tensors named in `tensors`, no params."""
    names = tuple(tensors.split())
    return OpRow(fn, names, copies=copies, into=into, targets=len(names))


def positive(axis: int, rank: int) -> int:
    """Return `axis` counted from the front."""
    return axis + rank if axis < 0 else axis


def positive_axes(axes: Sequence[int] | int | None, rank: int) -> list[int]:
    """Return `axes` counted from the front, sorted; all axes where None."""
    if axes is None:
        return list(range(rank))
    given = [axes] if isinstance(axes, int) else axes
    return sorted(positive(axis, rank) for axis in given)
