"""`pdconvert plan`: a recipe's sizes, memory, work and predicted times, without its weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdconvert.errors import InputError
from pdconvert.forecast.chips import CHIPS, ChipFigures
from pdconvert.forecast.memory import Memory, forecast_memory
from pdconvert.forecast.roofline import Prediction, call_s, predict
from pdconvert.forecast.sizes import Sizes, forecast_sizes, fp16_reasons
from pdconvert.forecast.weightless import Store, raw_bytes
from pdconvert.forecast.work import DecodeWork, FunctionWork, decode_work, function_works
from pdconvert.inventory import expected_tensors
from pdconvert.lowering.contract import Part
from pdconvert.prepare import Plan, ResolvesAuto, make_plan
from pdconvert.program import Pass
from pdconvert.ranges import Ranges
from pdconvert.recipe import Recipe
from pdconvert.replaced import fp16_notes, size_notes
from pdconvert.runtime.chunks import reach
from pdconvert.sources import open_source
from pdconvert.split import package_parts

NOTE = "times are predictions by roofline from published figures, the best case; nothing was measured"

LARGEST = Ranges(1e5, "", {}, 1e5, "")
"""Ranges that need every pass: what `auto` stands for before anything is measured."""


@dataclass(frozen=True)
class Forecast:
    """What a build will take and give.

    Attributes:
        plan: the recipe resolved against its source.
        notes: what the forecast assumes.
        parts: how the package is cut.
        parameters: weights of the model, embedding and head included.
        chips: predicted times.
    """

    plan: Plan
    notes: tuple[str, ...]
    parts: tuple[Part, ...]
    parameters: int
    sizes: Sizes
    memory: Memory
    functions: tuple[FunctionWork, ...]
    decode: DecodeWork
    chips: tuple[Prediction, ...]

    @property
    def context(self) -> int:
        """Positions of the model."""
        return self.plan.spec.max_positions

    def to_json(self) -> dict[str, Any]:
        """The object of `plan --json`."""
        sizes, spec = self.sizes, self.plan.spec
        return {
            "name": self.plan.recipe.name,
            "source": self.plan.source.label,
            "model_type": spec.model_type,
            "layers": len(spec.layers),
            "parameters": self.parameters,
            "notes": list(self.notes),
            "package": {
                "size_bytes": sizes.package,
                "weights_bytes": sizes.package_weights,
                "program_bytes": sizes.package_program,
                "parts": [[part.first, part.last] for part in self.parts],
            },
            "decode": {
                "size_bytes": sizes.decode,
                "weights_bytes": sizes.decode_weights,
                "files_bytes": sizes.decode_files,
                "read_per_token_bytes": self.decode.weight_bytes,
            },
            "bits_per_weight": round(sizes.bits_per_weight, 4),
            "kv": {
                "bytes_per_token": self.decode.kv_bytes,
                "context": self.context,
                "context_bytes": self.decode.cache_bytes(self.context),
            },
            "build": {"peak_bytes": self.memory.peak, "peak_in": self.memory.peak_in},
            "functions": [
                {
                    "name": work.name,
                    "tokens": work.tokens,
                    "past": work.past,
                    "flops": work.flops,
                    "weight_bytes": work.weight_bytes,
                    "io_bytes": work.io_bytes,
                }
                for work in self.functions
            ],
            "predictions": {"note": NOTE, "chips": [self._chip(chip) for chip in self.chips]},
        }

    def _chip(self, prediction: Prediction) -> dict[str, Any]:
        chip = prediction.chip
        figures = {
            "memory_gb_per_s": chip.memory,
            "ane_memory_gb_per_s": chip.ane_memory,
            "ane_tflops": chip.ane,
            "gpu_tflops": chip.gpu,
        }
        return {
            "chip": chip.name,
            "figures": {name: {"value": fact.value, "source": fact.source} for name, fact in figures.items()},
            "functions_s": {work.name: call_s(chip, work) for work in self.functions},
            "prompts": {str(length): times for length, times in prediction.prompts.items()},
            "decode_tokens_per_s": {
                "empty": prediction.decode_tokens_per_s[0],
                "full_context": prediction.decode_tokens_per_s[1],
            },
            "ane_prefill_pays_from": prediction.pays_from,
        }


def forecast(recipe: Recipe, chips: Sequence[ChipFigures] = CHIPS) -> Forecast:
    """Compute what a recipe's build will take and give.

    Of a folder or a hub model the config (and the tokenizer's files, for their size) are read, of a `.gguf` file
    its header.

    Raises:
        InputError: the recipe, or the model's config, cannot be built.
    """
    source = open_source(recipe.source, weights=False)
    plan, notes = _without_auto(make_plan(recipe, source, complete=False))
    store = Store.of(plan)
    stored = {block.name: sum(map(sum, map(raw_bytes, block.tensors().values()))) for block in store.blocks}
    parts = package_parts(plan, stored)
    notes += [*size_notes(plan), *fp16_notes(fp16_reasons(plan, store))]
    sizes = forecast_sizes(plan, store, parts)
    if sizes.decode_files is None:
        notes.append("the tokenizer's files are not there: decode is counted without them")
    functions, decode = tuple(function_works(plan, store)), decode_work(plan, store)
    lengths, context = _lengths(functions), plan.spec.max_positions
    return Forecast(
        plan=plan,
        notes=tuple(notes),
        parts=tuple(parts),
        parameters=_parameters(plan),
        sizes=sizes,
        memory=forecast_memory(plan, store, sizes.decode_weights),
        functions=functions,
        decode=decode,
        chips=tuple(predict(chip, functions, decode, lengths, context) for chip in chips),
    )


def _without_auto(plan: Plan) -> tuple[Plan, list[str]]:
    """The plan with every `auto` option in the form that takes most."""
    passes: list[Pass] = []
    notes = []
    for item in plan.passes:
        if isinstance(item, ResolvesAuto) and "auto" in vars(item).values():
            chosen, _ = item.resolve(LARGEST)
            if chosen is None:
                raise InputError(f"recipe: {item.name}: `auto` chose nothing for the largest ranges")
            notes.append(f"{item.name}: auto is decided by the build; counted as if it were needed")
            item = chosen
        if getattr(item, "calibrated", False):
            notes.append("quantize_weights: memory and time of calibration are not counted")
        if getattr(item, "budget", None):
            notes.append("quantize_weights: the budget is spent by the build; counted at the scheme's width")
        passes.append(item)
    return replace(plan, passes=tuple(passes)), notes


def _parameters(plan: Plan) -> int:
    return sum(math.prod(shape) for shape in expected_tensors(plan.family, plan.spec).values())


def _lengths(functions: Sequence[FunctionWork]) -> list[int]:
    """Prompt lengths to show: one full call of the function without a past, and as far as the functions reach."""
    first = min(work.tokens for work in functions if not work.past and work.tokens > 1)
    return sorted({first, reach(functions)})
