"""`pdconvert run`: a prompt through both halves of a build."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdconvert.runtime.chunks import plan_chunks
from pdconvert.runtime.embedding import HostEmbedding
from pdconvert.runtime.generate import Sampling, StopReason, generate
from pdconvert.runtime.manifest import Function, Manifest, read_manifest
from pdconvert.runtime.prefill import Prefill
from pdconvert.runtime.weights import DecodeWeights, read_config, read_json

if TYPE_CHECKING:
    from pdconvert.executors import Executor
    from pdconvert.executors.mlx import DecodeModel
    from pdconvert.runtime.tokenizer import Tokenizer

OnText = Callable[[str], None]
"""Receives each piece of text as soon as its characters are whole."""


@dataclass(frozen=True)
class RunResult:
    """A generated text and how it came about.

    Attributes:
        text: the text, which is also what the pieces of the stream add up to.
        token_ids: generated tokens; an EOS that ended the text is not among them.
        prompt_tokens: length of the prompt, template and BOS included.
        stop_reason: "eos" or "length".
        executors: what ran each half, and why.
        timings: seconds of each phase, and decoded tokens per second.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    stop_reason: StopReason
    executors: dict[str, dict[str, str]]
    timings: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """The object of `run --json`."""
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "prompt_tokens": self.prompt_tokens,
            "stop_reason": self.stop_reason,
            "executors": self.executors,
            "timings": {name: round(value, 4) for name, value in self.timings.items()},
        }


@dataclass
class Clock:
    """Seconds of named phases."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time of a block to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class Pair:
    """A build with both halves loaded.

    Attributes:
        manifest: of the build.
        tokenizer: of its decode folder.
        prefill: the package.
        decode: the MLX weights.
        prefill_executor: what runs the package, and why.
        eos_ids: tokens that end a text: of manifest, config, generation config and tokenizer together.
    """

    manifest: Manifest
    tokenizer: Tokenizer
    prefill: Prefill
    decode: DecodeModel
    prefill_executor: dict[str, str]
    eos_ids: frozenset[int]

    @classmethod
    def open(
        cls, build: Path, *, executor: str = "auto", mode: str = "fp32", compute_units: str = "cpu_and_ne"
    ) -> Pair:
        """Loads both halves.

        Args:
            build: a build folder; one with the verdict "fail" is loaded too.
            executor: "mil", "coreml" or "auto".
            mode: arithmetic of the MIL executor, "fp32" or "fp16".
            compute_units: where Core ML may run the package.

        Raises:
            InputError: not a build, or a part of it is missing or damaged.
        """
        from pdconvert.executors import open_executor
        from pdconvert.executors.mlx import DecodeModel
        from pdconvert.runtime.tokenizer import Tokenizer, eos_token_ids

        manifest = read_manifest(build)

        def open_function(function: Function) -> Executor:
            return open_executor(
                manifest.package, function.name, kind=executor, mode=mode, compute_units=compute_units
            )

        embedding = HostEmbedding(DecodeWeights(manifest.decode), manifest.embedding_scale)
        prefill = Prefill(manifest, embedding, open_function)
        session = prefill.session(plan_chunks(manifest.functions.values(), 0, 1)[0].function)
        tokenizer = Tokenizer(manifest.decode)
        generation = manifest.decode / "generation_config.json"
        named = eos_token_ids(
            read_config(manifest.decode),
            read_json(generation) if generation.exists() else {},
            tokenizer.eos_id,
        )
        decode = DecodeModel.load(manifest.decode)
        return cls(manifest, tokenizer, prefill, decode, _describe(session, mode), manifest.eos_ids | named)

    def run(
        self,
        prompt: str,
        *,
        max_tokens: int,
        sampling: Sampling,
        chat: bool = False,
        on_text: OnText | None = None,
        clock: Clock | None = None,
    ) -> RunResult:
        """Continues a prompt.

        Args:
            prompt: the text, or the user's message.
            max_tokens: at most that many tokens.
            sampling: how each token is chosen.
            chat: put the prompt into the model's chat template.
            on_text: receives the text as it comes, in pieces that add up to the result's text.
            clock: to which the phases are added.

        Raises:
            InputError: an empty prompt, or one that is too long for the build.
            CheckFailed: a half gives values that are not finite.
        """
        clock = clock or Clock()
        with clock.phase("tokenize_s"):
            ids = self.tokenizer.encode(prompt, chat=chat)
        with clock.phase("prefill_s"):
            kv = self.prefill.run(ids)
        with clock.phase("handoff_s"):
            cache = self.decode.new_cache(kv, capacity=len(ids) + max_tokens)
        stream = self.tokenizer.detokenizer()
        pieces: list[str] = []
        tokens: list[int] = []
        stop: StopReason = "length"

        def emit(piece: str) -> None:
            if piece:
                pieces.append(piece)
                if on_text is not None:
                    on_text(piece)

        with clock.phase("decode_s"):
            steps = generate(
                self.decode, cache, ids[-1], eos_ids=self.eos_ids, max_tokens=max_tokens, sampling=sampling
            )
            count = 0
            for step in steps:
                count += 1
                stop = step.stop_reason or stop
                if step.stop_reason != "eos":
                    tokens.append(step.token_id)
                    emit(stream.push(step.token_id))
            emit(stream.finish())
        executors = {"prefill": self.prefill_executor, "decode": self.decode.describe()}
        seconds = clock.seconds
        timings = {**seconds, "tokens_per_s": count / seconds["decode_s"]}
        return RunResult("".join(pieces), tuple(tokens), len(ids), stop, executors, timings)


def run_build(
    build: Path,
    prompt: str,
    *,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int | None = 0,
    chat: bool = False,
    executor: str = "auto",
    mode: str = "fp32",
    compute_units: str = "cpu_and_ne",
    on_text: OnText | None = None,
) -> RunResult:
    """Opens a build and continues one prompt; see `Pair.open`, `Pair.run` and `Sampling`."""
    sampling, clock = Sampling(temperature, top_p, top_k, seed), Clock()
    with clock.phase("load_s"):
        pair = Pair.open(build, executor=executor, mode=mode, compute_units=compute_units)
    return pair.run(prompt, max_tokens=max_tokens, sampling=sampling, chat=chat, on_text=on_text, clock=clock)


def _describe(session: Any, mode: str) -> dict[str, str]:
    """Which executor runs the package, and why."""
    described = {"executor": session.kind, "reason": session.reason}
    return {**described, "mode": mode} if session.kind == "mil" else described
