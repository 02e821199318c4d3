"""What is decided before any weight is read: geometry, passes in their places, texts as tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pdconvert import families, text
from pdconvert.basis import Basis
from pdconvert.blocks import stream_inputs
from pdconvert.cache import content_key
from pdconvert.compile import Compiler, code_hash
from pdconvert.errors import InputError
from pdconvert.fit import windows_of_calibration
from pdconvert.forms import Forms
from pdconvert.inventory import check_inventory
from pdconvert.lowering.contract import STATE_STEP, FunctionShape, Interface, state_columns
from pdconvert.model import ModelSpec
from pdconvert.pass_checks import check_order, rotates
from pdconvert.program import Pass
from pdconvert.quant.grid import fitting_group
from pdconvert.ranges import Ranges, measure_ranges
from pdconvert.reference import Reference
from pdconvert.source_grid import EMBEDDING, check_source_grid, keeps_grid
from pdconvert.sources.base import Source

if TYPE_CHECKING:
    from passes import QuantizeWeights
    from pdconvert.cache import Cache
    from pdconvert.recipe import Recipe
    from pdconvert.runtime.tokenizer import Tokenizer

GREEDY_TOKENS = 16
"""Tokens of the reference after each prompt."""


@dataclass(frozen=True)
class Plan:
    """A recipe and a source, resolved and checked against each other.

    Attributes:
        shapes: the functions to write.
        decode_config: the mlx-lm config of the decode folder.
        notes: what was left out of the checkpoint, decided by measuring, or replaced by what fits, and why.
    """

    recipe: Recipe
    source: Source
    family: ModuleType
    spec: ModelSpec
    shapes: tuple[FunctionShape, ...]
    decode_config: dict[str, Any]
    passes: tuple[Pass, ...]
    notes: tuple[str, ...]

    @property
    def shared_passes(self) -> tuple[Pass, ...]:
        """Passes whose weights both halves store."""
        return tuple(item for item in self.passes if not _graph_only(item))

    @property
    def decode_passes(self) -> tuple[Pass, ...]:
        """The passes of the MLX half where it has a grid of its own."""
        from passes import QuantizeWeights

        decode = self.recipe.decode
        return tuple(
            replace(
                item,
                scheme="w4a16" if decode.bits == 4 else "w8a16",
                form="integer",
                granularity="per_group",
                group_size=decode.group_size or 0,
                bits={},
                force=True,
            )
            if isinstance(item, QuantizeWeights)
            else item
            for item in self.shared_passes
        )

    def graph_passes(self, block: str) -> tuple[Pass, ...]:
        """Passes of the prefill graph alone, after those; the last ones realise the recipe's prefill section."""
        from passes import FixShapes, SplitHead, TruncateLastLayer

        chosen = tuple(item for item in self.passes if _graph_only(item))
        if block == "head":
            prefill = self.recipe.prefill
            long = prefill.outputs == "logits" and self.spec.vocab_size > prefill.head_limit
            return (*chosen, SplitHead(prefill.head_limit)) if long else chosen
        if block == f"layers.{len(self.spec.layers) - 1}" and self.recipe.prefill.outputs == "kv":
            chosen = (*chosen, TruncateLastLayer())
        return (*chosen, FixShapes(tokens=max(shape.tokens for shape in self.shapes if not shape.past)))

    @property
    def basis(self) -> Basis | None:
        """Of the residual stream in both halves; None is the checkpoint's."""
        from passes import RotateResidual

        seeds = [item.seed for item in self.passes if isinstance(item, RotateResidual)]
        return Basis(self.spec.hidden_size, seeds[0]) if seeds else None

    @property
    def tied(self) -> bool:
        """Whether the head's weights are the embedding's in both halves."""
        return self.spec.tied and self.basis is None

    @property
    def embedding_scale(self) -> float:
        """Factor on the embedding rows that enter the graph."""
        from passes import ScaleResidual

        factors = [float(item.factor) for item in self.passes if isinstance(item, ScaleResidual)]
        return self.spec.embedding_scale * (factors[0] if factors else 1.0)

    @property
    def interface(self) -> Interface:
        """The package's choice of inputs and outputs."""
        prefill = self.recipe.prefill
        columns = state_columns(self.shapes) if prefill.kv.storage == "state" else 0
        return Interface(prefill.embedding, prefill.outputs, prefill.logits, columns, prefill.head_limit)

    @property
    def decode_only_matrices(self) -> bool:
        """Whether embedding and head are in the MLX half only, and may take its finer grid."""
        return self.recipe.prefill.embedding == "host" and self.recipe.prefill.outputs == "kv"

    @property
    def quantized(self) -> bool:
        return any(getattr(item, "scheme", "none") != "none" for item in self.passes)


@dataclass(frozen=True)
class Texts:
    """Token ids of what a build measures on.

    Attributes:
        probe: what blocks are run on.
        windows: held-out text; the first `split` tokens of each go through the package. Empty for random weights.
        prompts: (text, ids) of the prompts whose continuations are compared. Empty without a tokenizer.
        hash: SHA-256 of the held-out text.
        calibration: windows of the calibration text, as long as those, to compare the loss on both.
    """

    probe: tuple[int, ...]
    windows: tuple[tuple[int, ...], ...]
    split: int
    prompts: tuple[tuple[str, tuple[int, ...]], ...]
    hash: str
    calibration: tuple[tuple[int, ...], ...] = ()

    def with_calibration(self, sequences: Sequence[Sequence[int]]) -> Texts:
        """As many windows of calibration text as there are of held-out text."""
        if not self.windows:
            return self
        found = windows_of_calibration(sequences, len(self.windows), len(self.windows[0]))
        return replace(self, calibration=tuple(map(tuple, found)))


def make_plan(recipe: Recipe, source: Source, *, complete: bool = True) -> Plan:
    """Resolve a recipe against a source.

    Args:
        complete: whether the source must hold the model's tensors and a tokenizer; its config alone decides
            everything else.

    Raises:
        InputError: the model, or the combination of options, cannot be built.
    """
    from passes import AUTOMATIC, QuantizeWeights
    from pdconvert.runtime.tokenizer import eos_token_ids

    with _about(source):
        family = families.get(source.config)
        spec = family.read_config(source.config)
        check_order(recipe.passes)
        rotated = rotates(recipe, spec)
        shipped = replace(spec, tied=False) if rotated else spec
        decode_config = family.decode_config(source.config, shipped)
        eos_token_ids(source.config, source.generation_config, None)
    notes = check_inventory(source, family, spec) if complete else []
    if complete:
        source.require_tokenizer()
    prefill = recipe.prefill
    listed = {item.name for item in recipe.passes}
    for name in sorted(listed & set(AUTOMATIC)):
        raise InputError(
            f"recipe: the pipeline puts {name} in itself, from the prefill section; take it out of passes"
        )
    if "rope_as_input" not in listed:
        raise InputError(
            "recipe: rope_as_input cannot be left out, since rope_cos and rope_sin are graph inputs"
        )
    for item in recipe.passes:
        if isinstance(item, QuantizeWeights):
            _check_form(item, prefill.target)
    if recipe.decode.grid == "own" and not any(
        getattr(item, "scheme", "none") != "none" for item in recipe.passes
    ):
        raise InputError(
            "recipe: decode.grid own needs passes.quantize_weights; use decode.grid shared for fp16 weights"
        )
    if all(function.past for function in prefill.functions):
        raise InputError("recipe: prefill.functions needs one without past tokens, such as {tokens: 128}")
    channels = spec.kv_heads * spec.head_dim
    if prefill.kv.storage == "state" and channels % STATE_STEP and channels & (channels - 1):
        raise InputError(
            f"recipe: prefill.kv.storage state: the model has {channels} channels of keys (kv_heads · head_dim), and a "
            f"state's axis must be a multiple of {STATE_STEP} or a power of two (coremltools#2631); use io"
        )
    if shipped.tied and recipe.decode.embedding_bits != recipe.decode.head_bits:
        raise InputError(
            f"recipe: decode.embedding_bits {recipe.decode.embedding_bits} and decode.head_bits "
            f"{recipe.decode.head_bits} differ, but the checkpoint ties the two; set both to the same"
        )
    for function in prefill.functions:
        if function.tokens + function.past > spec.max_positions:
            raise InputError(
                f"recipe: {function.name} reaches position {function.tokens + function.past}, the model ends at "
                f"{spec.max_positions} (max_position_embeddings); give prefill.functions fewer tokens or past"
            )
    shapes = tuple(FunctionShape(function.tokens, function.past) for function in prefill.functions)
    passes = tuple(recipe.passes)
    if "quantize_weights" not in listed:
        passes = (*passes, QuantizeWeights(scheme="none"))
    plan = Plan(recipe, source, family, spec, shapes, decode_config, passes, tuple(notes))
    if recipe.decode.grid == "source" and complete:
        check_source_grid(plan)
    return plan


def _check_form(item: QuantizeWeights, target: str) -> None:
    """Whether the package can hold the form of the weights.

    Raises:
        InputError: it cannot, or it is reported wrong on the ANE and not forced.
    """
    if item.scheme == "none":
        return
    if item.sizes == "per_group" and not item.force:
        asked = "form lpbq" if item.form == "lpbq" else "granularity per_group"
        raise InputError(
            f"recipe: quantize_weights.{asked} is not for the package: integer weights in groups are "
            "reported silently wrong on the ANE (coremltools#2510); use per_channel, or force: true where the "
            "package runs elsewhere"
        )
    if target != "iOS18" and (item.form != "integer" or item.scheme != "w8a16" or item.sizes == "per_group"):
        raise InputError(
            f"recipe: quantize_weights {item.scheme} {item.form} {item.sizes} needs prefill.target iOS18, not {target}"
        )


@runtime_checkable
class ResolvesAuto(Protocol):
    """A pass with an option `auto`."""

    def resolve(self, ranges: Ranges) -> tuple[Pass | None, str]:
        """The pass with its option chosen, or None where it is not needed, and why."""


@contextmanager
def _about(source: Source) -> Iterator[None]:
    """Say of which source the config is that an error speaks of."""
    try:
        yield
    except InputError as error:
        error.add_note(f"source: {source.label}")
        raise


def resolve_passes(plan: Plan, texts: Texts, cache: Cache, hashes: dict[str, str]) -> Plan:
    """Decide every `auto` option of a pass on measured ranges; what was decided, and why, becomes a note."""
    if not any("auto" in vars(item).values() for item in plan.passes):
        return plan
    ranges = _ranges(plan, texts, cache, hashes)
    passes: list[Pass] = []
    notes = list(plan.notes)
    for item in plan.passes:
        if not isinstance(item, ResolvesAuto) or "auto" not in vars(item).values():
            passes.append(item)
            continue
        chosen, why = item.resolve(ranges)
        notes.append(f"{item.name}: {why}")
        if chosen is not None:
            passes.append(chosen)
    return replace(plan, passes=tuple(passes), notes=tuple(notes))


def _ranges(plan: Plan, texts: Texts, cache: Cache, hashes: dict[str, str]) -> Ranges:
    """The ranges of the checkpoint on this build's texts, measured once."""
    key = content_key(code_hash(), hashes, plan.source.config, texts.probe, texts.windows, plan.basis)
    folder = cache.get(key)
    if folder is None:
        reference = Reference(plan.source, plan.family, plan.spec)
        sequences = [texts.probe, *texts.windows, *(ids for _, ids in texts.prompts)]
        ranges = measure_ranges(reference, sequences, stream_inputs(plan.spec.layers[0]), plan.basis)
        folder = cache.put(key, ranges.write)
    return Ranges.read(folder)


def make_texts(plan: Plan, tokenizer: Tokenizer | None) -> Texts:
    """Tokenize the project's texts, or draw seeded tokens where there is no tokenizer."""
    from pdconvert.runtime.chunks import reach

    chunk = max(shape.tokens for shape in plan.shapes if not shape.past)
    past = max(shape.past for shape in plan.shapes)
    # One call is padded; with a past there are two, the second on the whole first and padded.
    length = (
        min(chunk + chunk * 3 // 4 if past >= chunk else chunk - chunk // 16, plan.spec.max_positions) or 1
    )
    split = min(2 * chunk if past >= chunk else chunk, reach(plan.shapes) or chunk)
    if tokenizer is None:
        draw = random.Random(0)
        return Texts(tuple(draw.randrange(plan.spec.vocab_size) for _ in range(length)), (), split, (), "")
    probe = _repeat(tokenizer.encode(plan.recipe.probe.text or text.PROBE), length)
    prompts = tuple((prompt, tuple(tokenizer.encode(prompt)[:chunk])) for prompt in text.PROMPTS)
    if plan.source.random:
        return Texts(probe, (), split, prompts, "")
    held_out, digest = text.held_out()
    # As many tokens are scored whatever the functions reach, so that gates mean the same in every build.
    width, count = min(split + chunk, plan.spec.max_positions), plan.recipe.probe.eval_windows
    ids = tokenizer.encode(held_out)
    if width <= split:
        raise InputError(
            f"{plan.source.label}: the model's {plan.spec.max_positions} positions leave nothing to score after "
            f"{split} tokens of prefill; give prefill.functions at most {plan.spec.max_positions // 2} tokens"
        )
    if len(ids) - width < count - 1:
        raise InputError(
            f"recipe: probe.eval_windows {count}: the held-out text has {len(ids)} tokens, which give "
            f"{max(0, len(ids) - width + 1)} windows of {width}; ask for fewer"
        )
    stride = max(1, (len(ids) - width) // count)
    windows = tuple(tuple(ids[start : start + width]) for start in range(0, stride * count, stride))
    return Texts(probe, windows, split, prompts, digest)


def _repeat(ids: list[int], length: int) -> tuple[int, ...]:
    if not ids:
        raise InputError("recipe: probe.text has no token; give at least one word")
    return tuple((ids * (length // len(ids) + 1))[:length])


def _graph_only(item: Pass) -> bool:
    return getattr(item, "graph_only", False)


def make_forms(plan: Plan) -> Forms:
    """The forms of a plan's blocks."""
    from passes import QuantizeWeights

    structural = ["linear_to_conv2d", "safe_rms_norm", "rotate_residual"]
    structural += ["fold_norm_gain"] * (not plan.tied)
    head = [item for item in plan.passes if item.name in structural]
    head.append(
        QuantizeWeights(
            scheme="none" if plan.recipe.decode.head_bits == 16 else "w8a16",
            granularity="per_group" if plan.decode_only_matrices else "per_channel",
        )
    )
    names = [*(f"layers.{index}" for index in range(len(plan.spec.layers))), "head"]
    graph_passes = {name: plan.graph_passes(name) for name in names}
    raw_keys = plan.recipe.prefill.kv.rope == "raw"
    return Forms(plan.spec, plan.shared_passes, tuple(head), graph_passes, raw_keys)


def make_compiler(
    plan: Plan,
    texts: Texts,
    hashes: dict[str, str],
    calibration_ids: tuple[tuple[int, ...], ...] = (),
    device: str = "cpu",
) -> Compiler:
    """The compiler of a plan's blocks."""
    decode = plan.recipe.decode
    assert decode.embedding_bits is not None and decode.head_bits is not None, "the recipe was not resolved"
    forms = make_forms(plan)
    return Compiler(
        reference=Reference(plan.source, plan.family, plan.spec),
        passes=forms.passes,
        head_passes=forms.head_passes,
        graph_passes=forms.graph_passes,
        embedding_bits=32 if keeps_grid(plan, EMBEDDING) else decode.embedding_bits,
        embedding_group=fitting_group(plan.spec.hidden_size) if plan.decode_only_matrices else 0,
        raw_keys=forms.raw_keys,
        basis=plan.basis,
        probe_ids=texts.probe,
        window_ids=texts.windows + texts.calibration,
        source_hashes=hashes,
        calibration_ids=calibration_ids,
        device=device,
    )
