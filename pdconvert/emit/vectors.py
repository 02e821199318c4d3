"""Test vectors of a build: inputs and expected outputs of each function, and greedy tokens of the reference.

    test_vectors/
      index.json               schema, cases, and how they were made
      <case>.inputs.safetensors, <case>.expected.safetensors     tensors named as in the graph
      <case>.states.safetensors                                  what states hold before the call, where there are any
      tokens.json              greedy continuations of the reference

Whoever can read safetensors and JSON can replay them; docs/contracts.md says how to compare.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from pdconvert import schema
from pdconvert.errors import InputError

INDEX = "index.json"
TOKENS = "tokens.json"
MADE_BY = (
    "expected: Hugging Face's modules in fp32 with the weights that are shipped, de-quantized; "
    "tokens.json: Hugging Face's modules in fp32 with the checkpoint's own weights, greedy"
)


@dataclass(frozen=True)
class Case:
    """One replayable call of one function.

    Attributes:
        tokens: real tokens; columns of the token axis from there on are padding and not compared.
        tolerances: per output the least SQNR in dB, over all real columns of all layers, by arithmetic
            ("fp16", "fp32").
        states: what the function's states hold before the call.
    """

    name: str
    function: str
    token_ids: tuple[int, ...]
    inputs: Mapping[str, np.ndarray]
    expected: Mapping[str, np.ndarray]
    tolerances: Mapping[str, Mapping[str, float]]
    states: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class GreedyCase:
    """A prompt and the reference's greedy continuation.

    Attributes:
        margins: by how much each token's logit exceeds the second best.
    """

    prompt: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    margins: tuple[float, ...]


def write_vectors(folder: Path, cases: Sequence[Case], greedy: Sequence[GreedyCase]) -> None:
    """Write all cases and continuations into `folder`."""
    folder.mkdir()
    lines = []
    for case in cases:
        parts = {"inputs": case.inputs, "expected": case.expected}
        parts |= {"states": case.states} if case.states else {}
        names = {part: f"{case.name}.{part}.safetensors" for part in parts}
        for part, tensors in parts.items():
            arrays = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
            save_file(arrays, folder / names[part])
        line: dict[str, Any] = {"name": case.name, "function": case.function, "tokens": case.tokens}
        lines.append({**line, "token_ids": list(case.token_ids), **names, "tolerances": case.tolerances})
    _write_json(folder / INDEX, {"schema": schema.SCHEMA, "made": MADE_BY, "cases": lines})
    continuations = [
        {
            "prompt": item.prompt,
            "prompt_ids": list(item.prompt_ids),
            "token_ids": list(item.token_ids),
            "margins": [round(margin, 4) for margin in item.margins],
        }
        for item in greedy
    ]
    _write_json(folder / TOKENS, {"schema": schema.SCHEMA, "prompts": continuations})


def read_vectors(folder: Path) -> tuple[list[Case], list[GreedyCase]]:
    """Read what `write_vectors` wrote.

    Raises:
        InputError: a file is missing, damaged, outside the folder or of a newer schema.
    """
    index, tokens = _read_json(folder / INDEX), _read_json(folder / TOKENS)
    try:
        return [_case(folder, line) for line in index["cases"]], [_greedy(item) for item in tokens["prompts"]]
    except (KeyError, TypeError) as error:
        raise InputError(f"{folder}: {error} is missing or of another form; build again") from error


def _case(folder: Path, line: Mapping[str, Any]) -> Case:
    names = ("inputs", "expected", *(["states"] if "states" in line else []))
    parts = {part: _load(_inside(folder, line[part])) for part in names}
    ids = tuple(line["token_ids"])
    return Case(line["name"], line["function"], ids, **parts, tolerances=line["tolerances"])


def _greedy(item: Mapping[str, Any]) -> GreedyCase:
    ids, continuation = tuple(item["prompt_ids"]), tuple(item["token_ids"])
    return GreedyCase(item["prompt"], ids, continuation, tuple(item["margins"]))


def _load(path: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise InputError(f"{path}: damaged ({error}); build again") from error


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} is missing; build again") from None
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}); build again") from error
    schema.check_schema(content, path)
    return content


def _inside(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"{folder / INDEX}: path {name!r} leads out of the folder; build again")
    if not path.is_file():
        raise InputError(f"{path} is missing; build again")
    return path
