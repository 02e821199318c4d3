"""MIL element types and how this executor holds them.

Floats of every width are held as torch.float32 (fp16 mode rounds values, not storage). Integers keep
their width where torch has it; unsigned 16 and 32 bits and sub-byte integers are held in the next
type that contains all their values.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class MilType:
    """One MIL element type.

    Attributes:
        name: as `cast` and the MIL text form spell it, e.g. `fp16`, `int32`, `uint4`.
        bits: width of one element in the file.
        kind: `float`, `int`, `uint`, `bool` or `str`.
        numpy: numpy type of whole-byte file data; sub-byte data is unpacked to this type.
        torch: name of the torch type that holds run-time values; empty for strings.
    """

    name: str
    bits: int
    kind: str
    numpy: str
    torch: str

    @property
    def is_float(self) -> bool:
        """Whether values are floating point."""
        return self.kind == "float"


BOOL = MilType("bool", 8, "bool", "bool", "bool")
STRING = MilType("string", 0, "str", "object", "")
FP16 = MilType("fp16", 16, "float", "float16", "float32")
FP32 = MilType("fp32", 32, "float", "float32", "float32")
FP64 = MilType("fp64", 64, "float", "float64", "float32")
BF16 = MilType("bf16", 16, "float", "uint16", "float32")
INT8 = MilType("int8", 8, "int", "int8", "int8")
INT16 = MilType("int16", 16, "int", "int16", "int16")
INT32 = MilType("int32", 32, "int", "int32", "int32")
INT64 = MilType("int64", 64, "int", "int64", "int64")
INT4 = MilType("int4", 4, "int", "int8", "int8")
UINT8 = MilType("uint8", 8, "uint", "uint8", "uint8")
UINT16 = MilType("uint16", 16, "uint", "uint16", "int32")
UINT32 = MilType("uint32", 32, "uint", "uint32", "int64")
UINT64 = MilType("uint64", 64, "uint", "uint64", "int64")
UINT1 = MilType("uint1", 1, "uint", "uint8", "uint8")
UINT2 = MilType("uint2", 2, "uint", "uint8", "uint8")
UINT3 = MilType("uint3", 3, "uint", "uint8", "uint8")
UINT4 = MilType("uint4", 4, "uint", "uint8", "uint8")
UINT6 = MilType("uint6", 6, "uint", "uint8", "uint8")

_BY_PROTO = {
    1: BOOL, 2: STRING, 10: FP16, 11: FP32, 12: FP64, 13: BF16,
    21: INT8, 22: INT16, 23: INT32, 24: INT64, 25: INT4,
    31: UINT8, 32: UINT16, 33: UINT32, 34: UINT64, 35: UINT4, 36: UINT2, 37: UINT1, 38: UINT6, 39: UINT3,
}  # fmt: skip
BY_NAME = {t.name: t for t in _BY_PROTO.values()} | {
    "int": INT32,
    "float": FP32,
    "double": FP64,
    "string": STRING,
}


def from_proto(number: int) -> MilType | None:
    """Return the type of a `MILSpec.DataType` number, or None where this executor has none (fp8)."""
    return _BY_PROTO.get(number)
