"""The quantized store: one safetensors file per block, from which both halves of the pair are written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pdconvert.quant.grid import QuantizedLinear

Stored = Tensor | QuantizedLinear
"""A stored tensor: fp16 as it is, or a quantized record."""


def equal(one: Stored, other: Stored) -> bool:
    """Whether two stored tensors are the same to the bit, form included."""
    if isinstance(one, QuantizedLinear) and isinstance(other, QuantizedLinear):
        grids = (one.bits, one.group) == (other.bits, other.group)
        return grids and torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales)
    return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)


def save_block(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write stored tensors into one safetensors file, records as `NAME.codes` and `NAME.scales`."""
    flat: dict[str, Tensor] = {}
    records: dict[str, dict[str, int]] = {}
    for name, value in sorted(tensors.items()):
        if isinstance(value, QuantizedLinear):
            flat[f"{name}.codes"], flat[f"{name}.scales"] = (
                value.codes.contiguous(),
                value.scales.contiguous(),
            )
            records[name] = {"bits": value.bits, "group": value.group}
        else:
            flat[name] = value.contiguous()
    save_file(flat, path, metadata={"records": json.dumps(records, sort_keys=True)})


def load_block(path: Path) -> dict[str, Stored]:
    """Read what `save_block` wrote."""
    with safe_open(path, framework="pt") as file:
        records = json.loads(file.metadata()["records"])
        parts = {f"{name}.{part}" for name in records for part in ("codes", "scales")}
        plain = set(file.keys()) - parts
        tensors: dict[str, Stored] = {name: file.get_tensor(name) for name in sorted(plain)}
        for name, record in records.items():
            codes, scales = file.get_tensor(f"{name}.codes"), file.get_tensor(f"{name}.scales")
            tensors[name] = QuantizedLinear(codes, scales, record["bits"], record["group"])
    return tensors
