"""The prefill phase: prompt tokens through the package, K and V out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdconvert.errors import CheckFailed, InputError
from pdconvert.quant.grid import FP16_MAX
from pdconvert.runtime.chunks import plan_chunks, reach
from pdconvert.runtime.embedding import HostEmbedding
from pdconvert.runtime.handoff import KeysValues
from pdconvert.runtime.manifest import Function, Manifest, Port
from pdconvert.runtime.mask import MASKED, causal_mask
from pdconvert.runtime.past import HostPast, Past, Session, StatePast
from pdconvert.runtime.prefix_cache import PrefixCache
from pdconvert.runtime.rope import RopeTables

Opener = Callable[[Function], Session]
"""Opens one function of the package."""


@dataclass
class Prefill:
    """Runs prompts through a build's package.

    Attributes:
        manifest: of the build.
        embedding: the host's embedding table.
        open_session: opens a function; called at its first use.
        cache: where blocks of earlier prompts are kept, if anywhere.
        limit: longest prompt, in tokens.
        calls: how many times a function was run so far.
        cached_tokens: tokens whose K and V the cache gave so far.
        rope: tables of all positions that a call can see.
    """

    manifest: Manifest
    embedding: HostEmbedding
    open_session: Opener
    cache: PrefixCache | None = None

    def __post_init__(self) -> None:
        self.calls = self.cached_tokens = 0
        self._sessions: dict[str, Session] = {}
        self._masks: dict[str, np.ndarray] = {}
        functions = self.manifest.functions.values()
        self.limit = reach(functions)
        longest = max(self.limit, self.manifest.longest_past) + max(item.tokens for item in functions)
        self.rope = RopeTables(self.manifest.rope.by_suffix(self.manifest.layers), 0, longest)

    def session(self, function: Function) -> Session:
        """The session of a function, opened once."""
        if function.name not in self._sessions:
            self._sessions[function.name] = self.open_session(function)
        return self._sessions[function.name]

    def run(self, prompt: Sequence[int]) -> KeysValues | None:
        """K and V of all prompt tokens but the last, with which decode begins.

        Args:
            prompt: token ids, from one to the `limit`.

        Returns:
            The keys and values of len(prompt) − 1 tokens; None for a prompt of one token.

        Raises:
            InputError: no tokens, or more than the functions reach.
            CheckFailed: the package gives values that are not finite.
        """
        if not prompt:
            raise InputError("the prompt is empty: it has no token")
        if len(prompt) > self.limit:
            raise InputError(
                f"the prompt has {len(prompt)} tokens, and the functions of this build hold {self.limit}; "
                "shorten the prompt, or build with a function that has a longer past"
            )
        outside = next((item for item in prompt if not 0 <= item < self.manifest.vocab_size), None)
        if outside is not None:
            last = self.manifest.vocab_size - 1
            raise InputError(f"the prompt holds token id {outside}, and the vocabulary ends at {last}")
        return self.extend(None, prompt[:-1]) if len(prompt) > 1 else None

    def extend(self, past: KeysValues | None, ids: Sequence[int]) -> KeysValues:
        """K and V of `ids` on top of `past`, both together; `past` is not changed.

        Without a past, blocks that the cache has are taken from there.

        Raises:
            InputError: no tokens, or more than the functions reach.
            CheckFailed: the package gives values that are not finite.
        """
        manifest, cache = self.manifest, self.cache if past is None else None
        buffer = self.new_past(past)
        done = buffer.length
        plan = plan_chunks(manifest.functions.values(), done, len(ids))
        calls = [(chunk.function, ids[chunk.start - done :][: chunk.length]) for chunk in plan]
        keys = cache.keys((function.name, part) for function, part in calls) if cache else [""] * len(calls)
        rows = manifest.layers * manifest.kv_heads
        for key, (function, part) in zip(keys, calls, strict=True):
            start = buffer.length
            block = cache.get(key, (2, 1, rows, manifest.head_dim, len(part))) if cache else None
            if block is not None:
                buffer.append(block[0], block[1], self.rope)
                self.cached_tokens += len(part)
                continue
            self.call(function, part, buffer)
            if cache:
                cache.put(key, np.stack((buffer.keys()[..., start:], buffer.values()[..., start:])))
        if cache:
            cache.touch(keys)
        return KeysValues.from_graph(
            buffer.keys(), buffer.values(), manifest.layers, buffer.length, manifest.key_form
        )

    def new_past(self, kv: KeysValues | None = None) -> Past:
        """What the first call goes on from: nothing, or K and V that are copied."""
        function = next(iter(self.manifest.functions.values()))
        if not function.states:
            return HostPast(self.manifest, kv)
        return StatePast(self.manifest, kv, function.states, self.session(function))

    def call(self, function: Function, ids: Sequence[int], past: Past) -> Mapping[str, Any]:
        """Run a function once on top of `past`, which takes up the new K and V.

        Args:
            function: one whose past holds that of `past`.
            ids: 1 to `function.tokens` token ids.
            past: of the tokens before them.

        Returns:
            The function's outputs by name.
        """
        inputs = {port.name: self._input(port, list(ids), function, past) for port in function.inputs}
        outputs = past.run(self.session(function), inputs)
        self.calls += 1
        keys, values = (self._output(name, outputs, function)[..., : len(ids)] for name in ("k", "v"))
        past.take(keys, values, self.rope)
        return outputs

    def _input(self, port: Port, ids: list[int], function: Function, past: Past) -> np.ndarray:
        """The value of one input for a call on top of `past`."""
        span = slice(past.length, past.length + function.tokens)
        build: dict[str, Callable[[], np.ndarray]] = {
            "hidden": lambda: self.embedding.hidden(ids, function.tokens),
            "token_ids": lambda: _padded(ids, function.tokens),
            "mask": lambda: self._mask(past.length, function),
            "mask.window": lambda: self._window_mask(past.length, function),
            "row": lambda: _one_hot(len(ids) - 1, function.tokens),
            **past.inputs(function, len(ids)),
        }
        tables = self.rope.inputs(span)
        if port.role not in {*build, *tables}:
            raise InputError(
                f"{function.name}: this version cannot fill the input {port.name} (role {port.role})"
            )
        value = tables[port.role] if port.role in tables else build[port.role]()
        if value.shape != port.shape:
            raise InputError(
                f"{function.name}: {port.name} is {port.shape}, the build's parts give {value.shape}"
            )
        return value

    def _mask(self, start: int, function: Function) -> np.ndarray:
        """The function's mask for `start` past tokens: one buffer, of which only the past rows change."""
        if function.name not in self._masks:
            self._masks[function.name] = causal_mask(0, function.past, function.tokens, function.tokens)
        mask = self._masks[function.name]
        mask[0, 0, : min(start, function.past)] = 0
        mask[0, 0, min(start, function.past) : function.past] = MASKED
        return mask

    def _window_mask(self, start: int, function: Function) -> np.ndarray:
        """The function's mask for layers with a window."""
        past, tokens = min(start, function.past), function.tokens
        return causal_mask(past, function.past, tokens, tokens, window=self.manifest.window)

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
        if not (np.abs(value) <= FP16_MAX).all():
            raise CheckFailed(
                f"{function.name}: output {port.name} is not finite in fp16; run `pdconvert verify` on this build"
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
