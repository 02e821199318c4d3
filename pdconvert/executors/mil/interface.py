"""What a model's description says of its inputs beyond their types: the shapes that they may have, and defaults.

The program itself only marks a size as unknown; which sizes the package takes stands in the description beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

UNLIMITED = -1


@dataclass(frozen=True)
class Feature:
    """An input, as the description has it.

    Attributes:
        sizes: shapes that are listed, of all axes or of the last ones (an image's height and width).
        bounds: least and largest size of all axes or of the last ones; `UNLIMITED` for no largest.
        default: what every element is where the input is left out; None where it must be given.
    """

    sizes: tuple[tuple[int, ...], ...] = ()
    bounds: tuple[tuple[int, int], ...] = ()
    default: float | None = None

    @property
    def flexible(self) -> str:
        """`enumerated` or `range`; empty where there is one shape."""
        if self.sizes:
            return "enumerated"
        return "range" if any(low != high for low, high in self.bounds) else ""

    def allows(self, shape: Sequence[int]) -> bool:
        """Whether the package takes an array of this shape."""
        if self.sizes:
            return any(tuple(shape[-len(size) :]) == size for size in self.sizes)
        ends = shape[-len(self.bounds) :] if self.bounds else ()
        return len(ends) == len(self.bounds) and all(
            low <= size and (high == UNLIMITED or size <= high)
            for size, (low, high) in zip(ends, self.bounds, strict=True)
        )

    @property
    def shapes_text(self) -> str:
        """The shapes that it takes, for a message."""
        if self.sizes:
            return " or ".join(str(list(size)) for size in self.sizes)
        ranges = (f"{low} to {'any' if high == UNLIMITED else high}" for low, high in self.bounds)
        return f"[{', '.join(ranges)}]"


def read_features(description: Any, function: str) -> dict[str, Feature]:
    """Inputs of a function by name.

    Args:
        description: the protobuf `ModelDescription`.
        function: name of the function; a model of one function describes its inputs without a name.
    """
    named = [item.input for item in description.functions if item.name == function]
    return {item.name: _feature(item.type) for item in (named[0] if named else description.input)}


def _feature(proto: Any) -> Feature:
    array, image = proto.multiArrayType, proto.imageType
    default = array.WhichOneof("defaultOptionalValue")
    value = float(getattr(array, default)) if default else None
    kind = array.WhichOneof("ShapeFlexibility") or image.WhichOneof("SizeFlexibility")
    if kind == "enumeratedShapes":
        return Feature(
            sizes=tuple(tuple(item.shape) for item in array.enumeratedShapes.shapes), default=value
        )
    if kind == "enumeratedSizes":
        return Feature(sizes=tuple((item.height, item.width) for item in image.enumeratedSizes.sizes))
    if kind == "shapeRange":
        return Feature(bounds=_bounds(array.shapeRange.sizeRanges), default=value)
    if kind == "imageSizeRange":
        return Feature(bounds=_bounds((image.imageSizeRange.heightRange, image.imageSizeRange.widthRange)))
    return Feature(default=value)


def _bounds(ranges: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    return tuple((item.lowerBound, item.upperBound) for item in ranges)
