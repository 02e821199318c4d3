"""Opening a function of a build, whatever number of packages it is spread over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pdconvert.errors import InputError
from pdconvert.runtime.manifest import Manifest, Part

if TYPE_CHECKING:
    from pdconvert.executors import Executor


@dataclass(frozen=True)
class Chain:
    """One function whose layers lie in several packages: each part's `next_hidden` is the next one's `hidden`.

    Attributes:
        parts: of the build, in order.
        sessions: one per part.
        kv_heads: rows of a cache per layer.
    """

    parts: Sequence[Part]
    sessions: Sequence[Any]
    kv_heads: int

    @property
    def kind(self) -> str:
        """Kind of the executor of every part."""
        return self.sessions[0].kind

    @property
    def reason(self) -> str:
        """Why that executor runs."""
        return f"{self.sessions[0].reason}; {len(self.parts)} parts"

    rounds_states = True

    def make_state(self) -> dict[str, Any]:
        """No states: a split build hands its cache over as inputs and outputs."""
        return {}

    def read_state(self, state: Any, name: str) -> np.ndarray:
        """Refused: there is none."""
        raise InputError(f"a build in parts has no state {name}; build again")

    def write_state(self, state: Any, name: str, value: np.ndarray) -> None:
        """Refused: there is none."""
        self.read_state(state, name)

    def run(self, inputs: Mapping[str, Any], state: Any = None) -> dict[str, Any]:
        """Run all parts in order; the outputs are those of a build in one part."""
        hidden: dict[str, Any] = {}
        caches: dict[str, list[Any]] = {"k": [], "v": []}
        outputs: dict[str, Any] = {}
        for part, session in zip(self.parts, self.sessions, strict=True):
            given = {**inputs, **hidden}
            rows = slice(part.first * self.kv_heads, part.last * self.kv_heads)
            taken = {
                name: given[name][:, rows] if name.startswith("past_") else given[name]
                for name in part.inputs
            }
            outputs = session.run(taken)
            for name, values in caches.items():
                values.append(np.asarray(outputs.pop(name)))
            hidden = {"hidden": outputs.pop("next_hidden", None)}
        return {**{name: np.concatenate(values, 1) for name, values in caches.items()}, **outputs}


def open_function(manifest: Manifest, function: str, **options: Any) -> Executor | Chain:
    """Open a function of a build; options as of `open_executor`.

    Raises:
        InputError: a package is missing or damaged, or cannot be run here.
    """
    return Opener(manifest, options).open(function)


class Opener:
    """Opens functions of one build; those of the MIL executor hold the weights that they share once.

    Args:
        manifest: of the build.
        options: as of `open_executor`.
    """

    def __init__(self, manifest: Manifest, options: Mapping[str, Any]):
        from pdconvert.executors.mil.weights import WeightCache, default_cache_bytes

        self._manifest, self._options = manifest, dict(options)
        limit = self._options.pop("weight_cache_bytes", None)
        self._cache = {
            package: WeightCache(
                (default_cache_bytes() if limit is None else limit) // len(manifest.packages)
            )
            for package, _, _ in manifest.packages
        }

    def open(self, function: str) -> Executor | Chain:
        """One function, over all packages that hold a part of it."""
        from pdconvert.executors import open_executor

        parts = self._manifest.parts_of(function)
        sessions = [
            open_executor(part.package, function, cache=self._cache[part.package], **self._options)
            for part in parts
        ]
        return sessions[0] if len(sessions) == 1 else Chain(parts, sessions, self._manifest.kv_heads)
