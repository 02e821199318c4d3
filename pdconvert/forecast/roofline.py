"""Predicted times on a chip: the larger of arithmetic and memory, with nothing in each other's way.

So a prediction is the best that the published figures allow; real times are longer. It serves to compare the two
ways to prefill, and to see what bounds a phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdconvert.forecast.chips import CALL_S, ChipFigures
from pdconvert.forecast.work import DecodeWork, FunctionWork
from pdconvert.runtime.chunks import plan_chunks, reach

GIGA, TERA = 1e9, 1e12
LENGTHS = 2048
"""Prompt lengths that the search for the break-even looks at, at most."""


@dataclass(frozen=True)
class Prediction:
    """Times on one chip.

    Attributes:
        prompts: of each prompt length: `ane_s`, prefill by the package; `handoff_s`, K and V to the MLX cache;
            `gpu_s`, prefill by MLX on the GPU instead.
        decode_tokens_per_s: with an empty cache, and with the full context.
        pays_from: the shortest prompt from which on package and hand-off take no longer than MLX; None where
            that is so for no length that the functions reach.
    """

    chip: ChipFigures
    prompts: dict[int, dict[str, float]]
    decode_tokens_per_s: tuple[float, float]
    pays_from: int | None


def predict(
    chip: ChipFigures,
    functions: Sequence[FunctionWork],
    decode: DecodeWork,
    lengths: Sequence[int],
    context: int,
) -> Prediction:
    """Predict a chip's times.

    Args:
        lengths: prompt lengths, in tokens that are prefilled.
        context: tokens of a full cache.
    """
    speeds = [
        chip.memory.value * GIGA / (decode.weight_bytes + decode.cache_bytes(tokens))
        for tokens in (0, context)
    ]
    return Prediction(
        chip,
        {length: _prompt(chip, functions, decode, length) for length in lengths},
        (speeds[0], speeds[1]),
        pays_from(chip, functions, decode),
    )


def call_s(chip: ChipFigures, work: FunctionWork) -> float:
    """One call of a function on the Neural Engine."""
    weights = work.expanded_bytes if chip.expands_int8 else work.weight_bytes
    arithmetic = work.flops / (chip.ane.value * TERA)
    memory = (weights + work.io_bytes) / (chip.ane_memory.value * GIGA)
    return CALL_S + max(arithmetic, memory)


def pays_from(chip: ChipFigures, functions: Sequence[FunctionWork], decode: DecodeWork) -> int | None:
    """The shortest prompt from which on the package is no slower; see `Prediction`."""
    longest = reach(functions)
    step = max(1, longest // LENGTHS)
    found = None
    for length in range(longest, 0, -step):
        times = _prompt(chip, functions, decode, length)
        if times["ane_s"] + times["handoff_s"] > times["gpu_s"]:
            break
        found = length
    return found


def _prompt(
    chip: ChipFigures, functions: Sequence[FunctionWork], decode: DecodeWork, length: int
) -> dict[str, float]:
    calls = plan_chunks(functions, 0, length)
    memory = chip.memory.value * GIGA
    arithmetic = decode.prompt_flops(length) / (chip.gpu.value * TERA)
    return {
        "ane_s": sum(call_s(chip, chunk.function) for chunk in calls),
        "handoff_s": 2 * decode.cache_bytes(length) / memory,  # read and written once
        "gpu_s": max(arithmetic, decode.weight_bytes / memory),
    }
