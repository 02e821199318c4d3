"""The half that goes on with a text: from K and V of a prompt to the words after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from pdconvert.errors import InputError
from pdconvert.runtime.clock import Clock
from pdconvert.runtime.generate import Sampling, generate
from pdconvert.runtime.handoff import KeysValues
from pdconvert.runtime.manifest import Manifest
from pdconvert.runtime.weights import read_config, read_json

if TYPE_CHECKING:
    from pdconvert.runtime.tokenizer import Tokenizer

OnText = Callable[[str], None]
"""Receives each piece of text as soon as its characters are whole."""

StopReason = Literal["eos", "length", "context"]
"""Why a text ends: its own end, `max_tokens`, or a decoder that holds no more tokens."""


class Decoder(Protocol):
    """What goes on with a prompt: the MLX weights, or decoding functions of the package."""

    def new_cache(self, kv: KeysValues | None = None, capacity: int = 0) -> Any:
        """A cache with the keys and values of a prompt, and room for `capacity` tokens."""

    def logits(self, ids: list[int], cache: Any) -> np.ndarray:
        """Logits (n, V) fp32 of n new tokens on a cache, to which they are added."""

    def describe(self) -> dict[str, str]:
        """What runs it, and why."""


@dataclass(frozen=True)
class Written:
    """The text after a prompt.

    Attributes:
        text: what the pieces of the stream add up to.
        token_ids: its tokens; an EOS that ended it is not among them.
        stop_reason: why it ends.
        steps: how many tokens were generated, an EOS among them.
    """

    text: str
    token_ids: tuple[int, ...]
    stop_reason: StopReason
    steps: int

    def timings(self, clock: Clock) -> dict[str, float]:
        """Seconds of the phases, and tokens decoded per second."""
        return {**clock.seconds, "tokens_per_s": self.steps / clock.seconds["decode_s"]}


@dataclass(frozen=True)
class Writer:
    """Goes on with a text.

    Attributes:
        tokenizer: of the decode folder.
        decoder: gives the logits.
        eos_ids: tokens that end a text: of manifest, config, generation config and tokenizer together.
        context: how many tokens the decoder can be fed: what its functions hold, or the model's positions; None
            where nothing but memory limits it.
    """

    tokenizer: Tokenizer
    decoder: Decoder
    eos_ids: frozenset[int]
    context: int | None = None

    @classmethod
    def open(cls, manifest: Manifest, decoder: Decoder, context: int | None = None) -> Writer:
        """A writer with a build's tokenizer and its ends of a text."""
        from pdconvert.runtime.tokenizer import Tokenizer, eos_token_ids

        tokenizer = Tokenizer(manifest.decode)
        generation = manifest.decode / "generation_config.json"
        named = eos_token_ids(
            read_config(manifest.decode),
            read_json(generation) if generation.exists() else {},
            tokenizer.eos_id,
        )
        return cls(tokenizer, decoder, manifest.eos_ids | named, context)

    def write(
        self,
        kv: KeysValues | None,
        last_ids: Sequence[int],
        *,
        max_tokens: int,
        sampling: Sampling,
        clock: Clock,
        on_text: OnText | None = None,
    ) -> Written:
        """The text after a prompt.

        Args:
            kv: K and V of the prompt but for its last tokens; None for none.
            last_ids: these tokens, at least one.
            max_tokens: at most that many tokens, an EOS among them.
            sampling: how each is chosen.
            clock: to which the phases are added.
            on_text: receives the text as it comes.

        Raises:
            InputError: the prompt alone exceeds the context.
            CheckFailed: the decoder gives values that are not finite.
        """
        prompt_tokens = (kv.tokens if kv is not None else 0) + len(last_ids)
        room = self.room(prompt_tokens, max_tokens)
        with clock.phase("handoff_s"):
            cache = self.decoder.new_cache(kv, capacity=prompt_tokens + room)
            if len(last_ids) > 1:
                self.decoder.logits(list(last_ids[:-1]), cache)
        stream = self.tokenizer.detokenizer()
        pieces: list[str] = []
        tokens: list[int] = []
        steps, stop = 0, "length"

        def emit(piece: str) -> None:
            if piece:
                pieces.append(piece)
                if on_text is not None:
                    on_text(piece)

        with clock.phase("decode_s"):
            for step in generate(
                self.decoder, cache, last_ids[-1], eos_ids=self.eos_ids, max_tokens=room, sampling=sampling
            ):
                steps += 1
                stop = step.stop_reason or stop
                if step.stop_reason != "eos":
                    tokens.append(step.token_id)
                    emit(stream.push(step.token_id))
            emit(stream.finish())
        reason: StopReason = "eos" if stop == "eos" else "length" if room == max_tokens else "context"
        return Written("".join(pieces), tuple(tokens), reason, steps)

    def room(self, prompt_tokens: int, max_tokens: int) -> int:
        """How many of `max_tokens` the context allows; the last one of them is not fed any more.

        Raises:
            InputError: the prompt alone exceeds the context.
        """
        if self.context is None:
            return max_tokens
        if prompt_tokens > self.context:
            raise InputError(
                f"the prompt has {prompt_tokens} tokens, and what decodes it holds {self.context}; shorten it, or, "
                "with --decode package, build functions with a longer past"
            )
        return min(max_tokens, self.context + 1 - prompt_tokens)
