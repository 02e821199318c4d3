"""New module trees from old ones, which share what is not changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def rewrite(module: nn.Module, change: Callable[[nn.Module], nn.Module | None]) -> Any:
    """A new module tree in which `change(child)` replaces every module it returns a module for.

    Parameters and buffers are shared with the original, which is left as it was. Children are
    rewritten before their parents, so `change` sees the new children.
    """
    new = copy.copy(module)
    new.__dict__ = dict(module.__dict__)
    new._parameters = dict(module._parameters)
    new._buffers = dict(module._buffers)
    new._modules = {
        name: None if child is None else rewrite(child, change) for name, child in module._modules.items()
    }
    return change(new) or new


def set_parameter(part: nn.Module, kind: str, value: Tensor) -> None:
    """Give a part of a rewritten tree another `weight` or `bias`; the original keeps its own."""
    part._parameters[kind] = nn.Parameter(value, requires_grad=False)
