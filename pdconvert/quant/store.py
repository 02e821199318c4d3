"""The quantized store: one safetensors file per block, from which both halves of the pair are written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pdconvert.quant.grid import QuantizedLinear

Stored = Tensor | QuantizedLinear
"""A stored tensor: fp16 as it is, or a quantized record."""


class Store:
    """Blocks of stored tensors in a folder; a block is written once and then memory-mapped."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, block: str) -> Path:
        return self.folder / f"{block}.safetensors"

    def save(self, block: str, tensors: Mapping[str, Stored]) -> None:
        """Write a block's tensors; equal tensors give equal bytes."""
        save_block(self.path(block), tensors)

    def load(self, block: str) -> dict[str, Stored]:
        """A block's tensors, mapped from its file."""
        return load_block(self.path(block))

    def hash(self) -> str:
        """SHA-256 over the names and bytes of all blocks."""
        total = hashlib.sha256()
        for path in sorted(self.folder.glob("*.safetensors")):
            with path.open("rb") as file:
                total.update(f"{path.name}:{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
        return total.hexdigest()


def save_block(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write stored tensors into one safetensors file, records as `NAME.codes` and `NAME.scales`."""
    flat: dict[str, Tensor] = {}
    records: dict[str, dict[str, int]] = {}
    for name, value in sorted(tensors.items()):
        if isinstance(value, QuantizedLinear):
            flat[f"{name}.codes"], flat[f"{name}.scales"] = value.codes.contiguous(), value.scales.contiguous()
            records[name] = {"bits": value.bits, "group": value.group}
        else:
            flat[name] = value.contiguous()
    save_file(flat, path, metadata={"records": json.dumps(records, sort_keys=True)})


def load_block(path: Path) -> dict[str, Stored]:
    """Read what `save_block` wrote."""
    with safe_open(path, framework="pt") as file:
        records = json.loads(file.metadata()["records"])
        parts = {f"{name}.{part}" for name in records for part in ("codes", "scales")}
        tensors: dict[str, Stored] = {name: file.get_tensor(name) for name in file.keys() if name not in parts}
        for name, record in records.items():
            codes, scales = file.get_tensor(f"{name}.codes"), file.get_tensor(f"{name}.scales")
            tensors[name] = QuantizedLinear(codes, scales, record["bits"], record["group"])
    return tensors
