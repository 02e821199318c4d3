"""The prefill phase: prompt tokens through the package, K and V out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pdconvert.errors import CheckFailed, InputError
from pdconvert.runtime.embedding import HostEmbedding
from pdconvert.runtime.handoff import KeysValues
from pdconvert.runtime.manifest import Function, Manifest, Port
from pdconvert.runtime.mask import causal_mask
from pdconvert.runtime.rope import rope_tables


class Session(Protocol):
    """A function of the package, ready to run."""

    def run(self, inputs: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
        """Outputs by name, as arrays or CPU tensors, for inputs by name."""


Opener = Callable[[Function], Session]
"""Opens one function of the package."""


@dataclass
class Prefill:
    """Runs prompts through a build's package.

    Attributes:
        manifest: of the build.
        embedding: the host's embedding table.
        open_session: opens a function; called at its first use.
    """

    manifest: Manifest
    embedding: HostEmbedding
    open_session: Opener

    def __post_init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def session(self, function: Function) -> Session:
        """The session of a function, opened once."""
        if function.name not in self._sessions:
            self._sessions[function.name] = self.open_session(function)
        return self._sessions[function.name]

    def run(self, prompt: Sequence[int]) -> KeysValues | None:
        """K and V of all prompt tokens but the last, with which decode begins.

        Args:
            prompt: token ids, from one to the manifest's `prompt_limit`.

        Returns:
            The keys and values of len(prompt) − 1 tokens; None for a prompt of one token.

        Raises:
            InputError: no tokens, more than one call takes, or one outside the vocabulary.
            CheckFailed: the package gives values that are not finite.
        """
        if not prompt:
            raise InputError("the prompt is empty: it has no token")
        limit = self.manifest.prompt_limit
        if len(prompt) > limit:
            raise InputError(
                f"the prompt has {len(prompt)} tokens, and this build prefills at most {limit} in one call; "
                "shorten the prompt, or build with a longer prefill function"
            )
        outside = [token for token in prompt if not 0 <= token < self.manifest.vocab_size]
        if outside:
            size = self.manifest.vocab_size
            raise InputError(f"the prompt holds token id {outside[0]}, and the vocabulary ends at {size - 1}")
        ids = list(prompt[:-1])
        if not ids:
            return None
        function = self.manifest.prefill_function(len(ids))
        inputs = {port.name: self._input(port, ids, function) for port in function.inputs}
        outputs = self.session(function).run(inputs)
        keys, values = (self._output(name, outputs, function) for name in ("k", "v"))
        return KeysValues.from_graph(keys, values, self.manifest.layers, len(ids), self.manifest.key_form)

    def _input(self, port: Port, ids: list[int], function: Function) -> np.ndarray:
        """The value of one input for a call without past tokens."""
        build: dict[str, Callable[[], np.ndarray]] = {
            "hidden": lambda: self.embedding.hidden(ids, function.tokens),
            "token_ids": lambda: _padded(ids, function.tokens),
            "rope_cos": lambda: self._rope(function)[0],
            "rope_sin": lambda: self._rope(function)[1],
            "mask": lambda: causal_mask(0, function.past, len(ids), function.tokens),
            "row": lambda: _one_hot(len(ids) - 1, function.tokens),
        }
        if port.role not in build:
            raise InputError(
                f"{function.name}: this version cannot fill the input {port.name} (role {port.role})"
            )
        value = build[port.role]()
        if value.shape != port.shape:
            raise InputError(
                f"{function.name}: {port.name} is {port.shape}, the build's parts give {value.shape}"
            )
        return value

    def _rope(self, function: Function) -> tuple[np.ndarray, np.ndarray]:
        rope = self.manifest.rope
        return rope_tables(rope.inv_freq, rope.attention_factor, 0, function.tokens)

    def _output(self, name: str, outputs: Mapping[str, Any], function: Function) -> np.ndarray:
        """`k` or `v`, (1, layers · kv_heads, head_dim, S), finite."""
        port = next((port for port in function.outputs if port.role == name), None)
        if port is None:
            raise InputError(f"{function.name} has no output {name}, so nothing can be handed to decode")
        value = np.asarray(outputs[port.name])
        manifest = self.manifest
        expected = (1, manifest.layers * manifest.kv_heads, manifest.head_dim, function.tokens)
        if value.shape != expected:
            raise InputError(
                f"{function.name}: output {port.name} is {value.shape}, the manifest says {expected}"
            )
        if not np.isfinite(value).all():
            raise CheckFailed(
                f"{function.name}: output {port.name} is not finite; run `pdconvert verify` on this build"
            )
        return value


def _padded(ids: list[int], tokens: int) -> np.ndarray:
    """Token ids (1, S) int32, the last one repeated."""
    return np.array([[*ids, *[ids[-1]] * (tokens - len(ids))]], np.int32)


def _one_hot(row: int, tokens: int) -> np.ndarray:
    """(1, 1, S, 1) fp16 with a 1 at one token."""
    one_hot = np.zeros((1, 1, tokens, 1), np.float16)
    one_hot[0, 0, row] = 1
    return one_hot
