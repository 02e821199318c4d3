"""Checks that run the shipped files: the package in both arithmetics, the decode folder, and the pair."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pdconvert import schema
from pdconvert.checks import Check, verdict
from pdconvert.emit.vectors import Case, GreedyCase, read_vectors
from pdconvert.measure import kl_divergence_nats, mean_and_error, sqnr_db
from pdconvert.runtime.manifest import Manifest, read_manifest
from pdconvert.runtime.sessions import Opener, open_function

if TYPE_CHECKING:
    from pdconvert.executors.mlx import DecodeModel
    from pdconvert.forensics import Fault
    from pdconvert.recipe.model import Gates
    from pdconvert.runtime.prefill import Prefill

NEAR_TIE = 0.05
"""Positions whose two best reference logits are closer than this do not count as different."""


@dataclass(frozen=True)
class PerLayer:
    """SQNR of one output of the package, pooled over all layers and of the worst one."""

    pooled_db: float
    worst_db: float
    worst_layer: int


def per_layer_db(expected: np.ndarray, got: Tensor, layers: int, tokens: int) -> PerLayer:
    """Compare caches (1, L·heads, D, S) on their real columns."""
    want = torch.from_numpy(np.ascontiguousarray(expected[..., :tokens])).float()
    have = got[..., :tokens].float()
    by_layer = [
        sqnr_db(a, b) for a, b in zip(want.reshape(layers, -1), have.reshape(layers, -1), strict=True)
    ]
    broken = [index for index, value in enumerate(by_layer) if math.isnan(value)]
    worst = broken[0] if broken else int(np.argmin(by_layer))
    return PerLayer(sqnr_db(want, have), by_layer[worst], worst)


def fp16_fault(manifest: Manifest, case: Case) -> Fault | None:
    """Trace a case in both arithmetics and name the first op at fault."""
    from pdconvert.executors.mil import Package
    from pdconvert.executors.mil.trace import Tracer
    from pdconvert.forensics import find_fault

    inputs: dict[str, Any] = dict(case.inputs)
    for part in manifest.parts_of(case.function):
        rows = slice(part.first * manifest.kv_heads, part.last * manifest.kv_heads)
        taken = {
            name: inputs[name][:, rows] if name.startswith("past_") else inputs[name] for name in part.inputs
        }
        tracer = Tracer(Package.open(part.package), case.function, weight_cache_bytes=0)
        tracer.set_states(case.states)
        trace = tracer.run(taken)
        fault = find_fault(trace.rows, manifest.made_by)
        if fault is not None:
            return fault
        inputs["hidden"] = trace.outputs.get("next_hidden")
    return None


def check_case(manifest: Manifest, case: Case, executor: str, mode: str) -> list[Check]:
    """Run one function of the package on a case's inputs; one check per output."""
    session = open_function(manifest, case.function, kind=executor, mode=mode, weight_cache_bytes=0)
    state = session.make_state() if case.states else None
    for name, held in case.states.items():
        session.write_state(state, name, held)
    got = session.run(case.inputs, state)
    label = f"{session.kind} {mode}" if session.kind == "mil" else session.kind
    checks = []
    for name in case.states:
        side = name.partition("_")[0]
        after = torch.from_numpy(state_after(case, name, case.expected[side]))
        db = sqnr_db(after, torch.from_numpy(session.read_state(state, name)).float())
        checks.append(
            Check(f"{case.name}, {label}: {name}", "sqnr_db", db, _floor(case, side, session.kind, mode))
        )
    for name in ("k", "v"):
        floor = _floor(case, name, session.kind, mode)
        value = torch.as_tensor(got[name])
        found = per_layer_db(case.expected[name], value, manifest.layers, case.tokens)
        where = f"lowest in layer {found.worst_layer} ({found.worst_db:.1f} dB)"
        checks.append(
            Check(f"{case.name}, {label}: {name} worst layer", "sqnr_db", found.worst_db, floor, hint=where)
        )
        checks.append(Check(f"{case.name}, {label}: {name} pooled", "sqnr_db", found.pooled_db, floor))
    function = manifest.functions[case.function]
    ports = [port.name for port in function.outputs if port.role == "logits"]
    if ports:
        db = logits_db(function.logits(case.expected), function.logits(got), case.tokens)
        floor = min(_floor(case, name, session.kind, mode) for name in ports)
        checks.append(Check(f"{case.name}, {label}: logits", "sqnr_db", db, floor))
    return checks


def _floor(case: Case, output: str, kind: str, mode: str) -> float:
    return case.tolerances[output][mode if kind == "mil" else "fp16"]


def logits_db(expected: np.ndarray, got: np.ndarray, tokens: int) -> float:
    """SQNR of logits (1, V, 1, n), real rows only, without what is added to all of a row, which no softmax sees."""
    centred = []
    for logits in (expected, got):
        rows = torch.from_numpy(logits)[0, :, 0, : tokens if logits.shape[3] > 1 else 1]
        centred.append(rows - rows.mean(0))
    return sqnr_db(*centred)


def state_after(case: Case, name: str, new: np.ndarray) -> np.ndarray:
    """What a state (L, H·D, 1, N) must hold after a case: new keys or values (1, L·H, D, S) where `write` says."""
    columns = case.inputs["write"][0, 0].argmax(1)[: case.tokens]
    after = np.array(case.states[name], np.float32)
    after[..., columns] = new[..., : case.tokens].reshape(*after.shape[:3], -1)
    return after


def check_tokens(
    prefill: Prefill, decode: DecodeModel, greedy: Sequence[GreedyCase], floor: float | None
) -> Check:
    """Teacher-forced agreement of the pair with the reference's greedy tokens, as a share of what counts."""
    equal = counted = 0
    for item in greedy:
        kv = prefill.run(item.prompt_ids)
        fed = [item.prompt_ids[-1], *item.token_ids[:-1]]
        logits = decode.logits(fed, decode.new_cache(kv))
        for choice, wanted, margin in zip(logits.argmax(-1), item.token_ids, item.margins, strict=True):
            if margin >= NEAR_TIE:
                counted += 1
                equal += int(choice == wanted)
    share = equal / counted if counted else math.nan
    return Check(f"pair: greedy tokens ({equal} of {counted})", "share_equal", share, floor)


@dataclass(frozen=True)
class Agreement:
    """How the next-token distributions of two models agree over scored positions."""

    kld_mean: float
    kld_error: float
    kld_p99: float
    top1: float
    positions: int

    @property
    def kld_upper(self) -> float:
        """Upper end of the 95 % interval of the mean KLD, nats."""
        return self.kld_mean + 1.96 * self.kld_error

    @classmethod
    def of(cls, divergences: Tensor, agreements: Tensor) -> Agreement:
        mean, error = mean_and_error(divergences)
        return cls(
            mean,
            error,
            divergences.quantile(0.99).item(),
            agreements.double().mean().item(),
            agreements.numel(),
        )


def measure_pair(
    prefill: Prefill,
    decode: DecodeModel,
    windows: Sequence[Sequence[int]],
    split: int,
    reference_logits: Callable[[int], Tensor],
) -> tuple[Agreement, Agreement]:
    """The pair and MLX alone against the reference, on the second part of each window, teacher-forced.

    Args:
        windows: token ids, W each; the first `split` are the prompt, all but the last of it prefilled by the package.
        reference_logits: window index → (W − split + 1, V) logits of positions split − 1 … W − 1.

    Returns:
        Agreement of the pair, and of MLX alone: the difference is the hand-off's.
    """
    results: dict[str, list[tuple[Tensor, Tensor]]] = {"pair": [], "alone": []}
    for index, window in enumerate(windows):
        expected = reference_logits(index)
        for name, parts in results.items():
            kv = prefill.run(window[:split]) if name == "pair" else None
            fed = window[split - 1 :] if name == "pair" else window
            logits = torch.from_numpy(decode.logits(list(fed), decode.new_cache(kv)))[-len(expected) :]
            same = logits.argmax(-1) == expected.argmax(-1)
            parts.append((kl_divergence_nats(expected, logits), same))
    pair, alone = (
        Agreement.of(torch.cat([kld for kld, _ in parts]), torch.cat([same for _, same in parts]))
        for parts in results.values()
    )
    return pair, alone


def check_pair(
    prefill: Prefill,
    decode: DecodeModel,
    windows: Sequence[Sequence[int]],
    split: int,
    reference_logits: Callable[[int], Tensor],
    gates: Gates,
) -> list[Check]:
    """KLD and top-1 of the pair against its gates, MLX alone beside it."""
    pair, alone = measure_pair(prefill, decode, windows, split, reference_logits)
    try_this = "quantize with a finer scheme, or raise decode.embedding_bits and decode.head_bits to 16"
    where = f"{pair.positions} positions; mean {pair.kld_mean:.5f}, p99 {pair.kld_p99:.4f}; {try_this}"
    return [
        Check("pair: KLD, upper 95 %", "kld_nats", pair.kld_upper, gates.kld, ceiling=True, hint=where),
        Check("pair: KLD, mean", "kld_nats", pair.kld_mean, None),
        Check("pair: top-1", "share_equal", pair.top1, gates.top1, hint=where),
        Check("MLX alone: KLD, mean", "kld_nats", alone.kld_mean, None),
        Check("MLX alone: top-1", "share_equal", alone.top1, None),
    ]


def check_cost(
    reference: Mapping[str, np.ndarray], stored: Mapping[str, np.ndarray], layers: int, floor: float
) -> list[Check]:
    """What quantization cost K and V: stored weights against the checkpoint's, both in fp32."""
    checks = []
    for name, expected in reference.items():
        found = per_layer_db(expected, torch.from_numpy(stored[name]), layers, expected.shape[-1])
        hint = f"lowest in layer {found.worst_layer} ({found.worst_db:.1f} dB); quantize with a finer scheme"
        checks.append(
            Check(f"quantized weights: {name} pooled", "sqnr_db", found.pooled_db, floor, hint=hint)
        )
        checks.append(
            Check(f"quantized weights: {name} layer {found.worst_layer}", "sqnr_db", found.worst_db, None)
        )
    return checks


def open_prefill(manifest: Manifest, executor: str, mode: str) -> Prefill:
    """The prefill half of a build, run by the given executor."""
    from pdconvert.runtime.embedding import HostEmbedding
    from pdconvert.runtime.prefill import Prefill
    from pdconvert.runtime.weights import DecodeWeights

    embedding = HostEmbedding(DecodeWeights(manifest.decode), manifest.embedding_scale)
    opener = Opener(manifest, {"kind": executor, "mode": mode})
    return Prefill(manifest, embedding, lambda function: opener.open(function.name))


def verify_build(build: Path, executor: str = "auto") -> dict[str, Any]:
    """Replay the test vectors of a build through its shipped files.

    Args:
        executor: "mil", "coreml" or "auto".

    Returns:
        {"verdict": "pass" | "fail", "checks": [...], "executors": what ran}.

    Raises:
        InputError: not a build, or a damaged one.
    """
    from pdconvert.executors.mlx import DecodeModel

    manifest = read_manifest(build)
    cases, greedy = read_vectors(build / "test_vectors")
    kind = open_function(manifest, next(iter(manifest.functions)), kind=executor).kind
    checks: list[Check] = []
    for case in cases:
        for mode in ("fp32", "fp16") if kind == "mil" else ("fp16",):
            checks += check_case(manifest, case, kind, mode)
    if greedy:
        decode = DecodeModel.load(manifest.decode, products="dequantized")
        quantized = schema.read_manifest(build)["quantization"]["quantized"]
        checks.append(
            check_tokens(open_prefill(manifest, kind, "fp16"), decode, greedy, None if quantized else 1.0)
        )
    return {
        "verdict": verdict(checks),
        "checks": [check.to_json() for check in checks],
        "executors": {"prefill": kind},
    }
