"""`pdconvert prefill` and `pdconvert decode`: the two halves of a run apart, with a hand-off file between them.

The side that prefills needs the package and the embedding; the side that decodes needs the manifest and `decode/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdconvert.runtime.clock import Clock
from pdconvert.runtime.generate import Sampling
from pdconvert.runtime.layouts import Layout
from pdconvert.runtime.manifest import read_manifest
from pdconvert.runtime.pdkv import check_output, read_pdkv, write_pdkv
from pdconvert.runtime.pdkv_header import Header
from pdconvert.runtime.prefix_cache import DEFAULT_DISK_BYTES
from pdconvert.runtime.run import PackageOptions, RunResult, disk_stores, open_prefill
from pdconvert.runtime.writer import OnText, Writer


@dataclass(frozen=True)
class PrefillResult:
    """A hand-off file and how it came about.

    Attributes:
        path: the file.
        size_bytes: its size.
        header: what it says of itself.
        executor: what ran the package, and why.
        timings: seconds of each phase.
        cached_tokens: prompt tokens that the prefix cache had; None without one.
    """

    path: Path
    size_bytes: int
    header: Header
    executor: dict[str, str]
    timings: dict[str, float]
    cached_tokens: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The object of `prefill --json`."""
        content = {
            "path": str(self.path),
            "size_bytes": self.size_bytes,
            "prompt_tokens": self.header.prompt_tokens,
            "tokens": self.header.tokens,
            "blocks": self.header.blocks,
            "layout": self.header.layout,
            "executors": {"prefill": self.executor},
            "timings": {name: round(value, 4) for name, value in self.timings.items()},
        }
        return content if self.cached_tokens is None else {**content, "cached_tokens": self.cached_tokens}


def prefill_build(
    build: Path,
    prompt: str,
    out: Path,
    *,
    chat: bool = False,
    layout: Layout = "native",
    executor: str = "auto",
    mode: str = "fp32",
    compute_units: str = "cpu_and_ne",
    prefix_cache: Path | None = None,
    prefix_cache_bytes: int = DEFAULT_DISK_BYTES,
) -> PrefillResult:
    """Prefills one prompt with a build's package and writes its K and V into a hand-off file.

    Args:
        build: a build folder.
        prompt: the text, or the user's message.
        out: the file; an older hand-off file is replaced.
        chat: put the prompt into the model's chat template.
        layout: of the arrays in the file.
        executor, mode, compute_units: see `PackageOptions`.
        prefix_cache: a folder where prefilled blocks are kept.
        prefix_cache_bytes: what they may take.

    Raises:
        InputError: not a build, a damaged one, a prompt that it cannot take, or a place that cannot be written.
        CheckFailed: the package gives values that are not finite.
    """
    from pdconvert.runtime.tokenizer import Tokenizer

    check_output(out)
    clock = Clock()
    with clock.phase("load_s"):
        manifest = read_manifest(build)
        stores = disk_stores(prefix_cache, prefix_cache_bytes)
        prefill, described = open_prefill(manifest, PackageOptions(executor, mode, compute_units), stores)
        tokenizer = Tokenizer(manifest.decode)
    with clock.phase("tokenize_s"):
        ids = tokenizer.encode(prompt, chat=chat)
    with clock.phase("prefill_s"):
        kv = prefill.run(ids)
    with clock.phase("write_s"):
        header = Header.of(manifest, ids, kv.tokens if kv is not None else 0, layout)
        size = write_pdkv(out, header, kv)
    cached = prefill.cached_tokens if prefill.cache else None
    return PrefillResult(out, size, header, described, clock.seconds, cached)


def decode_build(
    build: Path,
    kv: Path,
    *,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int | None = 0,
    on_text: OnText | None = None,
) -> RunResult:
    """Goes on with the prompt of a hand-off file, with the MLX weights of a build.

    Args:
        build: a build folder, of which the manifest and `decode/` are used.
        kv: the hand-off file.
        max_tokens: at most that many tokens.
        temperature, top_p, top_k, seed: see `Sampling`.
        on_text: receives the text as it comes.

    Raises:
        InputError: not a build, or a file that is damaged or not of this build; the message names the field.
        CheckFailed: the weights give logits that are not finite.
    """
    from pdconvert.executors.mlx import DecodeModel

    sampling, clock = Sampling(temperature, top_p, top_k, seed), Clock()
    manifest = read_manifest(build)
    with clock.phase("read_s"):
        header, cache = read_pdkv(kv, manifest)
    with clock.phase("load_s"):
        writer = Writer.open(manifest, DecodeModel.load(manifest.decode), manifest.max_positions)
    written = writer.write(
        cache, header.last_token_ids, max_tokens=max_tokens, sampling=sampling, clock=clock, on_text=on_text
    )
    executors = {"prefill": {"executor": "file", "reason": str(kv)}, "decode": writer.decoder.describe()}
    return RunResult(
        written.text,
        written.token_ids,
        header.prompt_tokens,
        written.stop_reason,
        executors,
        written.timings(clock),
    )
