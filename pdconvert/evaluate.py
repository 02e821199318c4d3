"""How close a build's text comes to its source's: perplexity, KL divergence and agreement, through the shipped files.

windows of held-out text ─► source, layer by layer, fp32 ─────────────► reference logits ─┐
                    ├─► package: first half ─► K, V ─► MLX: second half ─► pair           ├─► scores
                    └─► MLX: first half ─────► K, V ─► MLX: second half ─► MLX alone ─────┘
                                               the two K, V and the two scores: the hand-off
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pdconvert import schema, text
from pdconvert.errors import InputError
from pdconvert.fit import Fit, read_calibration_windows
from pdconvert.measure import kl_divergence_nats, mean_and_error
from pdconvert.prepare import make_plan
from pdconvert.recipe.load import recipe_from_data
from pdconvert.reference import Reference
from pdconvert.runtime.manifest import read_manifest
from pdconvert.sources import open_source

if TYPE_CHECKING:
    from pdconvert.executors.mlx import DecodeModel

TOP = 5


@dataclass(frozen=True)
class Score:
    """One way of running a build against its source, over all scored positions.

    Errors are standard errors of means over windows (`pdconvert.measure.mean_and_error`).

    Attributes:
        tokens: scored positions.
        perplexity, perplexity_error: of the build.
        perplexity_ratio, perplexity_ratio_error: build over source.
        kld_mean, kld_error, kld_median, kld_p99, kld_max: KL(source ‖ build) per position, nats.
        top1, top1_error: share of positions with the source's most likely token.
        top5, top5_error: mean share of the source's five most likely tokens among the build's five.
    """

    tokens: int
    perplexity: float
    perplexity_error: float
    perplexity_ratio: float
    perplexity_ratio_error: float
    kld_mean: float
    kld_error: float
    kld_median: float
    kld_p99: float
    kld_max: float
    top1: float
    top1_error: float
    top5: float
    top5_error: float


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
    parts = {name: torch.stack([getattr(row, name) for row in rows]) for name in Row.__dataclass_fields__}
    perplexity, perplexity_error = perplexity_of(parts["nll"])
    ratio, ratio_error = perplexity_of(parts["nll"] - parts["source_nll"])
    kld, kld_error = mean_and_error(parts["kld"])
    top1, top1_error = mean_and_error(parts["top1"])
    top5, top5_error = mean_and_error(parts["top5"])
    values = parts["kld"].flatten()
    return Score(
        tokens=values.numel(),
        perplexity=perplexity,
        perplexity_error=perplexity_error,
        perplexity_ratio=ratio,
        perplexity_ratio_error=ratio_error,
        kld_mean=kld,
        kld_error=kld_error,
        kld_median=values.median().item(),
        kld_p99=values.quantile(0.99).item(),
        kld_max=values.max().item(),
        top1=top1,
        top1_error=top1_error,
        top5=top5,
        top5_error=top5_error,
    )


def perplexity_of(losses: Tensor) -> tuple[float, float]:
    """Perplexity and its standard error, of losses (windows, positions) in nats."""
    mean, error = mean_and_error(losses)
    return math.exp(mean), math.exp(mean) * error


@dataclass
class CacheNoise:
    """Power of MLX's own K and V, and of what the package's differ from them by, layer by layer, over windows."""

    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, own: Sequence[Any], given: Sequence[Any]) -> None:
        """Take in the caches of one window.

        Args:
            own, given: mlx-lm's caches by layer, filled by MLX and by the hand-off; both with all tokens so far.
        """
        for name in ("keys", "values"):
            rows = [_powers(name, *caches) for caches in zip(own, given, strict=True)]
            self.sums[name] = self.sums.get(name, torch.zeros(len(rows), 2).double()) + torch.stack(rows)

    def to_json(self) -> dict[str, Any]:
        """SQNR in dB: `k_db` and `v_db` over all layers, and of the worst layer with its number."""
        found: dict[str, Any] = {}
        for name, sums in self.sums.items():
            layers = 10 * torch.log10(sums[:, 0] / sums[:, 1])
            side, worst = name[0], int(layers.argmin())
            pooled = 10 * torch.log10(sums[:, 0].sum() / sums[:, 1].sum())
            found |= {f"{side}_db": pooled.item(), f"{side}_worst_db": layers[worst].item()}
            found[f"{side}_worst_layer"] = worst
        return found


def _powers(name: str, own: Any, given: Any) -> Tensor:
    """(2,): the sums of the squares of what MLX has, and of the difference, over tokens that both hold."""
    held = min(own.offset, getattr(given, "max_size", None) or own.offset)
    want, got = (
        torch.from_numpy(np.array(getattr(cache, name), np.float32)).double() for cache in (own, given)
    )
    want, got = want[:, :, own.offset - held : own.offset], got[:, :, :held]
    return torch.stack((want.square().sum(), (want - got).square().sum()))


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
    width: int | None = None,
    executor: str = "auto",
    track: Callable[[Iterator[int]], Iterator[int]] = lambda items: items,
) -> dict[str, Any]:
    """Score a build on text, through its package and its decode weights.

    Args:
        source: where the checkpoint is, if not where the recipe says.
        text_file: UTF-8 text to score on; the help topics of the running Python by default.
        windows: how many; half of each is scored.
        width: tokens of a window, the first half of which goes through the package, in chunks; by default 512, or as
            many as the package's functions and the model's positions reach.
        track: wraps the loop over windows, for a progress bar.

    Returns:
        {"text", "windows", "width", "prefilled", "source", "pair", "mlx", "hand_off", "fit"}, see docs/contracts.md.

    Raises:
        InputError: not a build, no checkpoint, too little text, or windows that the package cannot hold.
    """
    from pdconvert.executors.mlx import DecodeModel
    from pdconvert.runtime.tokenizer import Tokenizer
    from pdconvert.verify import open_prefill

    manifest, content = read_manifest(build), schema.read_manifest(build)
    reference = _reference(build, content, source)
    prefill = open_prefill(manifest, executor, "fp16")
    half = _half(width, prefill.limit - 1, reference.spec.max_positions)
    scored, digest = text.to_score(text_file)
    ids = Tokenizer(manifest.decode).encode(scored)
    chosen = windows_of(ids, windows, 2 * half)
    hidden = reference_hidden(reference, chosen)
    head = reference.head_tensors()
    decode = DecodeModel.load(manifest.decode, products="dequantized")
    rows: dict[str, list[Row]] = {"pair": [], "mlx": []}
    noise = CacheNoise()
    for index in track(iter(range(windows))):
        window = chosen[index]
        own, given = decode.new_cache(), decode.new_cache(prefill.run(window[:half]))
        decode.take_up(window[: half - 1], own)
        noise.add(own, given)
        expected = reference.logits(hidden[index, half - 1 : -1], head)
        for name, cache in (("pair", given), ("mlx", own)):
            logits = torch.from_numpy(decode.logits(window[half - 1 : -1], cache))
            rows[name].append(Row.of(expected, logits, torch.tensor(window[half:])))
    losses = torch.stack([row.source_nll for row in rows["pair"]])
    difference = torch.stack([pair.kld - mlx.kld for pair, mlx in zip(*rows.values(), strict=True)])
    return {
        "text": {"sha256": digest, "tokens": len(ids)},
        "windows": windows,
        "width": 2 * half,
        "prefilled": half,
        "bits_per_weight": content["quantization"]["bits_per_weight"],
        "source": dict(zip(("perplexity", "perplexity_error"), perplexity_of(losses), strict=True)),
        **{name: asdict(score(found)) for name, found in rows.items()},
        "hand_off": {
            **dict(zip(("kld", "kld_error"), mean_and_error(difference), strict=True)),
            **noise.to_json(),
        },
        "fit": _fit(build, reference, decode, torch.stack([row.kld for row in rows["mlx"]])),
    }


def _reference(build: Path, content: dict[str, Any], source: str | None) -> Reference:
    """The checkpoint that a build was made from."""
    recipe = recipe_from_data(content["recipe"], where=f"{build / 'manifest.json'}: recipe")
    if source is not None:
        from pdconvert.recipe.source import parse_source

        recipe = recipe.model_copy(update={"source": parse_source(source, Path.cwd())})
    opened = open_source(recipe.source)
    if opened.hashes() != content["source"]["sha256"]:
        raise InputError(f"{opened.label} is not the checkpoint that {build} was made from; give --source")
    plan = make_plan(recipe, opened)
    return Reference(opened, plan.family, plan.spec)


def _half(width: int | None, prefilled: int, positions: int) -> int:
    """Half of a window: what goes through the package, and what is scored."""
    longest = min(prefilled, positions // 2)
    if width is None:
        return min(256, longest)
    if width // 2 > longest:
        raise InputError(
            f"--width {width}: the functions of this build and the model's positions hold windows of {2 * longest} "
            "tokens; give fewer, or build with a function that has a longer past"
        )
    return width // 2


def _fit(build: Path, reference: Reference, decode: DecodeModel, held_out: Tensor) -> dict[str, Any] | None:
    """The loss of MLX alone on the build's calibration text beside that on the text at hand."""
    from pdconvert.verify import measure_alone

    windows = read_calibration_windows(build)
    if not windows:
        return None
    hidden, head = reference_hidden(reference, windows), reference.head_tensors()
    half = len(windows[0]) // 2
    seen = measure_alone(decode, windows, lambda index: reference.logits(hidden[index, half:], head))
    return Fit.of(seen.kld, held_out).to_json()
