"""`pdconvert run`: a prompt through both halves of a build."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pdconvert.api import load
from pdconvert.runtime.chunks import plan_chunks
from pdconvert.runtime.clock import Clock
from pdconvert.runtime.embedding import HostEmbedding
from pdconvert.runtime.generate import Sampling
from pdconvert.runtime.handoff import KeysValues
from pdconvert.runtime.manifest import Manifest, read_manifest
from pdconvert.runtime.package_decode import PackageDecoder, decode_functions
from pdconvert.runtime.prefill import Prefill
from pdconvert.runtime.prefix_cache import BlockStore, DiskStore, PrefixCache, cache_seed
from pdconvert.runtime.sessions import Opener
from pdconvert.runtime.weights import DecodeWeights
from pdconvert.runtime.writer import OnText, StopReason, Writer

if TYPE_CHECKING:
    from pdconvert.runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class RunResult:
    """A generated text and how it came about.

    Attributes:
        text: the text, which is also what the pieces of the stream add up to.
        token_ids: generated tokens; an EOS that ended the text is not among them.
        prompt_tokens: length of the prompt, template and BOS included.
        stop_reason: "eos", "length", or "context" where the package that decodes holds no more tokens.
        executors: what ran each half, and why.
        timings: seconds of each phase, and decoded tokens per second.
        cached_tokens: prompt tokens that the prefix cache had; None without one.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    stop_reason: StopReason
    executors: dict[str, dict[str, str]]
    timings: dict[str, float]
    cached_tokens: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The object of `run --json`."""
        content = {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "prompt_tokens": self.prompt_tokens,
            "stop_reason": self.stop_reason,
            "executors": self.executors,
            "timings": {name: round(value, 4) for name, value in self.timings.items()},
        }
        return content if self.cached_tokens is None else {**content, "cached_tokens": self.cached_tokens}


@dataclass(frozen=True)
class PackageOptions:
    """How the package runs.

    Attributes:
        executor: "mil", "coreml" or "auto".
        mode: arithmetic of the MIL executor, "fp32" or "fp16".
        compute_units: where Core ML may run the package.
    """

    executor: str = "auto"
    mode: str = "fp32"
    compute_units: str = "cpu_and_ne"


@dataclass(frozen=True)
class Pair:
    """A build with both halves loaded.

    Attributes:
        manifest: of the build.
        package: the package, and what feeds it; counts its calls and the tokens that a prefix cache gave.
        writer: the tokenizer and what decodes.
        prefill_executor: what runs the package, and why.
    """

    manifest: Manifest
    package: Prefill
    writer: Writer
    prefill_executor: dict[str, str]

    @property
    def tokenizer(self) -> Tokenizer:
        """`encode(text, chat=False)` gives token ids, `detokenizer()` text."""
        return self.writer.tokenizer

    @classmethod
    def open(
        cls,
        build: Path,
        package: PackageOptions,
        *,
        decode: Literal["mlx", "package"] = "mlx",
        stores: Sequence[BlockStore] = (),
    ) -> Pair:
        """Loads both halves.

        Args:
            build: a build folder; one with the verdict "fail" is loaded too.
            package: how the package runs.
            decode: what decodes: the MLX weights, or the package alone.
            stores: where prefilled blocks are kept between prompts, fastest first.

        Raises:
            InputError: not a build, a part of it is missing or damaged, or its package cannot decode.
        """
        manifest = read_manifest(build)
        functions = decode_functions(manifest.functions.values()) if decode == "package" else None
        prefill, executor = open_prefill(manifest, package, stores)
        if functions is None:
            from pdconvert.executors.mlx import DecodeModel

            writer = Writer.open(manifest, DecodeModel.load(manifest.decode), manifest.max_positions)
        else:
            decoder = PackageDecoder(prefill, functions, executor)
            writer = Writer.open(manifest, decoder, decoder.context)
        return cls(manifest, prefill, writer, executor)

    def prefill(self, ids: Sequence[int]) -> KeysValues | None:
        """Run a prompt through the package.

        Args:
            ids: token ids, from one to `package.limit`.

        Returns:
            Keys and values of all tokens but the last, with which decode begins; None for a prompt of one token.

        Raises:
            InputError: no tokens, or more than the functions reach.
            CheckFailed: the package gives values that are not finite.
        """
        return self.package.run(ids)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = 0,
        chat: bool = False,
        on_text: OnText | None = None,
        clock: Clock | None = None,
    ) -> RunResult:
        """Continue a prompt.

        Args:
            prompt: the text, the user's message, or token ids.
            max_tokens: at most that many tokens.
            temperature, top_p, top_k, seed: how each is chosen; see `Sampling`.
            chat: put the prompt, a text, into the model's chat template.
            on_text: receives the text as it comes, in pieces that add up to the result's text.
            clock: to which the phases are added.

        Raises:
            InputError: an empty prompt, or one that is too long for the build.
            CheckFailed: a half gives values that are not finite.
        """
        sampling, clock = Sampling(temperature, top_p, top_k, seed), clock or Clock()
        with clock.phase("tokenize_s"):
            ids = self.tokenizer.encode(prompt, chat=chat) if isinstance(prompt, str) else list(prompt)
        self.writer.room(len(ids), max_tokens)
        cached = self.package.cached_tokens
        with clock.phase("prefill_s"):
            kv = self.prefill(ids)
        written = self.writer.write(
            kv, ids[-1:], max_tokens=max_tokens, sampling=sampling, clock=clock, on_text=on_text
        )
        return RunResult(
            written.text,
            written.token_ids,
            len(ids),
            written.stop_reason,
            {"prefill": self.prefill_executor, "decode": self.writer.decoder.describe()},
            written.timings(clock),
            self.package.cached_tokens - cached if self.package.cache else None,
        )


def open_prefill(
    manifest: Manifest, package: PackageOptions, stores: Sequence[BlockStore] = ()
) -> tuple[Prefill, dict[str, str]]:
    """The package, ready to prefill, and what runs it.

    Raises:
        InputError: the package or the embedding is missing or damaged.
    """
    options = {"kind": package.executor, "mode": package.mode, "compute_units": package.compute_units}
    opener = Opener(manifest, options)
    embedding = HostEmbedding(DecodeWeights(manifest.decode), manifest.embedding_scale)
    prefill = Prefill(manifest, embedding, lambda function: opener.open(function.name))
    session: Any = prefill.session(plan_chunks(manifest.functions.values(), 0, 1)[0].function)
    if stores:
        seed = cache_seed(manifest, session.kind, package.mode, package.compute_units)
        prefill.cache = PrefixCache(seed, stores)
    described = {"executor": session.kind, "reason": session.reason}
    return prefill, {**described, "mode": package.mode} if session.kind == "mil" else described


def disk_stores(folder: Path | None, limit_bytes: int) -> tuple[BlockStore, ...]:
    """The stores of `--prefix-cache FOLDER`: none without a folder."""
    return () if folder is None else (DiskStore(folder, limit_bytes),)


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
    on_text: OnText | None = None,
    **options: Any,
) -> RunResult:
    """Load a build and continue one prompt, loading timed too; `options` as of `pdconvert.load`."""
    Sampling(temperature, top_p, top_k, seed)  # refuses its values before the seconds that loading takes
    clock = Clock()
    with clock.phase("load_s"):
        pair = load(build, **options)
    return pair.generate(
        prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        chat=chat,
        on_text=on_text,
        clock=clock,
    )
