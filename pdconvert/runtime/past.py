"""K and V of the tokens so far, between two calls of the package: held by the host, or in Core ML states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from pdconvert.errors import InputError
from pdconvert.runtime.handoff import KeysValues
from pdconvert.runtime.manifest import Function, Manifest, Port
from pdconvert.runtime.rope import RopeTables

Inputs = Mapping[str, Callable[[], np.ndarray]]
"""Makers of a call's inputs, by role."""


class Session(Protocol):
    """A function of the package, ready to run; the executors say what the methods do."""

    def run(self, inputs: Mapping[str, np.ndarray], state: Any = None) -> Mapping[str, Any]:
        """Outputs by name, as arrays or CPU tensors, for inputs by name."""


class StateSession(Session, Protocol):
    """A session of a function with states."""

    @property
    def rounds_states(self) -> bool: ...

    def make_state(self) -> Any: ...

    def read_state(self, state: Any, name: str) -> np.ndarray: ...

    def write_state(self, state: Any, name: str, value: np.ndarray) -> None: ...


class Past(Protocol):
    """What a call of the package goes on from, and adds its tokens to."""

    length: int
    """Tokens so far."""

    def reserve(self, columns: int) -> None:
        """Make room for that many tokens."""

    def inputs(self, function: Function, new: int) -> Inputs:
        """What of a function's inputs depends on the past, for a call on `new` tokens."""

    def run(self, session: Any, inputs: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
        """Run a call; `take` then tells what came out."""

    def take(self, keys: np.ndarray, values: np.ndarray, rope: RopeTables) -> None:
        """Add the new tokens of the call that was run.

        Args:
            keys, values: (1, L·H_kv, D, n), as they came out.
            rope: tables of all positions from 0 on.
        """

    def append(self, keys: np.ndarray, values: np.ndarray, rope: RopeTables) -> None:
        """Add tokens whose K and V come from elsewhere; arguments as of `take`."""

    def keys(self) -> np.ndarray:
        """All keys in the form that the graph gives, (1, L·H_kv, D, length) fp16."""

    def values(self) -> np.ndarray:
        """All values, (1, L·H_kv, D, length) fp16."""


class HostPast:
    """In buffers in the graph's layout, which grow by doubling and are zero beyond the tokens.

    Attributes:
        length: tokens so far.
        graph_keys, graph_values: what the graph takes as past: rotated keys, values.
    """

    def __init__(self, manifest: Manifest, kv: KeysValues | None):
        self.length = 0
        self._raw = manifest.key_form == "raw"
        self._kv_heads = manifest.kv_heads
        empty = np.zeros((1, manifest.layers * manifest.kv_heads, manifest.head_dim, 0), np.float16)
        self.graph_keys = self.graph_values = self._raw_keys = empty
        if kv is not None:
            tables = RopeTables(manifest.rope.by_suffix(manifest.layers), 0, kv.tokens)
            self.append(kv.graph_keys(), kv.graph_values(), tables)

    def reserve(self, columns: int) -> None:
        """Make the buffers at least that wide."""
        if columns > self.graph_keys.shape[-1]:
            self.graph_keys, self.graph_values = (
                _grown(x, columns) for x in (self.graph_keys, self.graph_values)
            )
            self._raw_keys = _grown(self._raw_keys, columns) if self._raw else self.graph_keys

    def inputs(self, function: Function, new: int) -> Inputs:
        """`past_k` and `past_v`: views of the buffers."""
        self.reserve(function.past)
        return {
            "past_k": lambda: self.graph_keys[..., : function.past],
            "past_v": lambda: self.graph_values[..., : function.past],
        }

    def run(self, session: Session, inputs: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
        """Run a call."""
        return session.run(inputs)

    def take(self, keys: np.ndarray, values: np.ndarray, rope: RopeTables) -> None:
        """Add the new tokens of a call."""
        self.append(keys, values, rope)

    def append(self, keys: np.ndarray, values: np.ndarray, rope: RopeTables) -> None:
        """Add columns (1, L·H_kv, D, n); raw keys are turned here for the graph's next past."""
        end = self.length + keys.shape[-1]
        if end > self.graph_keys.shape[-1]:
            self.reserve(max(end, 2 * self.graph_keys.shape[-1]))
        span = slice(self.length, end)
        self._raw_keys[..., span] = keys
        self.graph_values[..., span] = values
        if self._raw:
            # From the fp16 values that are handed on, so that it makes no difference whether they come from a call.
            self.graph_keys[..., span] = rope.rotate(self._raw_keys[..., span], self._kv_heads, span)
        self.length = end

    def keys(self) -> np.ndarray:
        """All keys as the graph gave them: a view."""
        return self._raw_keys[..., : self.length]

    def values(self) -> np.ndarray:
        """All values: a view."""
        return self.graph_values[..., : self.length]


class StatePast:
    """In the states of the package, (L, H_kv·D, 1, N): token i in column i.

    Every function has the same states, so that one set of buffers goes from function to function.

    Args:
        manifest: of the build.
        kv: what to begin with.
        ports: the states, keys first.
        session: of any function.

    Attributes:
        length: tokens so far.
    """

    def __init__(self, manifest: Manifest, kv: KeysValues | None, ports: Sequence[Port], session: Any):
        self.length = 0
        self._names = [port.name for port in ports]
        self._columns = ports[0].shape[-1]
        self._rows, self._dim = manifest.layers * manifest.kv_heads, manifest.head_dim
        self._session: StateSession = session
        self._state = session.make_state()
        self._write: dict[int, np.ndarray] = {}
        if kv is not None:
            self._store(kv.graph_keys(), kv.graph_values())
            self.length = kv.tokens

    def reserve(self, columns: int) -> None:
        """Nothing to do: a state has its size."""

    def inputs(self, function: Function, new: int) -> Inputs:
        """`write`: the column of each new token as a one-hot row; rows of padding are zero."""
        return {"write": lambda: self._one_hot(function.tokens, new)}

    def _one_hot(self, tokens: int, new: int) -> np.ndarray:
        """(1, 1, S, N) fp16: one buffer for each S."""
        self._check(new)
        if tokens not in self._write:
            self._write[tokens] = np.empty((1, 1, tokens, self._columns), np.float16)
        write = self._write[tokens]
        write.fill(0)
        rows = np.arange(new)
        write[0, 0, rows, self.length + rows] = 1
        return write

    def run(self, session: StateSession, inputs: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
        """Run a call, which writes the new columns itself."""
        return session.run(inputs, self._state)

    def take(self, keys: np.ndarray, values: np.ndarray, rope: RopeTables) -> None:
        """Count the new tokens of a call, whose columns the states hold already.

        An executor whose states hold more than fp16 gets them rounded, so that it makes no difference to the next
        call whether a column comes from a call, a hand-off or the prefix cache.
        """
        end = self.length + keys.shape[-1]
        for name in () if self._session.rounds_states else self._names:
            held = self._session.read_state(self._state, name)
            held[..., self.length : end] = held[..., self.length : end].astype(np.float16)
            self._session.write_state(self._state, name, held)
        self.length = end

    def append(self, keys: np.ndarray, values: np.ndarray, rope: RopeTables) -> None:
        """Write columns (1, L·H_kv, D, n) behind those that are there."""
        self._check(keys.shape[-1])
        self._store(keys, values)
        self.length += keys.shape[-1]

    def keys(self) -> np.ndarray:
        """All keys: a copy of the state."""
        return self._read(0)

    def values(self) -> np.ndarray:
        """All values: a copy of the state."""
        return self._read(1)

    def _check(self, new: int) -> None:
        if self.length + new > self._columns:
            raise InputError(f"the states hold {self._columns} tokens, and {self.length + new} are needed")

    def _read(self, index: int) -> np.ndarray:
        held = self._session.read_state(self._state, self._names[index])
        rows = held.reshape(1, self._rows, self._dim, self._columns)
        return rows[..., : self.length].astype(np.float16)

    def _store(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Write columns from `length` on."""
        for name, new in zip(self._names, (keys, values), strict=True):
            held = self._session.read_state(self._state, name)
            rows = held.reshape(1, self._rows, self._dim, self._columns)
            rows[..., self.length : self.length + new.shape[-1]] = new.astype(np.float16)
            self._session.write_state(self._state, name, held)


def _grown(buffer: np.ndarray, size: int) -> np.ndarray:
    """A copy with `size` columns, new ones zero."""
    grown = np.zeros((*buffer.shape[:-1], size), buffer.dtype)
    grown[..., : buffer.shape[-1]] = buffer
    return grown
