"""MIL values of the protobuf: element types, shapes, immediate values and file values."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pdconvert.errors import InputError
from pdconvert.executors.mil import dtypes
from pdconvert.executors.mil.blob import BlobFile, packed_bytes, unpack_bits
from pdconvert.executors.mil.dtypes import MilType

if TYPE_CHECKING:
    import torch

OP_ERRORS = (RuntimeError, ValueError, LookupError, TypeError, ArithmeticError, AttributeError)
"""What comes of values that do not fit an op, while it is read and while it runs."""

RUN_TIME = -1
"""Size of a dimension that is known only when the program runs."""


@dataclass(frozen=True)
class ValueInfo:
    """Type of one run-time value.

    Attributes:
        shape: sizes; `RUN_TIME` (-1) where a size is known only when the program runs.
        dtype: element type name, e.g. `fp16`.
        state: whether the value is a state (a buffer that outlives a call).
    """

    shape: tuple[int, ...]
    dtype: str
    state: bool = False

    @property
    def is_static(self) -> bool:
        """Whether every size is known before the program runs."""
        return RUN_TIME not in self.shape


@dataclass(frozen=True)
class FileValue:
    """A tensor that lies in a weight file.

    Attributes:
        blob: the file.
        offset: of its record's metadata.
        dtype: element type.
        shape: sizes.
    """

    blob: BlobFile
    offset: int
    dtype: MilType
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return packed_bytes(self.dtype, self.shape)

    def array(self) -> np.ndarray:
        """Read it; see `BlobFile.read`."""
        return self.blob.read(self.offset, self.dtype, self.shape)


def tensor_type(proto: Any) -> tuple[MilType, tuple[int, ...]] | None:
    """Return element type and shape of a `ValueType`, or None where it is not a tensor.

    Raises:
        InputError: an element type that this executor does not have.
    """
    if proto.WhichOneof("type") != "tensorType":
        return None
    tensor = proto.tensorType
    dtype = dtypes.from_proto(tensor.dataType)
    if dtype is None:
        raise InputError(f"element type number {tensor.dataType} (an 8-bit float?) cannot be run")
    shape = tuple(
        d.constant.size if d.WhichOneof("dimension") == "constant" else RUN_TIME for d in tensor.dimensions
    )
    return dtype, shape


def value_info(proto: Any) -> ValueInfo:
    """Return what a `ValueType` of a function input or an op output says.

    Raises:
        InputError: neither a tensor nor a state (lists and dictionaries cannot be run).
    """
    kind = proto.WhichOneof("type")
    if kind == "stateType":
        wrapped = tensor_type(proto.stateType.wrappedType)
        if wrapped is not None:
            return ValueInfo(wrapped[1], wrapped[0].name, state=True)
    found = tensor_type(proto)
    if found is None:
        raise InputError(f"values of kind {str(kind).removesuffix('Type')} cannot be run")
    return ValueInfo(found[1], found[0].name)


def described(proto: Any) -> ValueInfo:
    """What a `ValueType` says; a type that is no tensor, or unknown, by its name or number."""
    kind = proto.WhichOneof("type")
    if kind == "stateType":
        inner = described(proto.stateType.wrappedType)
        return ValueInfo(inner.shape, inner.dtype, state=True)
    if kind != "tensorType":
        return ValueInfo((), str(kind).removesuffix("Type"))
    tensor = proto.tensorType
    known = dtypes.from_proto(tensor.dataType)
    shape = tuple(
        d.constant.size if d.WhichOneof("dimension") == "constant" else RUN_TIME for d in tensor.dimensions
    )
    return ValueInfo(shape, known.name if known else f"type {tensor.dataType}")


def read_value(proto: Any, blobs: Mapping[str, BlobFile]) -> "FileValue | np.ndarray | str | list[str]":
    """Read a MIL `Value`.

    Args:
        proto: the protobuf value.
        blobs: weight files by the name that the program gives them.

    Returns:
        A `FileValue` (not read yet), a string or list of strings, or an array of the value's shape in
        the numpy type of its element type.

    Raises:
        InputError: a value that is not a tensor or does not fit its type, or a file that is unknown or damaged.
    """
    found = tensor_type(proto.type)
    if found is None:
        if proto.type.WhichOneof("type") == "listType":
            return [read_value(item, blobs) for item in proto.immediateValue.list.values]  # type: ignore[misc]
        raise InputError(f"a constant of kind {proto.type.WhichOneof('type')} cannot be run")
    dtype, shape = found
    if proto.WhichOneof("value") == "blobFileValue":
        blob, offset = blobs[proto.blobFileValue.fileName], proto.blobFileValue.offset
        blob.raw(offset, dtype, shape)  # a damaged file is found when it is opened
        return FileValue(blob, offset, dtype, shape)
    tensor = proto.immediateValue.tensor
    field = tensor.WhichOneof("value")
    if field is None:
        raise InputError(f"a constant of type {dtype.name} {list(shape)} has no value")
    held = getattr(tensor, field).values
    if dtype is dtypes.STRING:
        return held[0] if shape == () and len(held) == 1 else list(held)
    if field == "bytes":
        raw = np.frombuffer(held, np.uint8)
        if raw.size != packed_bytes(dtype, shape):
            raise InputError(f"a constant of type {dtype.name} {list(shape)} has {raw.size} bytes")
        array = unpack_bits(raw, dtype, shape) if dtype.bits < 8 else raw.copy().view(dtype.numpy)
    else:
        array = np.asarray(held, dtype=np.float64 if field in ("floats", "doubles") else np.int64).astype(
            dtype.numpy
        )
    if array.size != math.prod(shape):
        raise InputError(f"a constant of type {dtype.name} {list(shape)} has {array.size} elements")
    return array.reshape(shape)


def to_torch(array: np.ndarray, dtype: MilType) -> "torch.Tensor":
    """Return the run-time tensor of a stored array; shares memory where no conversion is needed.

    Args:
        array: in `dtype.numpy` (bf16 as its uint16 bits).
        dtype: its MIL type.
    """
    import torch

    if dtype is dtypes.BF16:
        bits = torch.from_numpy(np.ascontiguousarray(array).astype(np.int32)) << 16
        return bits.view(torch.float32)
    target = getattr(torch, dtype.torch)
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype in (np.uint16, np.uint32, np.uint64):
        array = array.astype(np.int64)
    return torch.from_numpy(array).to(target)


@contextmanager
def reading(package: Path, where: object) -> Iterator[None]:
    """Name the package and the op, as `where` says, in what comes of reading an op.

    Raises:
        InputError: the block raised one, or an error of values that do not fit.
    """
    try:
        yield
    except InputError as error:
        raise InputError(f"{package}: {where}: {error}") from error
    except OP_ERRORS as error:
        raise InputError(f"{package}: {where}: cannot be read ({first_line(error)})") from error


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, its type where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def round_fp16(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return the values of an fp32 tensor rounded to fp16, still held as fp32; overflow is infinite."""
    return tensor.half().float()
