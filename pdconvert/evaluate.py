"""How close a build's text comes to its source's: perplexity, KL divergence and agreement, through the shipped files.

windows of held-out text ─► source, layer by layer, fp32 ─────────────► reference logits ─┐
                    ├─► package: first half ─► K, V ─► MLX: second half ─► pair           ├─► scores
                    └─► MLX: whole window ───────────────────────────────► MLX alone ─────┘
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pdconvert import schema, text
from pdconvert.errors import InputError
from pdconvert.measure import kl_divergence_nats, mean_and_error
from pdconvert.prepare import make_plan
from pdconvert.recipe.load import recipe_from_data
from pdconvert.reference import Reference
from pdconvert.runtime.manifest import read_manifest
from pdconvert.sources import open_source

if TYPE_CHECKING:
    from pdconvert.runtime.tokenizer import Tokenizer

TOP = 5


@dataclass(frozen=True)
class Score:
    """One way of running a build against its source, over all scored positions.

    Attributes:
        tokens: scored positions.
        perplexity: of the build.
        perplexity_ratio: build over source; `perplexity_error` is the standard error of this ratio.
        kld_mean, kld_error, kld_median, kld_p99, kld_max: KL(source ‖ build) per position, nats.
        top1, top1_error: share of positions with the source's most likely token.
        top5: mean share of the source's five most likely tokens among the build's five.
    """

    tokens: int
    perplexity: float
    perplexity_ratio: float
    perplexity_error: float
    kld_mean: float
    kld_error: float
    kld_median: float
    kld_p99: float
    kld_max: float
    top1: float
    top1_error: float
    top5: float


@dataclass(frozen=True)
class Row:
    """What is kept of one window: a value per scored position."""

    source_nll: Tensor
    nll: Tensor
    kld: Tensor
    top1: Tensor
    top5: Tensor

    @classmethod
    def of(cls, expected: Tensor, got: Tensor, following: Tensor) -> Row:
        """Compare logits (n, V) whose next tokens are `following` (n,)."""
        losses = [
            torch.nn.functional.cross_entropy(value.double(), following, reduction="none")
            for value in (expected, got)
        ]
        wanted, found = (value.topk(TOP, dim=-1).indices for value in (expected, got))
        shared = (wanted[:, :, None] == found[:, None, :]).any(2).double().mean(1)
        same = (wanted[:, 0] == found[:, 0]).double()
        return cls(losses[0], losses[1], kl_divergence_nats(expected, got), same, shared)


def score(rows: Sequence[Row]) -> Score:
    """Summarise the rows of all windows."""
    parts = {name: torch.cat([getattr(row, name) for row in rows]) for name in Row.__dataclass_fields__}
    gap, gap_error = mean_and_error(parts["nll"] - parts["source_nll"])
    kld, kld_error = mean_and_error(parts["kld"])
    top1, top1_error = mean_and_error(parts["top1"])
    return Score(
        tokens=parts["kld"].numel(),
        perplexity=math.exp(parts["nll"].mean().item()),
        perplexity_ratio=math.exp(gap),
        perplexity_error=math.exp(gap) * gap_error,
        kld_mean=kld,
        kld_error=kld_error,
        kld_median=parts["kld"].median().item(),
        kld_p99=parts["kld"].quantile(0.99).item(),
        kld_max=parts["kld"].max().item(),
        top1=top1,
        top1_error=top1_error,
        top5=parts["top5"].mean().item(),
    )


def windows_of(ids: Sequence[int], count: int, width: int) -> list[list[int]]:
    """`count` windows of `width` tokens, evenly spread and without overlap.

    Raises:
        InputError: the text is too short.
    """
    if len(ids) < count * width:
        raise InputError(
            f"the text has {len(ids)} tokens, and {count} windows of {width} need {count * width}; give more text "
            "with --text, or fewer --windows"
        )
    stride = (len(ids) - width) // max(1, count - 1) if count > 1 else 0
    return [list(ids[start * stride : start * stride + width]) for start in range(count)]


@torch.no_grad()
def reference_hidden(reference: Reference, windows: Sequence[Sequence[int]]) -> Tensor:
    """(N, W, H): windows through all layers of the source, one layer in memory at a time."""
    hidden = torch.stack([reference.embed(window) for window in windows])
    for index in range(len(reference.spec.layers)):
        layer = reference.module(index, reference.read_layer(index))
        for window in range(len(windows)):
            hidden[window] = reference.run(layer, hidden[window : window + 1])[0][0]
    return hidden


def evaluate(
    build: Path,
    *,
    source: str | None = None,
    text_file: Path | None = None,
    windows: int = 24,
    executor: str = "auto",
    track: Callable[[Iterator[int]], Iterator[int]] = lambda items: items,
) -> dict[str, Any]:
    """Score a build on text, through its package and its decode weights.

    Args:
        source: where the checkpoint is, if not where the recipe says.
        text_file: UTF-8 text to score on; the help topics of the running Python by default.
        windows: how many; half of each is scored.
        track: wraps the loop over windows, for a progress bar.

    Returns:
        {"text", "windows", "width", "prefilled", "source": {...}, "pair": {...}, "mlx": {...}}.

    Raises:
        InputError: not a build, no checkpoint, or too little text.
    """
    from pdconvert.executors.mlx import DecodeModel
    from pdconvert.runtime.tokenizer import Tokenizer
    from pdconvert.verify import open_prefill

    manifest, content = read_manifest(build), schema.read_manifest(build)
    recipe = recipe_from_data(content["recipe"], where=f"{build / 'manifest.json'}: recipe")
    if source is not None:
        from pdconvert.recipe.source import parse_source

        recipe = recipe.model_copy(update={"source": parse_source(source, Path.cwd())})
    opened = open_source(recipe.source)
    if opened.hashes() != content["source"]["sha256"]:
        raise InputError(f"{opened.label} is not the checkpoint that {build} was made from; give --source")
    plan = make_plan(recipe, opened)
    reference = Reference(opened, plan.family, plan.spec)
    prefill = open_prefill(manifest, executor, "fp16")
    half = min(256, prefill.limit - 1, plan.spec.max_positions // 2)
    ids, digest = _text(Tokenizer(manifest.decode), text_file)
    chosen = windows_of(ids, windows, 2 * half)
    hidden = reference_hidden(reference, chosen)
    head = reference.head_tensors()
    decode = DecodeModel.load(manifest.decode, products="dequantized")
    rows: dict[str, list[Row]] = {"pair": [], "mlx": []}
    for index in track(iter(range(windows))):
        window = chosen[index]
        following = torch.tensor(window[half:])
        expected = reference.logits(hidden[index, half - 1 : -1], head)
        for name, found in rows.items():
            kv = prefill.run(window[:half]) if name == "pair" else None
            fed = window[half - 1 : -1] if name == "pair" else window[:-1]
            logits = torch.from_numpy(decode.logits(fed, decode.new_cache(kv)))[-half:]
            found.append(Row.of(expected, logits, following))
    losses = torch.cat([row.source_nll for row in rows["pair"]])
    return {
        "text": {"sha256": digest, "tokens": len(ids)},
        "windows": windows,
        "width": 2 * half,
        "prefilled": half,
        "bits_per_weight": content["quantization"]["bits_per_weight"],
        "source": {"perplexity": math.exp(losses.mean().item())},
        **{name: asdict(score(found)) for name, found in rows.items()},
    }


def _text(tokenizer: Tokenizer, path: Path | None) -> tuple[list[int], str]:
    if path is None:
        content, digest = text.held_out()
        return list(tokenizer.encode(content)), digest
    try:
        content = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--text: {path} cannot be read as UTF-8 text ({error})") from error
    return list(tokenizer.encode(content)), hashlib.sha256(content.encode()).hexdigest()
