"""The file beside ONNX models that holds their weights, each once however many functions name it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import numpy as np

ALIGNMENT = 64
INLINE_BYTES = 1024
"""Initializers up to this size stand in the model itself."""


class WeightData:
    """Writes the bytes of initializers one after the other.

    Args:
        path: the file; models name it by its file name, so it must lie beside them.
    """

    def __init__(self, path: Path):
        self._file = path.open("wb")
        self._name = path.name
        self._places: dict[Hashable, tuple[int, int]] = {}

    def initializer(
        self, name: str, dtype: str, shape: tuple[int, ...], key: Hashable, make: Callable[[], np.ndarray]
    ) -> Any:
        """A `TensorProto` whose data lies in the file.

        Args:
            name: of the tensor.
            dtype: name of the ONNX type, such as "FLOAT" or "INT4".
            shape: of the tensor.
            key: equal for equal bytes, which are then written once; None for what is not shared.
            make: the values, in the numpy type of the ONNX type (4-bit ones in int8 or uint8).
        """
        from onnx import TensorProto

        proto = TensorProto(name=name, data_type=TensorProto.DataType.Value(dtype), dims=shape)
        if key is None or key not in self._places:
            data = packed(make(), dtype)
            if len(data) <= INLINE_BYTES:
                proto.raw_data = data
                return proto
            self._file.write(b"\0" * (-self._file.tell() % ALIGNMENT))
            place = self._file.tell(), len(data)
            self._file.write(data)
            if key is not None:
                self._places[key] = place
        else:
            place = self._places[key]
        proto.data_location = TensorProto.EXTERNAL
        for entry, value in (("location", self._name), ("offset", place[0]), ("length", place[1])):
            proto.external_data.add(key=entry, value=str(value))
        return proto

    def close(self) -> None:
        """Finish the file."""
        self._file.close()


def packed(values: np.ndarray, dtype: str) -> bytes:
    """An array's bytes as ONNX stores them; 4-bit codes two to a byte, the first in the low half."""
    if dtype not in ("INT4", "UINT4"):
        return np.ascontiguousarray(values).tobytes()
    codes = values.reshape(-1).view(np.uint8) & 0xF
    if len(codes) % 2:
        codes = np.append(codes, np.uint8(0))
    return (codes[0::2] | codes[1::2] << 4).tobytes()
