"""The MIL weight blob ("storage version 2"), memory-mapped.

Layout, little-endian: a 64-byte header (uint32 record count, uint32 version = 2), then records. A
record is a 64-byte aligned metadata block and its data, 64-byte aligned as well:

    uint32 sentinel 0xDEADBEEF | uint32 blob data type | uint64 size in bytes | uint64 data offset
    | uint64 padding bits in the last byte | 32 reserved bytes

A MIL value names a record by the offset of its metadata. Sub-byte integers are packed least
significant bit first, in one run of bits without regard to byte borders.
"""

import mmap
import struct
from pathlib import Path

import numpy as np

from pdconvert.errors import InputError
from pdconvert.executors.mil import dtypes
from pdconvert.executors.mil.dtypes import MilType
from pdconvert.plain_files import refuse_special

_HEADER = struct.Struct("<II")
_METADATA = struct.Struct("<IIQQQ")
_SENTINEL = 0xDEADBEEF
_VERSION = 2
_ALIGNMENT = 64

_BLOB_TYPES = {
    1: dtypes.FP16, 2: dtypes.FP32, 3: dtypes.UINT8, 4: dtypes.INT8, 5: dtypes.BF16, 6: dtypes.INT16,
    7: dtypes.UINT16, 8: dtypes.INT4, 9: dtypes.UINT1, 10: dtypes.UINT2, 11: dtypes.UINT4,
    12: dtypes.UINT3, 13: dtypes.UINT6, 14: dtypes.INT32, 15: dtypes.UINT32,
}  # fmt: skip


class BlobFile:
    """One weight file of a package. Data is paged in by the system when it is read.

    Attributes:
        path: the file.
        size_bytes: its length.
        records: number of records that the header announces.
    """

    def __init__(self, path: Path) -> None:
        """Map `path`.

        Raises:
            InputError: the file is missing, empty, or not a blob of storage version 2.
        """
        self.path = path
        refuse_special(path, "a weight file is one")
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise InputError(f"{path}: the weight file is missing; the package is incomplete") from None
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: the weight file cannot be read ({error})") from error
        self.size_bytes = len(self._map)
        if self.size_bytes < _ALIGNMENT:
            raise InputError(
                f"{path}: {self.size_bytes} bytes are too few for a weight file; it is truncated"
            )
        self.records, version = _HEADER.unpack_from(self._map, 0)
        if version != _VERSION:
            raise InputError(f"{path}: weight storage version {version}, only {_VERSION} is known")

    def read(self, offset: int, dtype: MilType, shape: tuple[int, ...]) -> np.ndarray:
        """Return the tensor whose metadata lies at `offset`.

        Whole-byte types come as a view into the mapped file (copied by the system only where it is
        written to), sub-byte types are unpacked to uint8 or int8.

        Raises:
            InputError: no record lies there, its type or size differs from the program's, or its data
                passes the end of the file.
        """
        raw = self.raw(offset, dtype, shape)
        if dtype.bits < 8:
            return unpack_bits(raw, dtype, shape)
        return raw.view(dtype.numpy).reshape(shape)

    def raw(self, offset: int, dtype: MilType, shape: tuple[int, ...]) -> np.ndarray:
        """Return the bytes of a record as a uint8 view; checks as in `read`."""
        if offset % _ALIGNMENT or not 0 < offset <= self.size_bytes - _ALIGNMENT:
            raise InputError(
                f"{self.path}: no weight record at offset {offset} of {self.size_bytes} bytes (truncated?)"
            )
        sentinel, number, size, start, _ = _METADATA.unpack_from(self._map, offset)
        if sentinel != _SENTINEL:
            raise InputError(
                f"{self.path}: no weight record at offset {offset} (its marker is {sentinel:#010x})"
            )
        found = _BLOB_TYPES.get(number)
        if found is None or found is not dtype:
            held = found.name if found else f"type number {number}"
            raise InputError(
                f"{self.path}: the record at offset {offset} holds {held}, the program expects {dtype.name}"
            )
        expected = packed_bytes(dtype, shape)
        if size != expected:
            raise InputError(
                f"{self.path}: the record at offset {offset} has {size} bytes,"
                f" {dtype.name} {list(shape)} needs {expected}"
            )
        if start + size > self.size_bytes:
            raise InputError(
                f"{self.path}: truncated: the record at offset {offset}"
                f" ends at byte {start + size} of {self.size_bytes}"
            )
        return np.frombuffer(self._map, np.uint8, size, start)


def packed_bytes(dtype: MilType, shape: tuple[int, ...]) -> int:
    """Return how many bytes a tensor takes in a file."""
    count = 1
    for dim in shape:
        count *= dim
    return (count * dtype.bits + 7) // 8


def unpack_bits(raw: np.ndarray, dtype: MilType, shape: tuple[int, ...]) -> np.ndarray:
    """Unpack sub-byte integers to one element a byte.

    Args:
        raw: (ceil(n * bits / 8),) uint8, least significant bits first.
        dtype: a type of fewer than 8 bits.
        shape: shape of the result, n elements.

    Returns:
        uint8, or int8 with the sign extended where the type is signed.
    """
    count = 1
    for dim in shape:
        count *= dim
    bits = dtype.bits
    if 8 % bits == 0:
        per_byte = 8 // bits
        out = np.empty((raw.size, per_byte), np.uint8)
        for index in range(per_byte):
            np.right_shift(raw, index * bits, out=out[:, index])
        out &= (1 << bits) - 1
    else:
        # 3 and 6 bits: 24 bits hold a whole number of elements, so work on groups of three bytes.
        padded = np.zeros((-(-raw.size // 3), 3), np.uint8)
        padded.reshape(-1)[: raw.size] = raw
        words = padded[:, 0] | padded[:, 1].astype(np.uint32) << 8 | padded[:, 2].astype(np.uint32) << 16
        per_word = 24 // bits
        out = np.empty((words.size, per_word), np.uint8)
        for index in range(per_word):
            out[:, index] = words >> index * bits & (1 << bits) - 1
    flat = out.reshape(-1)[:count]
    if dtype.kind == "int":
        flat = ((flat ^ (1 << bits - 1)).astype(np.int16) - (1 << bits - 1)).astype(np.int8)
    return flat.reshape(shape)
