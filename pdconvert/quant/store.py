"""The quantized store: one safetensors file per block, from which both halves of the pair are written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pdconvert.quant.grid import AffineLinear, LutLinear, QuantizedLinear

Stored = Tensor | QuantizedLinear | LutLinear
"""A stored tensor: fp16 as it is, or a quantized record."""

DecodeStored = Stored | AffineLinear
"""What the MLX half may hold: a stored tensor, or the checkpoint's own grid."""


def dequantized(value: Stored) -> Tensor:
    """The value that a stored tensor stands for, fp32."""
    return value.float() if isinstance(value, Tensor) else value.dequantize()


def equal(one: Stored, other: Stored) -> bool:
    """Whether two stored tensors are the same to the bit, form included."""
    if isinstance(one, QuantizedLinear) and isinstance(other, QuantizedLinear):
        mine, others = one.parts(), other.parts()
        same = (one.bits, one.group) == (other.bits, other.group) and mine.keys() == others.keys()
        return same and all(torch.equal(part, others[name]) for name, part in mine.items())
    return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)


def save_block(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write stored tensors into one safetensors file, the parts of records as `NAME.codes`, `NAME.scales` and so on."""
    flat: dict[str, Tensor] = {}
    records: dict[str, dict[str, Any]] = {}
    for name, value in sorted(tensors.items()):
        if isinstance(value, Tensor):
            flat[name] = value.contiguous()
            continue
        parts = value.parts()
        flat |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        sizes = {"group": value.group} if isinstance(value, QuantizedLinear) else {"rows": value.rows}
        records[name] = {"parts": sorted(parts), "bits": value.bits, **sizes}
    save_file(flat, path, metadata={"records": json.dumps(records, sort_keys=True)})


def load_block(path: Path) -> dict[str, Stored]:
    """Read what `save_block` wrote."""
    with safe_open(path, framework="pt") as file:
        records = json.loads(file.metadata()["records"])
        parts = {f"{name}.{part}" for name, record in records.items() for part in record["parts"]}
        tensors: dict[str, Stored] = {
            name: file.get_tensor(name) for name in sorted(set(file.keys()) - parts)
        }
        for name, record in records.items():
            held = {part: file.get_tensor(f"{name}.{part}") for part in record.pop("parts")}
            kind = LutLinear if "tables" in held else QuantizedLinear
            tensors[name] = kind(**held, **record)
    return tensors
