"""Checks that run the shipped files: the package in both arithmetics, the decode folder, and the pair."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pdconvert import schema
from pdconvert.checks import NEAR_TIE, Check, verdict
from pdconvert.emit.vectors import Case, GreedyCase, read_vectors
from pdconvert.measure import kl_divergence_nats, mean_and_error, sqnr_db
from pdconvert.runtime.manifest import Manifest, read_manifest
from pdconvert.runtime.sessions import Opener, open_function

if TYPE_CHECKING:
    from pdconvert.executors.mil.session import Watch
    from pdconvert.executors.mlx import DecodeModel
    from pdconvert.forensics import Fault
    from pdconvert.recipe.model import Gates
    from pdconvert.runtime.handoff import KeysValues
    from pdconvert.runtime.prefill import Prefill


@dataclass(frozen=True)
class PerLayer:
    """SQNR of one output of the package, pooled over all layers and of each of them."""

    pooled_db: float
    layers_db: tuple[float, ...]

    @property
    def worst_layer(self) -> int:
        """The layer with the lowest SQNR; one with NaN comes first."""
        broken = [index for index, value in enumerate(self.layers_db) if math.isnan(value)]
        return broken[0] if broken else int(np.argmin(self.layers_db))

    @property
    def worst_db(self) -> float:
        """That of the worst layer."""
        return self.layers_db[self.worst_layer]


def per_layer_db(expected: np.ndarray, got: Tensor, layers: int, tokens: int) -> PerLayer:
    """Compare caches (1, L·heads, D, S) on their real columns."""
    want = torch.from_numpy(np.ascontiguousarray(expected[..., :tokens])).float()
    have = got[..., :tokens].float()
    by_layer = [
        sqnr_db(a, b) for a, b in zip(want.reshape(layers, -1), have.reshape(layers, -1), strict=True)
    ]
    return PerLayer(sqnr_db(want, have), tuple(by_layer))


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


@dataclass(frozen=True)
class CaseRun:
    """One run of a function on its test vector.

    Attributes:
        checks: one per output.
        outputs: what it gave.
        caches: SQNR of `k` and `v` against the stored weights in fp32.
    """

    checks: list[Check]
    outputs: Mapping[str, Any]
    caches: dict[str, PerLayer]


def check_case(
    manifest: Manifest, case: Case, executor: str, mode: str, watch: Watch | None = None
) -> CaseRun:
    """Run one function of the package on a case's inputs.

    Args:
        watch: sees every op; for the MIL executor.
    """
    session = open_function(manifest, case.function, kind=executor, mode=mode, weight_cache_bytes=0)
    for one in getattr(session, "sessions", [session]) if watch else []:
        one.watch = watch
    state = session.make_state() if case.states else None
    for name, held in case.states.items():
        session.write_state(state, name, held)
    got = session.run(case.inputs, state)
    label = f"{session.kind} {mode}" if session.kind == "mil" else session.kind
    checks, caches = [], {}
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
        found = caches[name] = per_layer_db(case.expected[name], value, manifest.layers, case.tokens)
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
    return CaseRun(checks, got, caches)


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


def forced_choices(
    prefill: Prefill, decode: DecodeModel, greedy: Sequence[GreedyCase]
) -> list[tuple[int, ...]]:
    """The pair's choice at each position of the reference's continuations, given the reference's own prefix."""
    choices = []
    for item in greedy:
        kv = prefill.run(item.prompt_ids)
        fed = [item.prompt_ids[-1], *item.token_ids[:-1]]
        choices.append(tuple(decode.logits(fed, decode.new_cache(kv)).argmax(-1).tolist()))
    return choices


def check_tokens(
    choices: Sequence[Sequence[int]], greedy: Sequence[GreedyCase], floor: float | None
) -> Check:
    """Agreement of teacher-forced choices with the reference's greedy tokens, as a share of what counts."""
    counted = [
        choice == wanted
        for chosen, item in zip(choices, greedy, strict=True)
        for choice, wanted, margin in zip(chosen, item.token_ids, item.margins, strict=True)
        if margin >= NEAR_TIE
    ]
    share = sum(counted) / len(counted) if counted else math.nan
    return Check(f"pair: greedy tokens ({sum(counted)} of {len(counted)})", "share_equal", share, floor)


@dataclass(frozen=True)
class Scores:
    """Teacher-forced next-token distributions of two models over windows.

    Attributes:
        kld: (windows, positions), nats.
        equal: (windows, positions), whether the most likely token is the same.
    """

    kld: Tensor
    equal: Tensor

    @property
    def agreement(self) -> Agreement:
        """Both over all positions."""
        return Agreement.of(self.kld, self.equal)


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
        """Over both (windows, positions)."""
        mean, error = mean_and_error(divergences)
        return cls(
            mean,
            error,
            divergences.flatten().quantile(0.99).item(),
            agreements.double().mean().item(),
            agreements.numel(),
        )


def measure_pair(
    prefill: Prefill,
    decode: DecodeModel,
    windows: Iterable[Sequence[int]],
    split: int,
    reference_logits: Callable[[int], Tensor],
) -> tuple[Scores, Scores]:
    """The pair and MLX alone against the reference, on the second part of each window, teacher-forced.

    Args:
        windows: token ids, W each; the first `split` are the prompt, all but the last of it prefilled by the package.
        reference_logits: window index → (W − split + 1, V) logits of positions split − 1 … W − 1.

    Returns:
        Scores of the pair, and of MLX alone: the difference is the hand-off's.
    """
    pair: list[tuple[Tensor, Tensor]] = []
    alone: list[tuple[Tensor, Tensor]] = []
    for index, window in enumerate(windows):
        expected = reference_logits(index)
        pair.append(_compared(decode, expected, window[split - 1 :], prefill.run(window[:split])))
        alone.append(_compared(decode, expected, window))
    return _scores(pair), _scores(alone)


def measure_alone(
    decode: DecodeModel, windows: Iterable[Sequence[int]], reference_logits: Callable[[int], Tensor]
) -> Scores:
    """MLX alone against the reference, on the last positions of each window, teacher-forced.

    Args:
        reference_logits: window index → (n, V) logits of its last n positions.
    """
    return _scores(
        [_compared(decode, reference_logits(index), window) for index, window in enumerate(windows)]
    )


def _compared(
    decode: DecodeModel, expected: Tensor, fed: Sequence[int], kv: KeysValues | None = None
) -> tuple[Tensor, Tensor]:
    """KLD and equality of choices at the last positions, (n,) each."""
    cache, count = decode.new_cache(kv), len(expected)
    decode.take_up(fed[:-count], cache)
    logits = torch.from_numpy(decode.logits(fed[-count:], cache))
    return kl_divergence_nats(expected, logits), logits.argmax(-1) == expected.argmax(-1)


def _scores(parts: Sequence[tuple[Tensor, Tensor]]) -> Scores:
    return Scores(torch.stack([kld for kld, _ in parts]), torch.stack([same for _, same in parts]))


def check_pair(pair: Agreement, alone: Agreement, gates: Gates) -> list[Check]:
    """KLD and top-1 of the pair against its gates, MLX alone beside it."""
    try_this = "quantize with a finer scheme, or raise decode.embedding_bits and decode.head_bits to 16"
    where = f"{pair.positions} positions; mean {pair.kld_mean:.5f}, p99 {pair.kld_p99:.4f}; {try_this}"
    return [
        Check("pair: KLD, upper 95 %", "kld_nats", pair.kld_upper, gates.kld, ceiling=True, hint=where),
        Check("pair: KLD, mean", "kld_nats", pair.kld_mean, None),
        Check("pair: top-1", "share_equal", pair.top1, gates.top1, hint=where),
        Check("MLX alone: KLD, mean", "kld_nats", alone.kld_mean, None),
        Check("MLX alone: top-1", "share_equal", alone.top1, None),
    ]


def check_cost(found: Mapping[str, PerLayer], floor: float) -> list[Check]:
    """What quantization cost K and V: stored weights against the checkpoint's, both in fp32."""
    checks = []
    for name, cost in found.items():
        hint = f"lowest in layer {cost.worst_layer} ({cost.worst_db:.1f} dB); quantize with a finer scheme"
        checks.append(Check(f"quantized weights: {name} pooled", "sqnr_db", cost.pooled_db, floor, hint=hint))
        checks.append(
            Check(f"quantized weights: {name} layer {cost.worst_layer}", "sqnr_db", cost.worst_db, None)
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
            checks += check_case(manifest, case, kind, mode).checks
    decode = DecodeModel.load(
        manifest.decode, products="dequantized"
    )  # random weights choose nothing, but must load
    if greedy:
        quantized = schema.read_manifest(build)["quantization"]["quantized"]
        choices = forced_choices(open_prefill(manifest, kind, "fp16"), decode, greedy)
        checks.append(check_tokens(choices, greedy, None if quantized else 1.0))
    return {
        "verdict": verdict(checks),
        "checks": [check.to_json() for check in checks],
        "executors": {"prefill": kind},
    }
