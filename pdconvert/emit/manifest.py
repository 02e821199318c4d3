"""manifest.json: what was built, from what, with which verdict."""

from __future__ import annotations

import json
import platform
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import Tensor

import pdconvert
from pdconvert import schema
from pdconvert.compile import CompiledBlock, StoredBlock
from pdconvert.emit.mlx import DecodeFolder
from pdconvert.inspect_package import weight_sharing
from pdconvert.lowering.contract import FunctionShape, Part, input_ports, output_ports, state_ports
from pdconvert.model import ModelSpec, Rope
from pdconvert.prepare import Plan, Texts
from pdconvert.process import list_files
from pdconvert.progress import Stage
from pdconvert.source_grid import SourceBlock
from pdconvert.split import WHOLE, part_path

TOOLS = (
    "torch",
    "transformers",
    "coremltools",
    "numpy",
    "safetensors",
    "mlx",
    "mlx-lm",
    "gguf",
    "tokenizers",
)


@dataclass(frozen=True)
class Emitted:
    """What the writers of manifest and report read.

    Attributes:
        decode_blocks: the blocks of the MLX half: the same ones, unless it has a grid of its own.
        calibration: what calibrated passes looked at; None where there are none.
        store_hash: SHA-256 over the quantized store, from which both halves were written.
        parts: how the package is cut.
        made_by: which pass each module comes from, by block.
        eos_token_ids: every token that ends a text.
    """

    plan: Plan
    texts: Texts
    hashes: dict[str, str]
    blocks: Sequence[CompiledBlock]
    decode_blocks: Sequence[StoredBlock | SourceBlock]
    calibration: dict[str, Any] | None
    decode: DecodeFolder
    store_hash: str
    made_by: dict[str, dict[str, str]]
    parts: Sequence[Part]
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Cost:
    """Whole-process seconds and peak resident bytes of a build, and of each of its stages."""

    seconds: float
    peak_bytes: int
    stages: tuple[Stage, ...] = ()


def manifest(folder: Path, emitted: Emitted, verdict: str, cost: Cost) -> dict[str, Any]:
    """The manifest's content; docs/contracts.md describes every field."""
    plan, spec = emitted.plan, emitted.plan.spec
    prefill = plan.recipe.prefill
    functions = {shape.name: _function(plan, shape, None) for shape in plan.shapes}
    count = len(emitted.parts)
    parts = [
        {
            "package": part_path(index, count).as_posix(),
            "layers": [part.first, part.last],
            "weights": weight_sharing(folder / part_path(index, count)),
            "functions": {shape.name: _function(plan, shape, part) for shape in plan.shapes},
        }
        for index, part in enumerate(emitted.parts)
    ]
    return {
        "schema": schema.SCHEMA,
        "name": plan.recipe.name,
        "verdict": verdict,
        "pdconvert": pdconvert.__version__,
        "source": {
            "label": plan.source.label,
            "sha256": emitted.hashes,
            "license": plan.source.license,
            "model_type": spec.model_type,
            "random": plan.source.random,
            "dtypes": dict(sorted(Counter(info.dtype for info in plan.source.tensors().values()).items())),
            "notes": list(plan.notes),
        },
        "recipe": plan.recipe.resolved(),
        "passes": {
            "shared": [repr(item) for item in plan.shared_passes],
            "graph": {
                block.name: [repr(item) for item in plan.graph_passes(block.name)]
                for block in emitted.blocks
                if block.name != "embedding"
            },
        },
        "prefill": {
            **({"package": WHOLE, "weights": parts[0]["weights"]} if count == 1 else {"parts": parts}),
            "target": prefill.target,
            "outputs": prefill.outputs,
            "logits": prefill.logits,
            "embedding": prefill.embedding,
            "compute_units": "cpu_and_ne",
            "functions": functions,
        },
        "decode": {
            "folder": "decode",
            "quantization": emitted.decode.quantization,
            "unquantized": list(emitted.decode.unquantized),
            "size_bytes": emitted.decode.size_bytes,
        },
        "rope": _rope(spec),
        "embedding": {"scale": plan.embedding_scale},
        "kv": {
            "rope": prefill.kv.rope,
            "storage": prefill.kv.storage,
            "layers": len(spec.layers),
            "kv_heads": spec.kv_heads,
            "head_dim": spec.head_dim,
            "dtype": "fp16",
            "layout": "1, layer*kv_head, head_dim, token",
            **(
                {"window": {"tokens": spec.window, "layers": list(spec.window_layers)}} if spec.window else {}
            ),
        },
        "quantization": {
            "quantized": plan.quantized,
            "bits_per_weight": bits_per_weight(emitted.blocks),
            "decode_bits_per_weight": bits_per_weight(emitted.decode_blocks),
            "calibration": emitted.calibration,
            "underflows": {
                f"{block.name}.{name}": count
                for block in emitted.blocks
                for name, count in block.underflows().items()
            },
        },
        "made_by": emitted.made_by,
        "eos_token_ids": list(emitted.eos_token_ids),
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "max_positions": spec.max_positions,
        "hash": {"store": emitted.store_hash},
        "texts": {"held_out_sha256": emitted.texts.hash, "windows": len(emitted.texts.windows)},
        "tools": {**{name: metadata.version(name) for name in TOOLS}, "python": platform.python_version()},
        "cost": {"seconds": round(cost.seconds, 1), "peak_bytes": cost.peak_bytes},
        "files": [name for name in list_files(folder) if not name.startswith(".")],
    }


def _rope(spec: ModelSpec) -> dict[str, Any]:
    """The RoPE of all layers but those that are listed under `unrotated_layers` and `local`."""
    main = {**_frequencies(spec.rope), "unrotated_layers": list(spec.unrotated_layers)}
    if spec.local_rope is None or not spec.local_layers:
        return main
    return {**main, "local": {**_frequencies(spec.local_rope), "layers": list(spec.local_layers)}}


def _frequencies(rope: Rope) -> dict[str, Any]:
    return {
        "dims": rope.dims,
        "inv_freq": list(rope.inv_freq),
        "attention_factor": rope.attention_factor,
    }


def _function(plan: Plan, shape: FunctionShape, part: Part | None) -> dict[str, Any]:
    states = [port.manifest() for port in state_ports(plan.spec, plan.interface)]
    return {
        "sequence_length": shape.tokens,
        "past_length": shape.past,
        "inputs": [port.manifest() for port in input_ports(plan.spec, shape, plan.interface, part)],
        "outputs": [port.manifest() for port in output_ports(plan.spec, shape, plan.interface, part)],
        **({"states": states} if states else {}),
    }


def bits_per_weight(blocks: Sequence[StoredBlock | SourceBlock]) -> float:
    """Bits of codes and scales per weight of the decoder's linears; 16 where they are not quantized."""
    bits = weights = 0
    for block in blocks:
        if block.name.startswith("layers."):
            for value in block.tensors().values():
                if len(value.shape) == 2:
                    size = value.shape[0] * value.shape[1]
                    weights += size
                    bits += 16 * size if isinstance(value, Tensor) else value.stored_bits
    return round(bits / weights, 4)


NUMBERS = re.compile(r"\[\s*-?[\d.]+(?:e[+-]?\d+)?(?:,\s*-?[\d.]+(?:e[+-]?\d+)?)+\s*\]")
"""A list of numbers, which takes one line."""


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write one JSON file, its folder made if missing."""
    path.parent.mkdir(exist_ok=True)
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    path.write_text(NUMBERS.sub(lambda found: " ".join(found[0].split()), text) + "\n", encoding="utf-8")
