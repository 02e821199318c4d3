"""The proof of a build: its shipped files are run, against test vectors and on held-out text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pdconvert.cases import graph_cache
from pdconvert.checks import Check
from pdconvert.compile import CompiledBlock, Compiler
from pdconvert.emit.vectors import Case, GreedyCase
from pdconvert.errors import CheckFailed
from pdconvert.fit import Fit
from pdconvert.headroom import Peaks
from pdconvert.ledger import CHECKPOINT, STORED
from pdconvert.prepare import Plan, Texts
from pdconvert.runtime.manifest import Manifest, read_manifest
from pdconvert.verify import (
    CaseRun,
    PerLayer,
    Scores,
    check_case,
    check_cost,
    check_pair,
    check_tokens,
    forced_choices,
    fp16_fault,
    measure_alone,
    measure_pair,
    open_prefill,
    per_layer_db,
)

if TYPE_CHECKING:
    from pdconvert.executors.mlx import DecodeModel
    from pdconvert.forensics import Fault
    from pdconvert.progress import Progress
    from pdconvert.runtime.prefill import Prefill
    from pdconvert.runtime.tokenizer import Tokenizer


@dataclass
class Proof:
    """What running the shipped files showed.

    Attributes:
        checks: the lines of the verdict.
        caches: K and V, layer by layer: `what`, `against`, `function`, `tensor`, `pooled_db`, `layers_db`.
        headroom: peaks of the first function in fp32, by block and part (`pdconvert.headroom`).
        fault: the first op at fault, where a function fails in fp16.
        scores: of the pair, and of MLX alone; None for random weights or where the pair could not run.
        fit: the loss on calibration text beside that on held-out text; None where nothing was calibrated.
        samples: continuations of source and pair: `prompt`, `tokens`, `common`, `source`, `pair`, `first_difference`.
    """

    checks: list[Check] = field(default_factory=list)
    caches: list[dict[str, Any]] = field(default_factory=list)
    headroom: list[dict[str, Any]] = field(default_factory=list)
    fault: Fault | None = None
    scores: tuple[Scores, Scores] | None = None
    fit: Fit | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)

    def add_caches(self, what: str, against: str, function: str, found: Mapping[str, PerLayer]) -> None:
        """Keep one comparison of K and V."""
        for tensor, one in found.items():
            where = {"what": what, "against": against, "function": function, "tensor": tensor}
            self.caches.append({**where, "pooled_db": one.pooled_db, "layers_db": list(one.layers_db)})


def prove(
    folder: Path,
    plan: Plan,
    texts: Texts,
    compiler: Compiler,
    blocks: Sequence[CompiledBlock],
    cases: Sequence[Case],
    greedy: Sequence[GreedyCase],
    tokenizer: Tokenizer | None,
    progress: Progress,
) -> Proof:
    """Run every function on its test vector in both arithmetics and, for real weights, the pair on held-out text."""
    shipped, proof = read_manifest(folder), Proof()
    reference, stored = (
        {side: graph_cache(blocks, f"{stream}.{side}") for side in ("k", "v")}
        for stream in ("reference", "stored")
    )
    for case in progress.bar(cases, "test vectors", unit="function", label=lambda case: case.name):
        _prove_case(proof, shipped, case, reference)
    if plan.quantized:
        cost = {
            side: per_layer_db(value, torch.from_numpy(stored[side]), shipped.layers, value.shape[-1])
            for side, value in reference.items()
        }
        proof.add_caches("stored weights", CHECKPOINT, "", cost)
        proof.checks += check_cost(cost, plan.recipe.gates.kv_db)
    if texts.windows:
        try:
            _prove_pair(proof, shipped, plan, texts, compiler, blocks, greedy, tokenizer, progress)
        except CheckFailed as error:
            proof.checks.append(Check("pair: measured", "share_equal", math.nan, 1.0, hint=str(error)))
    return proof


def _prove_case(proof: Proof, shipped: Manifest, case: Case, reference: Mapping[str, Any]) -> None:
    """One function in fp32 and in fp16; the first one's peaks; the first op at fault where fp16 fails."""
    peaks = Peaks()
    exact = check_case(shipped, case, "mil", "fp32", watch=None if proof.headroom else peaks.see)
    proof.headroom = proof.headroom or peaks.rows()
    rounded = check_case(shipped, case, "mil", "fp16")
    found = rounded.checks
    if not all(check.passed for check in found):
        fault = fp16_fault(shipped, case)
        proof.fault = proof.fault or fault
        found = [replace(check, hint=fault.sentence()) for check in found] if fault else found
    proof.checks += exact.checks + found
    for what, run in (("package in fp32", exact), ("package in fp16", rounded)):
        proof.add_caches(what, STORED, case.function, run.caches)
    if not shipped.functions[case.function].past:
        whole = _against(reference, rounded, case.tokens, shipped.layers)
        proof.add_caches("package in fp16", CHECKPOINT, case.function, whole)


def _against(reference: Mapping[str, Any], run: CaseRun, tokens: int, layers: int) -> dict[str, PerLayer]:
    """K and V of a function that starts at position 0 against the checkpoint's."""
    return {
        side: per_layer_db(value[..., :tokens], torch.as_tensor(run.outputs[side]), layers, tokens)
        for side, value in reference.items()
    }


def _prove_pair(
    proof: Proof,
    shipped: Manifest,
    plan: Plan,
    texts: Texts,
    compiler: Compiler,
    blocks: Sequence[CompiledBlock],
    greedy: Sequence[GreedyCase],
    tokenizer: Tokenizer | None,
    progress: Progress,
) -> None:
    """Prefill with the package, decode with the decode folder, against the reference."""
    from pdconvert.executors.mlx import DecodeModel

    prefill = open_prefill(shipped, "mil", "fp16")
    decode = DecodeModel.load(shipped.decode, products="dequantized")
    choices = forced_choices(prefill, decode, greedy)
    proof.checks.append(check_tokens(choices, greedy, None if plan.quantized else 1.0))
    for item, chosen in zip(greedy, choices, strict=True):
        if tokenizer is not None:
            continued = free_tokens(prefill, decode, item, chosen)
            proof.samples.append(sample(item, continued, tokenizer))
    head = compiler.reference.head_tensors()
    windows = blocks[-1].streams().windows

    def reference_logits(index: int) -> Tensor:
        return compiler.reference.logits(windows[index, texts.split - 1 :], head)

    def calibration_logits(index: int) -> Tensor:
        return reference_logits(len(texts.windows) + index)

    shown = progress.bar(texts.windows, "held-out text", total=len(texts.windows), unit="window")
    proof.scores = measure_pair(prefill, decode, shown, texts.split, reference_logits)
    pair, alone = (scores.agreement for scores in proof.scores)
    proof.checks += check_pair(pair, alone, plan.recipe.gates)
    if texts.calibration:
        shown = progress.bar(texts.calibration, "calibration text", unit="window")
        seen = measure_alone(decode, shown, calibration_logits)
        proof.fit = Fit.of(seen.kld, proof.scores[1].kld)
        name = "MLX alone, calibration text: KLD, mean"
        proof.checks.append(Check(name, "kld_nats", proof.fit.calibration, None))


def free_tokens(prefill: Prefill, decode: DecodeModel, item: GreedyCase, forced: Sequence[int]) -> list[int]:
    """The pair's own greedy continuation, as long as the reference's.

    Up to their first difference it is what the teacher-forced choices are; only from there on it is decoded.

    Args:
        forced: the pair's choices, given the reference's tokens.
    """
    count = next(
        (i for i, (a, b) in enumerate(zip(forced, item.token_ids, strict=True)) if a != b), len(forced)
    )
    tokens = list(forced[: count + 1])
    if len(tokens) == len(item.token_ids):
        return tokens
    cache, fed = decode.new_cache(prefill.run(item.prompt_ids)), [item.prompt_ids[-1], *tokens]
    while len(tokens) < len(item.token_ids):
        tokens.append(int(decode.logits(fed, cache)[-1].argmax()))
        fed = tokens[-1:]
    return tokens


def sample(item: GreedyCase, continued: Sequence[int], tokenizer: Tokenizer) -> dict[str, Any]:
    """Both continuations as text, cut where they part."""
    texts = [tokenizer.decode(list(ids)) for ids in (item.token_ids, continued)]
    same = next((i for i, (a, b) in enumerate(zip(item.token_ids, continued, strict=True)) if a != b), None)
    shared = 0
    if same is not None:
        shared = next(
            (i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts))
        )
    common = texts[0] if same is None else texts[0][:shared]
    rests = ["" if same is None else text[shared:] for text in texts]
    return {
        "prompt": item.prompt,
        "tokens": len(item.token_ids),
        "common": common,
        "source": rests[0],
        "pair": rests[1],
        "first_difference": same,
        "margin": None if same is None else item.margins[same],
    }
