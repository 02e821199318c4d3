"""Decoding with the package alone, through its one-token functions: for a machine without MLX, or its GPU in use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pdconvert.errors import InputError
from pdconvert.runtime.handoff import KeysValues
from pdconvert.runtime.manifest import Function
from pdconvert.runtime.past import Past
from pdconvert.runtime.prefill import Prefill


def decode_functions(functions: Iterable[Function]) -> tuple[Function, ...]:
    """The functions that decode: one token on a past, logits out; those with a short past first.

    Raises:
        InputError: there is none; the message says what the recipe needs.
    """
    functions = list(functions)
    single = [item for item in functions if item.tokens == 1 and item.past]
    found = [item for item in single if any(port.role == "logits" for port in item.outputs)]
    if not found:
        past = max((item.past for item in functions), default=0) or 512
        needed = [] if single else [f"add {{tokens: 1, past: {past}}} to prefill.functions"]
        logits = any(port.role == "logits" for item in functions for port in item.outputs)
        needed += [] if logits else ["set prefill.outputs to logits"]
        raise InputError(
            f"the package of this build cannot decode: in its recipe, {' and '.join(needed)}, and build again; "
            "or decode with MLX"
        )
    return tuple(sorted(found, key=lambda item: item.past))


@dataclass(frozen=True)
class PackageDecoder:
    """Gives logits as the MLX weights do, a token at a time, from the functions `decode_1_ctx…`.

    Attributes:
        prefill: runs functions of the package.
        functions: those that decode, from `decode_functions`.
        executor: what runs the package, and why.
    """

    prefill: Prefill
    functions: tuple[Function, ...]
    executor: Mapping[str, str]

    @property
    def context(self) -> int:
        """How many tokens can be fed, those of the prompt included: the longest past, and one more."""
        return self.functions[-1].past + 1

    def describe(self) -> dict[str, str]:
        """What runs the functions, and which they are, for `run --json`."""
        return {**self.executor, "functions": ", ".join(item.name for item in self.functions)}

    def new_cache(self, kv: KeysValues | None = None, capacity: int = 0) -> Past:
        """K and V of a prompt, or none, as the past of the next call.

        Args:
            kv: what the package gave for the prompt.
            capacity: tokens that it shall hold without growing.
        """
        past = self.prefill.new_past(kv)
        past.reserve(min(capacity, self.functions[-1].past))
        return past

    def logits(self, ids: Sequence[int], cache: Past) -> np.ndarray:
        """Logits of new tokens, which `cache` takes up; each goes through the function with the shortest past.

        Args:
            ids: n token ids, at least one.
            cache: from `new_cache`.

        Returns:
            (n, V) fp32.

        Raises:
            InputError: the longest past is full, or the package gives another number of logits.
            CheckFailed: the package gives K or V that are not finite.
        """
        return np.stack([self._step(token, cache) for token in ids])

    def _step(self, token: int, cache: Past) -> np.ndarray:
        """(V,) fp32."""
        function = next((item for item in self.functions if item.past >= cache.length), None)
        if function is None:
            raise InputError(f"the context is full: {self.functions[-1].name} holds {self.context} tokens")
        outputs = self.prefill.call(function, [token], cache)
        row = function.logits(outputs).reshape(-1)
        vocabulary = self.prefill.manifest.vocab_size
        if row.size != vocabulary:
            raise InputError(
                f"{function.name}: logits has {row.size} values, and the vocabulary has {vocabulary}"
            )
        return row
