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

from pdconvert.quant.grid import AffineLinear, LutLinear, QuantizedLinear, Record

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
        grids = (one.bits, one.group) == (other.bits, other.group)
        return grids and torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales)
    return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)


def save_block(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write stored tensors into one safetensors file, records as `NAME.codes` and `NAME.scales` or `NAME.tables`."""
    flat: dict[str, Tensor] = {}
    records: dict[str, dict[str, Any]] = {}
    for name, value in sorted(tensors.items()):
        if isinstance(value, Tensor):
            flat[name] = value.contiguous()
            continue
        form = _form(value)
        flat |= {f"{name}.{part}": getattr(value, part).contiguous() for part in ("codes", form)}
        sizes = {"group": value.group} if isinstance(value, QuantizedLinear) else {"rows": value.rows}
        records[name] = {"form": form, "bits": value.bits, **sizes}
    save_file(flat, path, metadata={"records": json.dumps(records, sort_keys=True)})


def load_block(path: Path) -> dict[str, Stored]:
    """Read what `save_block` wrote."""
    with safe_open(path, framework="pt") as file:
        records = json.loads(file.metadata()["records"])
        parts = {f"{name}.{part}" for name, record in records.items() for part in ("codes", record["form"])}
        tensors: dict[str, Stored] = {
            name: file.get_tensor(name) for name in sorted(set(file.keys()) - parts)
        }
        for name, record in records.items():
            codes, values = (file.get_tensor(f"{name}.{part}") for part in ("codes", record["form"]))
            if record["form"] == "scales":
                tensors[name] = QuantizedLinear(codes, values, record["bits"], record["group"])
            else:
                tensors[name] = LutLinear(codes, values, record["bits"], record["rows"])
    return tensors


def _form(record: Record) -> str:
    return "scales" if isinstance(record, QuantizedLinear) else "tables"
