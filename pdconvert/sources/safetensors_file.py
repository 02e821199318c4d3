"""One `.safetensors` file: header checked in full, tensors read by position.

Plain reads instead of a memory map: a tensor's pages are gone when the tensor is, so that peak memory
does not grow with the checkpoint, and rows of an embedding cost only themselves. Format: 8 bytes of
little-endian header length, a JSON object `{name: {dtype, shape, data_offsets}}`, then the data without
gaps (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdconvert.errors import InputError
from pdconvert.sources.base import TensorInfo
from pdconvert.sources.files import check_content

if TYPE_CHECKING:
    import torch

_MAX_HEADER_BYTES = 100_000_000
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True)
class _Entry:
    info: TensorInfo
    start: int  # bytes from the start of the file


class SafetensorsFile:
    """A safetensors file, opened by reading its header alone.

    Args:
        path: the file.

    Raises:
        InputError: the file is missing, empty, a git-lfs pointer, truncated, or its header is damaged.
    """

    def __init__(self, path: Path) -> None:
        check_content(path)
        self.path = path
        self._entries = _read_header(path)

    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor in the order of the file."""
        return {name: entry.info for name, entry in self._entries.items()}

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor in fp32."""
        import torch

        entry = self._entries[name]
        data = torch.empty(entry.info.shape, dtype=_torch_dtype(entry.info.dtype))
        with self.path.open("rb") as file:
            self._fill(file, entry.start, data)
        return data.float()

    def read_rows(self, name: str, ids: Sequence[int]) -> torch.Tensor:
        """Rows of a 2-D tensor: (len(ids), columns) fp32."""
        import torch

        entry = self._entries[name]
        data = torch.empty((len(ids), entry.info.shape[1]), dtype=_torch_dtype(entry.info.dtype))
        row_bytes = entry.info.shape[1] * data.element_size()
        with self.path.open("rb") as file:
            for position, row in enumerate(ids):
                self._fill(file, entry.start + row * row_bytes, data[position])
        return data.float()

    def _fill(self, file: Any, start: int, data: torch.Tensor) -> None:
        """Fill a contiguous tensor with the bytes from a position on."""
        import torch

        if data.numel() == 0:
            return
        view = data.reshape(-1).view(torch.uint8).numpy()
        file.seek(start)
        if file.readinto(view) != view.nbytes:
            raise InputError(f"{self.path}: the file became shorter while it was read; download it again")


def _torch_dtype(name: str) -> torch.dtype:
    """The torch type of a stored float type."""
    import torch

    return {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]


def _read_header(path: Path) -> dict[str, _Entry]:
    """The header of a safetensors file, checked against the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or 8 + length > size and length <= _MAX_HEADER_BYTES:
            raise InputError(
                f"{path}: truncated: {size} bytes are less than its header needs; download it again"
            )
        if length > _MAX_HEADER_BYTES:
            raise InputError(f"{path}: not a safetensors file (its header would have {length} bytes)")
        raw = file.read(length)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: not a safetensors file: its header is not JSON; download it again"
        ) from error
    if not isinstance(header, dict):
        raise InputError(f"{path}: not a safetensors file: its header is not a JSON object")
    entries = {
        name: _entry(path, name, item, 8 + length) for name, item in header.items() if name != "__metadata__"
    }
    end = 8 + length
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, _size_bytes(entry.info))):
        if entry.start != end:
            raise InputError(f"{path}: its header is damaged: tensors overlap or leave a gap at byte {end}")
        end = entry.start + _size_bytes(entry.info)
    if end > size:
        raise InputError(f"{path}: truncated: {size} bytes, but its tensors need {end}; download it again")
    if end < size:
        raise InputError(f"{path}: {size - end} bytes follow its last tensor; the file is damaged")
    return entries


def _entry(path: Path, name: str, item: Any, data_start: int) -> _Entry:
    """One tensor of the header."""
    try:
        dtype, shape, (begin, end) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
        whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
        info = TensorInfo(shape, dtype)
        if not whole or end - begin != _size_bytes(info):
            raise ValueError("offsets do not fit the shape")
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: the header entry of {name} is damaged: {item!r}") from error
    return _Entry(info, data_start + begin)


def _size_bytes(info: TensorInfo) -> int:
    return math.prod(info.shape) * _BITS[info.dtype] // 8
