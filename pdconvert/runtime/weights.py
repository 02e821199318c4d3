"""The tensors of a decode folder, memory-mapped: what the host reads without MLX."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pdconvert.errors import InputError
from pdconvert.plain_files import refuse_special
from pdconvert.quant.packing import PACKED_BITS, unpack_words

DTYPES: dict[str, np.dtype] = {"F16": np.dtype("<f2"), "F32": np.dtype("<f4"), "U32": np.dtype("<u4")}
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: file, offset in bytes, and what it is."""

    path: Path
    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """Affine grid of one module: inputs per group and bits per code."""

    group: int
    bits: int


class DecodeWeights:
    """A decode folder's weights by name.

    Args:
        folder: a folder with config.json and `model*.safetensors`, as `mlx_lm.load` reads it.

    Raises:
        InputError: a file is missing, unreadable or cut off, or `quantization` in config.json does not
            describe the packed tensors.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = read_config(folder)
        paths = sorted(folder.glob("model*.safetensors"))
        if not paths:
            raise InputError(f"{folder} holds no model*.safetensors; build again")
        self._places: dict[str, Place] = {}
        for path in paths:
            self._places.update(_read_header(path))
        self.grids = {
            name.removesuffix(".scales"): self._grid(name.removesuffix(".scales"))
            for name in self._places
            if name.endswith(".scales")
        }

    def array(self, name: str) -> np.ndarray:
        """A read-only view of one tensor in its file; nothing is read until it is used."""
        place = self._place(name)
        return np.memmap(place.path, place.dtype, "r", place.offset, place.shape)

    def sizes(self) -> dict[str, int]:
        """Bytes of every tensor by name."""
        return {name: place.dtype.itemsize * math.prod(place.shape) for name, place in self._places.items()}

    def rows(self, module: str, ids: Sequence[int]) -> np.ndarray:
        """Rows of a module's weight matrix, de-quantized.

        Args:
            module: path of the module, such as `model.embed_tokens`.
            ids: row numbers.

        Returns:
            (len(ids), I) fp32; exact, since an 8-bit code times an fp16 scale fits fp32.

        Raises:
            InputError: a row number outside the matrix.
        """
        count = self._place(f"{module}.weight").shape[0]
        outside = [number for number in ids if not 0 <= number < count]
        if outside:
            raise InputError(f"token id {outside[0]} is outside {module}, which has {count} rows")
        index = np.asarray(ids, np.intp)
        rows = self.array(f"{module}.weight")[index]
        grid = self.grids.get(module)
        if grid is None:
            return rows.astype(np.float32)
        scales = self.array(f"{module}.scales")[index].astype(np.float32)
        biases = self.array(f"{module}.biases")[index].astype(np.float32)
        codes = unpack_words(rows, grid.bits).astype(np.float32).reshape(len(index), -1, grid.group)
        return (codes * scales[:, :, None] + biases[:, :, None]).reshape(len(index), -1)

    def _place(self, name: str) -> Place:
        if name not in self._places:
            raise InputError(f"{self.folder} has no tensor {name}; build again")
        return self._places[name]

    def _grid(self, module: str) -> Grid:
        """The grid that config.json gives a packed module, checked against its tensors."""
        where = f"{self.folder / 'config.json'}: quantization"
        stated = self.config.get("quantization")
        if not isinstance(stated, dict):
            raise InputError(f"{where} is missing, but {module} is packed; build again")
        own = stated.get(module)
        values = own if isinstance(own, dict) else stated
        group, bits = values.get("group_size"), values.get("bits")
        if not isinstance(group, int) or isinstance(group, bool) or group <= 0:
            raise InputError(
                f"{where}.group_size of {module} is {group!r}, expected a positive integer; build again"
            )
        if not isinstance(bits, int) or bits not in PACKED_BITS:
            raise InputError(
                f"{where}.bits of {module} is {bits!r}, expected one of {PACKED_BITS}; build again"
            )
        words = self._place(f"{module}.weight").shape[-1]
        groups = self._place(f"{module}.scales").shape[-1]
        if words * 32 != groups * group * bits:
            raise InputError(
                f"{where}: {module} has {words} words and {groups} scales a row, which {bits} bits in groups "
                f"of {group} do not give; build again"
            )
        return Grid(group, bits)


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a decode folder."""
    return read_json(folder / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a build.

    Raises:
        InputError: the file is missing or holds no JSON object.
    """
    refuse_special(path, "build again")
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing; build again") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON ({error}); build again") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} holds no JSON object; build again")
    return value


def _read_header(path: Path) -> dict[str, Place]:
    """Names and places of the tensors of one safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise InputError(f"{path} is cut off or is no safetensors file ({size} bytes); build again")
        try:
            header = json.loads(file.read(length))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path} has an unreadable header ({error}); build again") from error
    places = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise InputError(
                f"{path}: {name} has dtype {entry['dtype']}, expected one of {', '.join(DTYPES)}"
            )
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        if end > size:
            raise InputError(f"{path} is cut off: {name} ends at byte {end} of {size}; build again")
        places[name] = Place(path, begin, DTYPES[entry["dtype"]], tuple(entry["shape"]))
    return places
