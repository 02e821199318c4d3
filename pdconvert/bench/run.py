"""`pdconvert bench`: prefill by length, the first token in its parts, decoding."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pdconvert import text
from pdconvert.bench.machine import Machine
from pdconvert.bench.placement import describe, placement_of
from pdconvert.bench.timing import Sample, columns, repeat
from pdconvert.errors import InputError
from pdconvert.executors.mil.package import Package
from pdconvert.executors.mil.view import view_package
from pdconvert.inspect_cost import Cost, estimate
from pdconvert.runtime.chunks import plan_chunks
from pdconvert.runtime.clock import Clock
from pdconvert.runtime.run import PackageOptions, Pair
from pdconvert.runtime.weights import DecodeWeights

RUNS, STEPS = 5, 32
PARTS = ("tokenize_s", "prefill_s", "rotate_s", "inject_s", "first_decode_s")
"""Parts of the time to the first token, in order."""


@dataclass(frozen=True)
class Prefilled:
    """Prefill of a number of tokens.

    Attributes:
        flops: of all calls.
    """

    tokens: int
    calls: int
    flops: int
    time: Sample


@dataclass(frozen=True)
class Bench:
    """What was measured.

    Attributes:
        executors: what ran each half, and why.
        where: a sentence on where the package ran.
        placements: per function, shares of Core ML's plan; empty where there is none.
        prompt_tokens: of the prompt whose first token was timed.
        first_token: its parts and their `total_s`.
        decode: of one token.
        decode_bytes: weights read for it.
    """

    build: str
    executors: dict[str, dict[str, str]]
    where: str
    placements: dict[str, dict[str, float]]
    machine: Machine
    prefill: tuple[Prefilled, ...]
    prompt_tokens: int
    first_token: dict[str, Sample]
    decode: Sample
    decode_bytes: int

    def to_json(self) -> dict[str, Any]:
        """The object of `bench --json`."""
        return {
            "build": self.build,
            "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
            "executors": self.executors,
            "where": self.where,
            "placements": self.placements,
            "machine": self.machine.to_json(),
            "prefill": [
                {
                    "tokens": line.tokens,
                    "calls": line.calls,
                    "flops": line.flops,
                    **line.time.to_json(),
                    "tokens_per_s": line.tokens / line.time.median,
                }
                for line in self.prefill
            ],
            "first_token": {
                "prompt_tokens": self.prompt_tokens,
                **{name: sample.to_json() for name, sample in self.first_token.items()},
            },
            "decode": {
                **self.decode.to_json(),
                "tokens_per_s": 1 / self.decode.median,
                "weight_bytes": self.decode_bytes,
            },
        }


def bench(
    build: Path,
    *,
    lengths: Sequence[int] = (),
    runs: int = RUNS,
    steps: int = STEPS,
    executor: str = "auto",
    mode: str = "fp32",
    compute_units: str = "cpu_and_ne",
) -> Bench:
    """Time a build.

    Every time is taken after a warm-up, ends when the values are there (`mx.eval`, outputs as arrays), and is
    compared with the machine's roofline before it is returned.

    Args:
        lengths: prefilled tokens; by default what one call takes, and what the functions with a past reach.
        runs: of each prefill and of the first token.
        steps: decoded tokens that are timed.
        executor, mode, compute_units: see `PackageOptions`.

    Raises:
        InputError: not a build, or a length that it does not reach.
        CheckFailed: a figure is above what the machine can do.
    """
    pair = Pair.open(build, PackageOptions(executor, mode, compute_units))
    kind = pair.prefill_executor["executor"]
    options: dict[str, Any] = {"kind": kind, "mode": mode, "compute_units": compute_units}
    decoder = pair.writer.decoder.describe()
    machine = Machine(kind, options, decoder.get("device") == "gpu")
    machine.measure_products()
    costs = _function_costs(pair)
    wanted = sorted(set(lengths)) or _default_lengths(pair)
    prefilled = tuple(_prefill(pair, machine, costs, length, runs) for length in wanted)
    first, prompt, cache = _first_token(pair, runs)
    size = decode_bytes(pair)
    machine.check("first decode", first["first_decode_s"].median, 0, size)
    steps_s = _decode(pair, cache, steps)
    machine.check("decode", steps_s.median, 0, size)
    placements = {
        name: placement_of(pair.package.session(function))
        for name, function in pair.manifest.functions.items()
        if function.tokens > 1
    }
    return Bench(
        build=str(build),
        executors={"prefill": pair.prefill_executor, "decode": decoder},
        where=describe(kind, list(placements.values())),
        placements={name: shares for name, shares in placements.items() if shares},
        machine=machine,
        prefill=prefilled,
        prompt_tokens=len(prompt),
        first_token=first,
        decode=steps_s,
        decode_bytes=size,
    )


def _function_costs(pair: Pair) -> dict[str, Cost]:
    """Work of each function, over all packages that hold a part of it."""
    flops: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    for package, _, _ in pair.manifest.packages:
        functions = view_package(Package.open(package)).functions
        names = [item.name for item in functions] if len(functions) > 1 else list(pair.manifest.functions)
        for name, function in zip(names, functions, strict=True):
            cost = estimate(function)
            flops[name] += cost.flops
            weights[name] += cost.weight_bytes
    return {name: Cost(flops[name], weights[name], 0, 0) for name in flops}


def _default_lengths(pair: Pair) -> list[int]:
    functions = [item for item in pair.manifest.functions.values() if item.tokens > 1]
    reached = {item.tokens + item.past for item in functions}
    return sorted(length for length in reached if length <= pair.package.limit)


def _prefill(pair: Pair, machine: Machine, costs: dict[str, Cost], length: int, runs: int) -> Prefilled:
    if not 1 <= length <= pair.package.limit:
        raise InputError(
            f"length {length}: the functions of this build prefill 1 to {pair.package.limit} tokens"
        )
    ids = [index % pair.manifest.vocab_size for index in range(length)]
    calls = [chunk.function for chunk in plan_chunks(pair.manifest.functions.values(), 0, length)]
    flops = sum(costs[call.name].flops for call in calls)
    weights = sum(costs[call.name].weight_bytes for call in calls)
    time = repeat(lambda: pair.package.extend(None, ids), runs)
    machine.check(f"prefill of {length} tokens", time.median, flops, weights // len(calls))
    return Prefilled(length, len(calls), flops, time)


def _first_token(pair: Pair, runs: int) -> tuple[dict[str, Sample], list[int], Any]:
    """Parts of the time to the first token, the prompt's tokens, and the last run's cache."""
    longest = max(item.tokens for item in pair.manifest.functions.values() if not item.past)
    prompt = _prompt(pair, min(longest, pair.package.limit))
    rows: list[dict[str, float]] = []
    cache: Any = None
    ids: list[int] = []
    for run in range(runs + 1):
        clock = Clock()
        start = time.perf_counter()
        with clock.phase("tokenize_s"):
            ids = pair.tokenizer.encode(prompt)
        with clock.phase("prefill_s"):
            kv = pair.prefill(ids)
        cache = _decoder(pair).new_cache(kv, len(ids) + STEPS, clock)
        with clock.phase("first_decode_s"):
            _decoder(pair).logits(ids[-1:], cache)
        total = time.perf_counter() - start
        if run:  # the first one warms up
            rows.append({**{part: clock.seconds.get(part, 0.0) for part in PARTS}, "total_s": total})
    return columns(rows), ids, cache


def _prompt(pair: Pair, tokens: int) -> str:
    """Text of about so many tokens, and not more."""
    words = (text.PROBE * (1 + 2 * tokens // 80)).split()
    low, high = 1, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        fits = len(pair.tokenizer.encode(" ".join(words[:middle]))) <= tokens
        low, high = (middle, high) if fits else (low, middle - 1)
    return " ".join(words[:low])


def _decode(pair: Pair, cache: Any, steps: int) -> Sample:
    """Greedy steps on a cache; the first ones warm up."""
    token, seconds = 0, []
    for step in range(steps + 2):
        start = time.perf_counter()
        logits = _decoder(pair).logits([token], cache)
        token = int(np.argmax(logits[-1]))
        if step >= 2:
            seconds.append(time.perf_counter() - start)
    return Sample(tuple(seconds))


def _decoder(pair: Pair) -> Any:
    return pair.writer.decoder


def decode_bytes(pair: Pair) -> int:
    """Bytes of weights that a decoded token reads: all but the embedding, unless that is the head too."""
    weights = DecodeWeights(pair.manifest.decode)
    tied = bool(weights.config.get("tie_word_embeddings"))
    return sum(
        size for name, size in weights.sizes().items() if tied or not name.startswith("model.embed_tokens.")
    )
