"""The pipeline, top to bottom: from a recipe to a verified pair in a build folder."""

from __future__ import annotations

import gc
import hashlib
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pdconvert import calibrate
from pdconvert.cache import open_cache
from pdconvert.cases import make_cases
from pdconvert.checks import verdict
from pdconvert.collection import uncollected
from pdconvert.compile import CompiledBlock, Compiler, StoredBlock
from pdconvert.emit.manifest import Cost, Emitted, manifest, write_json
from pdconvert.emit.mlx import check_store_equality, write_decode_folder
from pdconvert.emit.report_json import plain, report
from pdconvert.emit.vectors import GreedyCase, write_vectors
from pdconvert.fit import write_calibration_windows
from pdconvert.layer_tensors import as_in_checkpoint, by_checkpoint_name, join_rows
from pdconvert.ledger import Ledger
from pdconvert.lowering.contract import Part
from pdconvert.prepare import GREEDY_TOKENS, Plan, Texts, make_compiler, make_plan, make_texts, resolve_passes
from pdconvert.prepare_quantization import allocate_bits, calibration_tokens, learned_layers
from pdconvert.process import output_folder
from pdconvert.progress import Progress, peak_bytes
from pdconvert.proof import prove
from pdconvert.quant.store import DecodeStored
from pdconvert.recipe.passes import calibrated
from pdconvert.replaced import fp16_notes, size_notes
from pdconvert.report.load import BuildReport
from pdconvert.report.page import write_page
from pdconvert.report.summary import summary
from pdconvert.source_grid import SourceBlock, source_blocks
from pdconvert.sources import open_source
from pdconvert.split import package_parts, part_path

if TYPE_CHECKING:
    from pdconvert.cache import Cache
    from pdconvert.program import Pass
    from pdconvert.recipe import Recipe
    from pdconvert.runtime.tokenizer import Tokenizer


SCRATCH = (".cache", ".tokenizer")
"""Folders of a build in progress: a cache of its own with `--no-cache`, and the tokenizer that it measures with."""


@dataclass(frozen=True)
class BuildResult:
    """Where the build lies, its verdict ("pass" or "fail"), and a summary of at most 80 columns."""

    path: Path
    verdict: str
    summary: str


@torch.no_grad()
def build(
    recipe: Recipe,
    out: Path,
    *,
    force: bool = False,
    use_cache: bool = True,
    progress: Progress | None = None,
    device: str = "cpu",
) -> BuildResult:
    """Compile a recipe into `out`, verify what was written by running it, and report.

    Args:
        device: where calibrated passes compute, "cpu" or "cuda".

    Raises:
        InputError: the recipe or the checkpoint cannot be built; nothing is left behind.
    """
    started = time.monotonic()
    progress = progress or Progress.silent()
    done = len(progress.stages)
    source = open_source(recipe.source)
    plan = make_plan(recipe, source)
    with output_folder(out, force=force) as folder, open_cache(use_cache, folder / SCRATCH[0]) as cache:
        tokenizer = _tokenizer(plan, folder / SCRATCH[1])
        texts = make_texts(plan, tokenizer)
        hashes = source.hashes()
        plan = resolve_passes(plan, texts, cache, hashes)
        calibration_ids: tuple[tuple[int, ...], ...] = ()
        if calibrated(plan.passes):
            with progress.stage("calibration text"):
                calibration_ids = calibration_tokens(
                    plan,
                    tokenizer,
                    cache,
                    hashes,
                    device,
                    lambda steps: progress.bar(steps, "the model writes", unit="token"),
                )
            with progress.stage("bits of each linear"):
                plan = allocate_bits(
                    plan,
                    calibration_ids,
                    cache,
                    hashes,
                    device,
                    lambda layers: progress.bar(
                        layers, "sensitivity", total=len(plan.spec.layers), unit="layer"
                    ),
                )
            texts = texts.with_calibration(calibration_ids)
        plan = replace(plan, notes=(*plan.notes, *size_notes(plan)))
        compiler = make_compiler(plan, texts, hashes, calibration_ids, device)

        blocks = _compiled(compiler, cache, progress, "compile")
        decode_blocks: Sequence[StoredBlock | SourceBlock] = blocks
        if recipe.decode.grid == "own":
            no_graph: dict[str, tuple[Pass, ...]] = dict.fromkeys(compiler.graph_passes, ())
            own = replace(compiler, passes=plan.decode_passes, graph_passes=no_graph)
            decode_blocks = _compiled(own, cache, progress, "decode half")
        elif recipe.decode.grid == "source":
            decode_blocks = source_blocks(plan, blocks)
        ledger = Ledger([step for block in blocks for step in block.steps()])
        with progress.stage("greedy tokens of the reference"):
            greedy = _greedy(compiler, texts)
        with progress.stage("write the prefill package"):
            parts = _parts(plan, blocks)
            _write_packages(folder, plan, compiler, blocks, parts)
        with progress.stage("write the decode folder"):
            decode = write_decode_folder(
                folder / "decode", plan.decode_config, decode_tensors(plan, decode_blocks), source
            )
        plan = replace(plan, notes=(*plan.notes, *fp16_notes(decode.unquantized)))
        cases = make_cases(plan, texts, blocks, folder / "decode")
        write_vectors(folder / "test_vectors", cases, greedy)
        store_hash, eos = _store_hash(blocks), _eos(plan, tokenizer)
        text_used = calibrate.describe(recipe.calibration, source.random, calibration_ids)
        emitted = Emitted(
            plan,
            texts,
            hashes,
            blocks,
            decode_blocks,
            text_used,
            decode,
            store_hash,
            compiler.made_by(),
            parts,
            eos,
        )
        write_json(folder / "manifest.json", manifest(folder, emitted, "fail", Cost(0, 0)))

        with progress.stage("verify the shipped files"):
            check_store_equality(folder / "decode", decode_tensors(plan, decode_blocks))
            proof = prove(folder, plan, texts, compiler, blocks, cases, greedy, tokenizer, progress)
        if text_used and proof.fit:
            emitted = replace(emitted, calibration={**text_used, "fit": plain(proof.fit.to_json())})
            write_calibration_windows(folder, texts.calibration)
        proof.checks = ledger.gates(recipe.gates.adapted_db) + proof.checks
        outcome, stages = verdict(proof.checks), tuple(progress.stages[done:])
        cost = Cost(time.monotonic() - started, peak_bytes(), stages)
        content = report(folder, emitted, outcome, proof, ledger, cost)
        write_json(folder / "report" / "report.json", content)
        write_page(folder)
        about = manifest(folder, emitted, outcome, cost)
        write_json(folder / "manifest.json", about)
        text = summary(out, BuildReport(content, about))
        for scratch in SCRATCH:
            shutil.rmtree(folder / scratch, ignore_errors=True)
    return BuildResult(out, outcome, text)


def _compiled(compiler: Compiler, cache: Cache, progress: Progress, name: str) -> list[CompiledBlock]:
    """All blocks; where the quantizer learns, once as it rounds them and once more with what was learned."""

    def compiled(one: Compiler) -> list[CompiledBlock]:
        found = one.compile(cache)
        shown = progress.bar(found, name, total=one.depth + 2, unit="block", label=lambda block: block.name)
        return list(shown)

    with progress.stage(f"{name}: blocks"):
        blocks = compiled(compiler)
    steps = max((getattr(item, "learning_steps", 0) for item in compiler.passes), default=0)
    if not steps:
        return blocks
    with progress.stage(f"{name}: learn scales"):
        folder = learned_layers(
            compiler, blocks, cache, lambda items: progress.bar(items, "learn", total=steps, unit="step")
        )
    fixed = {
        block.name: (block.folder / "tensors.safetensors", folder / f"{block.name}.safetensors")
        for block in blocks
        if block.name.startswith("layers.")
    }
    with progress.stage(f"{name}: learned blocks"):
        return compiled(replace(compiler, fixed=fixed))


def _tokenizer(plan: Plan, folder: Path) -> Tokenizer | None:
    """The source's tokenizer, or None where it has none."""
    from pdconvert.runtime.tokenizer import Tokenizer

    if not plan.source.has_tokenizer:
        return None
    folder.mkdir()
    plan.source.write_tokenizer(folder)
    return Tokenizer(folder)


def _eos(plan: Plan, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    from pdconvert.runtime.tokenizer import eos_token_ids

    own = tokenizer.eos_id if tokenizer else None
    return tuple(sorted(eos_token_ids(plan.source.config, plan.source.generation_config, own)))


def _greedy(compiler: Compiler, texts: Texts) -> list[GreedyCase]:
    """The reference's continuations; none for random weights, whose choices mean nothing."""
    if not texts.windows:
        compiler.reference.release()
        return []
    found = compiler.reference.generate([ids for _, ids in texts.prompts], GREEDY_TOKENS)
    compiler.reference.release()
    return [
        GreedyCase(prompt, ids, tuple(one.token_ids), tuple(one.margins))
        for (prompt, ids), one in zip(texts.prompts, found, strict=True)
    ]


def _parts(plan: Plan, blocks: Sequence[CompiledBlock]) -> list[Part]:
    return package_parts(
        plan, {block.name: (block.folder / "tensors.safetensors").stat().st_size for block in blocks}
    )


def _write_packages(
    folder: Path, plan: Plan, compiler: Compiler, blocks: Sequence[CompiledBlock], parts: Sequence[Part]
) -> None:
    from pdconvert.quiet import quiet_coremltools

    quiet_coremltools()
    from pdconvert.emit.coreml import write_package
    from pdconvert.lowering.assemble import Lowering

    by_name, target = {block.name: block for block in blocks}, plan.recipe.prefill.target
    skeletons = compiler.skeletons(plan.interface.outputs)
    lowering = Lowering(plan.spec, skeletons, lambda name: by_name[name].tensors(), target, plan.interface)
    for index, part in enumerate(parts):
        path = folder / part_path(index, len(parts))
        with uncollected():
            write_package(
                path, lowering.program(plan.shapes, part), target, {"pdconvert.recipe": plan.recipe.name}
            )
        gc.collect()  # a program's blocks, ops and values refer to each other, and hold all its weights


def decode_tensors(
    plan: Plan, blocks: Sequence[StoredBlock | SourceBlock]
) -> Iterator[tuple[str, DecodeStored]]:
    """The decode half's tensors by their mlx-lm names, one block at a time."""
    for block in blocks:
        if isinstance(block, SourceBlock):
            yield from block.tensors().items()
            continue
        tensors = block.tensors()
        if block.name == "embedding":
            yield "model.embed_tokens.weight", tensors["weight"]
        elif block.name == "head":
            yield "model.norm.weight", as_in_checkpoint("norm.weight", tensors["norm.weight"], plan.spec)
            if not plan.tied:
                yield "lm_head.weight", tensors["lm_head.weight"]
                if plan.spec.head_bias:
                    yield "lm_head.bias", tensors["lm_head.bias"]
        else:
            index = int(block.name.split(".")[1])
            for source_name, names in by_checkpoint_name(plan.family, index, plan.spec).items():
                joined = join_rows([tensors[name] for name in names])
                yield source_name, as_in_checkpoint(source_name, joined, plan.spec)


def _store_hash(blocks: Sequence[CompiledBlock]) -> str:
    """SHA-256 over the names and stored bytes of all blocks."""
    total = hashlib.sha256()
    for block in blocks:
        with (block.folder / "tensors.safetensors").open("rb") as file:
            total.update(f"{block.name}:{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()
