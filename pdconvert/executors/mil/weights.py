"""Values that are known before the program runs, and the cache of those that were materialised.

A constant is a leaf (an immediate value or a tensor in the weight file) or an op all of whose inputs are
constants: the `constexpr_*` ops, but also a `transpose` or `cast` that a converter left behind. It is
computed when an op needs it and kept as long as the cache has room, else computed again at each use. So
a package runs in little memory, and as fast as memory allows.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pdconvert.errors import InputError
from pdconvert.executors.mil import dtypes
from pdconvert.executors.mil.dtypes import MilType
from pdconvert.executors.mil.ops import fused
from pdconvert.executors.mil.values import OP_ERRORS, FileValue, ValueInfo, first_line, round_fp16, to_torch

ALWAYS_KEPT_BYTES = 64 * 1024
"""Constants up to this size do not count against the cache's limit."""


GIVEN_BACK_EVERY_BYTES = 64_000_000
"""After so many bytes of packed weights, what lies free between them goes back to the system."""


@dataclass(frozen=True, eq=False)
class Leaf:
    """A constant that stands in the package.

    Attributes:
        info: its type.
        held: the value: an array in the numpy type of its element type, a string, a list, or a place in
            a weight file.
        key: equal for equal constants, across functions of one package.
    """

    info: ValueInfo
    held: FileValue | np.ndarray | str | list[str]
    key: Hashable

    def python(self) -> Any:
        """Return it as a Python value: str, bool, int, float or nested lists of these."""
        if isinstance(self.held, FileValue):
            return to_torch(self.held.array(), self.held.dtype).tolist()
        if isinstance(self.held, np.ndarray):
            return to_torch(self.held, dtypes.BY_NAME[self.info.dtype]).tolist()
        return self.held

    def tensor(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return it as a tensor, which shares memory with the file where no conversion is needed."""
        del memo
        if isinstance(self.held, FileValue):
            return to_torch(self.held.array(), self.held.dtype)
        return to_torch(np.asarray(self.held), dtypes.BY_NAME[self.info.dtype])


@dataclass(frozen=True, eq=False)
class Folded:
    """One output of an op whose inputs are all constant.

    Attributes:
        info: its type.
        call: computes the op's outputs from tensors.
        args: the constants it takes: one for each tensor, a list of them, or None.
        output: which output of the op this is.
        node: the op, for messages; the same object for all outputs of one op.
        rounds: whether the value is rounded to fp16.
        key: equal for equal constants, across functions of one package.
    """

    info: ValueInfo
    call: Callable[..., Any]
    args: Sequence[Any]
    output: int
    node: str
    rounds: bool
    key: Hashable

    def python(self) -> Any:
        """Return it as a Python value."""
        return self.tensor({}).tolist()

    def tensor(self, memo: dict[int, Any]) -> torch.Tensor:
        """Compute it. `memo` holds results by node, so that one op runs once for all its outputs.

        Raises:
            InputError: the op fails on these constants; the message names it.
        """
        results = memo.get(id(self.node))
        if results is None:
            args = [_evaluate(arg, memo) for arg in self.args]
            try:
                results = self.call(*args)
            except OP_ERRORS as error:
                raise InputError(f"{self.node} failed: {first_line(error)}") from error
            memo[id(self.node)] = results
        value = results[self.output] if isinstance(results, tuple) else results
        return round_fp16(value) if self.rounds else value


@dataclass(frozen=True, eq=False)
class Joined:
    """Constants joined along their first axis, for a step that stands for several ops.

    Attributes:
        info: its type.
        parts: the constants: weights (O, I, 1, ...), held as one matrix, or vectors.
        columns: for how many positions oneDNN packs the matrix; 0 for vectors.
        key: equal for equal constants, across functions of one package.
    """

    info: ValueInfo
    parts: Sequence["Leaf | Folded"]
    columns: int
    key: Hashable

    @classmethod
    def of(cls, parts: Sequence["Static"], columns: int) -> "Joined":
        """Join constants of a program."""
        plain = [part for part in parts if not isinstance(part, Joined)]
        first = plain[0].info
        info = ValueInfo((sum(part.info.shape[0] for part in plain), *first.shape[1:]), first.dtype)
        return cls(info, plain, columns, ("joined", columns, *(part.key for part in plain)))

    def python(self) -> Any:
        """Return it as a Python value."""
        return self.loose({}).tolist()

    def loose(self, memo: dict[int, Any]) -> torch.Tensor:
        """Compute it, not packed: a matrix (O, I), or a vector."""
        tensors = [part.tensor(memo) for part in self.parts]
        whole = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        return whole.flatten(1) if self.columns else whole

    def tensor(self, memo: dict[int, Any]) -> torch.Tensor:
        """Compute it."""
        whole = self.loose(memo)
        return fused.pack(whole.contiguous(), self.columns) if self.columns else whole


Static = Leaf | Folded | Joined


def _evaluate(arg: Any, memo: dict[int, Any]) -> Any:
    if isinstance(arg, list):
        return [_evaluate(item, memo) for item in arg]
    return None if arg is None else arg.tensor(memo)


def held_bytes(info: ValueInfo) -> int:
    """Return the bytes of a static value while it is held as a torch tensor."""
    mil: MilType = dtypes.BY_NAME[info.dtype]
    return int(np.prod(info.shape, dtype=np.int64)) * getattr(torch, mil.torch).itemsize


def default_cache_bytes() -> int:
    """Return the default limit of a weight cache: 2 GB, or a quarter of this machine's memory if less."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(2_000_000_000, memory // 4)


def give_back_free_memory() -> None:
    """Return free memory between allocated pieces to the system; only glibc can.

    A packed weight is made from others of nearly its size, which are free right after. Of the holes that they
    leave, hardly one fits the next: 180 MB were lost beside 392 MB of weights.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


@dataclass
class WeightCache:
    """Materialised constants up to a number of bytes; first come, first kept.

    Keeping the first ones is right for programs that pass over all weights in one order: with a limit
    below their size, throwing out the oldest would throw out each one just before it is needed.

    Attributes:
        limit_bytes: how much may be kept.
        kept_bytes: how much is kept.
    """

    limit_bytes: int
    kept_bytes: int = 0
    _held: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    _scattered_bytes: int = 0

    def get(self, static: Static) -> tuple[torch.Tensor, bool]:
        """Return a constant's tensor and whether it stays in the cache."""
        found = self._held.get(static.key)
        if found is not None:
            return found, True
        if isinstance(static, Joined) and not self._has_room(held_bytes(static.info)):
            return static.loose({}), False  # packing pays only for what is used again
        tensor = static.tensor({})
        size = tensor.numel() * tensor.element_size()
        if not self._has_room(size):
            return tensor, False
        self.kept_bytes += size if size > ALWAYS_KEPT_BYTES else 0
        if isinstance(static, Joined):
            self._scattered_bytes += size
            if self._scattered_bytes > GIVEN_BACK_EVERY_BYTES:
                self._scattered_bytes = 0
                give_back_free_memory()
        self._held[static.key] = tensor
        return tensor, True

    def _has_room(self, size: int) -> bool:
        return size <= ALWAYS_KEPT_BYTES or self.kept_bytes + size <= self.limit_bytes
