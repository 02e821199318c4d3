"""What is in a `.mlpackage` or a build folder, read from its files alone.

Nothing is run and no weight is read: the program's protobuf says which record of the weight file each
constant takes. Two functions share a weight where they name the same record.
"""

import json
import math
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pdconvert.errors import InputError
from pdconvert.executors.mil.package import Package
from pdconvert.executors.mil.values import OP_ERRORS, FileValue, ValueInfo, first_line, read_value, value_info
from pdconvert.executors.mil.view import view_package
from pdconvert.inspect_cost import estimate
from pdconvert.packages import build_packages, is_build, packages_of
from pdconvert.schema import read_manifest

MAX_HEADER_BYTES = 100_000_000  # what safetensors itself allows


@dataclass(frozen=True)
class Weight:
    """One weight of a function: a constant in the weight file, or a `constexpr_*` chain over several.

    Attributes:
        dtype: how its elements are stored: `fp16`, `int8`, `lut4`, `sparse`, ...
        granularity: what one scale or one table serves: `per_tensor`, `per_channel`, `per_block 32`,
            `per_group 16`; `-` for plain values.
        elements: number of elements of the dense tensor.
        records: size in bytes of each record it takes in a weight file, by (file, offset).
    """

    dtype: str
    granularity: str
    elements: int
    records: dict[tuple[str, int], int]


def inspect_path(path: Path) -> dict[str, Any]:
    """Describe a `.mlpackage`, or a build folder with its package and decode weights.

    Returns:
        Plain data for JSON; `kind` is "package" or "build".

    Raises:
        InputError: neither lies there, or a file of it is missing or damaged.
    """
    if is_build(path):
        return inspect_build(path)
    (package,) = packages_of(path)
    return inspect_package(package)


def inspect_build(path: Path) -> dict[str, Any]:
    """Describe a build folder; see `inspect_path`. Its packages: `prefill`, or `parts` where the model is cut."""
    manifest = read_manifest(path)
    packages = [inspect_package(package) for package in build_packages(path, manifest["prefill"])]
    return {
        "kind": "build",
        "path": str(path),
        "name": manifest.get("name"),
        "verdict": manifest.get("verdict"),
        "source": manifest.get("source"),
        "size_bytes": folder_bytes(path),
        **({"prefill": packages[0]} if len(packages) == 1 else {"parts": packages}),
        "decode": inspect_decode(path / "decode"),
    }


def inspect_package(path: Path) -> dict[str, Any]:
    """Describe a `.mlpackage`; see `inspect_path`.

    Raises:
        InputError: the program does not hold together.
    """
    package = Package.open(path)
    try:
        return _describe(path, package)
    except OP_ERRORS as error:
        raise InputError(
            f"{path}: an op does not have the inputs that MIL gives it ({first_line(error)})"
        ) from error


def _describe(path: Path, package: Package) -> dict[str, Any]:
    costs = {function.name: estimate(function) for function in view_package(package).functions}
    weights = {name: list(_weights(package, name)) for name in package.function_names}
    functions = {}
    for name, info in package.functions.items():
        operations = Counter(op.type for op in _operations(package.block(name)) if op.type != "const")
        functions[name] = {
            "opset": package.spec.mlProgram.functions[name].opset,
            "inputs": _values(info.inputs),
            "outputs": _values(info.outputs),
            "states": _values(info.states),
            "ops": dict(sorted(operations.items(), key=lambda item: (-item[1], item[0]))),
            "weights": _groups(weights[name]),
            "weight_bytes": sum(_records(weights[name]).values()),
            "cost": asdict(costs[name]),
        }
    return {
        "kind": "package",
        "path": str(path),
        "size_bytes": folder_bytes(path),
        "spec_version": package.spec.specificationVersion,
        "default_function": package.default_function,
        "functions": functions,
        "sharing": _sharing(weights),
    }


def weight_sharing(path: Path) -> dict[str, Any]:
    """What the functions of a `.mlpackage` name together, and what each names alone, in bytes of its weight files."""
    package = Package.open(path)
    found = _sharing({name: list(_weights(package, name)) for name in package.function_names})
    del found["records"]
    return found


def inspect_decode(path: Path) -> dict[str, Any]:
    """Describe the decode folder: tensors and bytes by type, and its quantization.

    Raises:
        InputError: a file is missing or damaged.
    """
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path / 'config.json'} is missing; the build is incomplete") from None
    except ValueError as error:
        raise InputError(f"{path / 'config.json'} is not JSON ({error})") from error
    tensors: Counter[str] = Counter()
    size_bytes: Counter[str] = Counter()
    for file in sorted(path.glob("*.safetensors")):
        for dtype, size in _safetensors_sizes(file):
            tensors[dtype] += 1
            size_bytes[dtype] += size
    return {
        "model_type": config.get("model_type"),
        "quantization": config.get("quantization"),
        "tensors": {
            dtype: {"tensors": tensors[dtype], "bytes": size_bytes[dtype]} for dtype in sorted(tensors)
        },
        "weight_bytes": size_bytes.total(),
    }


def folder_bytes(path: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _values(values: dict[str, ValueInfo]) -> list[dict[str, Any]]:
    return [{"name": name, "shape": list(info.shape), "dtype": info.dtype} for name, info in values.items()]


def _operations(block: Any) -> Iterator[Any]:
    """Every operation of a block and of the blocks inside its operations."""
    for op in block.operations:
        yield op
        for inner in op.blocks:
            yield from _operations(inner)


def _weights(package: Package, function: str) -> Iterator[Weight]:
    """The weights of a function: what no other constant expression takes up."""
    ops = [
        op
        for op in _operations(package.block(function))
        if op.type == "const" or op.type.startswith("constexpr_")
    ]
    constants = {output.name: op for op in ops for output in op.outputs}
    reader = _ConstantReader(package, constants)
    inner = {argument.name for op in ops for binding in op.inputs.values() for argument in binding.arguments}
    for op in ops:
        if any(output.name in inner for output in op.outputs):
            continue
        weight = reader.weight(op)
        if weight.records:
            yield weight


class _ConstantReader:
    """Reads the constants of one function."""

    def __init__(self, package: Package, constants: dict[str, Any]) -> None:
        self._blobs = package.blobs
        self._constants = constants

    def weight(self, op: Any) -> Weight:
        info = value_info(op.outputs[0].type)
        records = {
            (value.blob.path.name, value.offset): value.size_bytes
            for value in self._leaves(op)
            if isinstance(value, FileValue)
        }
        dtype, granularity = self._form(op, info)
        return Weight(dtype, granularity, math.prod(info.shape), records)

    def _form(self, op: Any, info: ValueInfo) -> tuple[str, str]:
        """How a constant is stored: (type, granularity)."""
        kind = op.type.removeprefix("constexpr_")
        if kind == "const":
            return info.dtype, "-"
        if kind == "affine_dequantize":  # iOS 16: a scale per tensor or per channel
            scale = self._shape(op, "scale")
            return self._dtype(op, "quantized_data"), "per_channel" if math.prod(scale) > 1 else "per_tensor"
        if kind in ("blockwise_shift_scale", "sparse_blockwise_shift_scale"):  # iOS 18
            data = "data" if kind == "blockwise_shift_scale" else "nonzero_data"
            return self._nested_dtype(op, data), _block_granularity(info.shape, self._shape(op, "scale"))
        if kind in ("lut_to_dense", "lut_to_sparse"):
            return self._lut_form(op, info)
        if kind == "sparse_to_dense":
            values = self._nested(op, "nonzero_data")
            if values is None:
                return "sparse", "-"
            dtype, granularity = self._form(values, info)
            return f"sparse {dtype}", granularity
        if kind == "cast":
            return self._dtype(op, "source_val"), "-"
        return kind, "-"

    def _lut_form(self, op: Any, info: ValueInfo) -> tuple[str, str]:
        table = self._shape(op, "lut")
        if len(table) == 1:  # iOS 16: one table, indices packed in bytes
            return f"lut{int(math.log2(table[0]))}", "per_tensor"
        # iOS 18: (groups of each axis ..., number of entries, length of an entry)
        *groups, entries, vector = table
        granularity = _block_granularity(info.shape, tuple(groups)).replace("per_block", "per_group")
        return f"lut{int(math.log2(entries))}" + (f"x{vector}" if vector > 1 else ""), granularity

    def _value(self, op: Any, name: str) -> Any:
        """A parameter of a constant expression: the protobuf value, or the operation that makes it."""
        if name in op.attributes:
            return op.attributes[name]
        argument = op.inputs[name].arguments[0]
        if argument.WhichOneof("binding") == "value":
            return argument.value
        return self._constants[argument.name]

    def _info(self, op: Any, name: str) -> ValueInfo:
        value = self._value(op, name)
        return value_info(value.outputs[0].type if hasattr(value, "outputs") else value.type)

    def _shape(self, op: Any, name: str) -> tuple[int, ...]:
        return self._info(op, name).shape

    def _dtype(self, op: Any, name: str) -> str:
        return self._info(op, name).dtype

    def _nested(self, op: Any, name: str) -> Any | None:
        """The constant expression that makes a parameter; None where it is a plain constant."""
        value = self._value(op, name)
        return value if hasattr(value, "outputs") and value.type != "const" else None

    def _nested_dtype(self, op: Any, name: str) -> str:
        """The stored type of a parameter, which may itself be a constant expression."""
        inner = self._nested(op, name)
        if inner is not None:
            return self._form(inner, value_info(inner.outputs[0].type))[0]
        return self._dtype(op, name)

    def _leaves(self, op: Any) -> Iterator[Any]:
        """Every stored value that a constant is made of, each op read once."""
        edge, seen = [op], {id(op)}
        while edge:
            op = edge.pop()
            for name, value in op.attributes.items():
                if name != "name":
                    yield read_value(value, self._blobs)
            for argument in (argument for binding in op.inputs.values() for argument in binding.arguments):
                if argument.WhichOneof("binding") == "value":
                    yield read_value(argument.value, self._blobs)
                    continue
                maker = self._constants[argument.name]
                if id(maker) not in seen:
                    seen.add(id(maker))
                    edge.append(maker)


def _block_granularity(shape: tuple[int, ...], scales: tuple[int, ...]) -> str:
    """What one scale serves, from the shape of the scales beside that of the data."""
    if math.prod(scales) == 1:
        return "per_tensor"
    split = {axis: shape[axis] // count for axis, count in enumerate(scales) if count > 1}
    blocks = [size for size in split.values() if size > 1]
    if not blocks:
        return "per_channel" if len(split) == 1 else f"per_block {math.prod(shape) // math.prod(scales)}"
    return f"per_block {'x'.join(map(str, blocks))}"


def _records(weights: Iterable[Weight]) -> dict[tuple[str, int], int]:
    return {record: size for weight in weights for record, size in weight.records.items()}


def _groups(weights: list[Weight]) -> list[dict[str, Any]]:
    """Weights by type and granularity, the largest group first; a record counts once in its group."""
    groups: dict[tuple[str, str], list[Weight]] = defaultdict(list)
    for weight in weights:
        groups[weight.dtype, weight.granularity].append(weight)
    rows = [
        {
            "dtype": dtype,
            "granularity": granularity,
            "tensors": len(members),
            "elements": sum(weight.elements for weight in members),
            "bytes": sum(_records(members).values()),
        }
        for (dtype, granularity), members in groups.items()
    ]
    return sorted(rows, key=lambda row: (-row["bytes"], row["dtype"], row["granularity"]))


def _sharing(weights: dict[str, list[Weight]]) -> dict[str, Any]:
    """What the functions name together, and what each names alone, in bytes of the weight files.

    `records` has a row for each set of functions that name the same records of a weight file, by offset.
    """
    sizes: dict[tuple[str, int], int] = {}
    users: dict[tuple[str, int], set[str]] = defaultdict(set)
    for function, members in weights.items():
        for record, size in _records(members).items():
            sizes[record] = size
            users[record].add(function)
    alone = {
        function: sum(size for record, size in sizes.items() if users[record] == {function})
        for function in weights
    }
    together: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for record, names in users.items():
        together[tuple(sorted(names))].append(sizes[record])
    return {
        "records": [
            {"functions": list(names), "records": len(members), "bytes": sum(members)}
            for names, members in sorted(together.items(), key=lambda item: (-len(item[0]), item[0]))
        ],
        "stored_bytes": sum(sizes.values()),
        "named_bytes": sum(size * len(users[record]) for record, size in sizes.items()),
        "shared_bytes": sum(size for record, size in sizes.items() if len(users[record]) > 1),
        "alone_bytes": alone,
    }


def _safetensors_sizes(path: Path) -> Iterator[tuple[str, int]]:
    """(type, bytes) of each tensor of a safetensors file, from its header.

    Raises:
        InputError: the header is damaged, or the file is shorter than it says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_HEADER_BYTES + 1
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise InputError(f"{path}: not a safetensors file, or truncated ({size} bytes)")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise InputError(f"{path}: the safetensors header is damaged ({error})") from error
    header.pop("__metadata__", None)
    for name, tensor in header.items():
        begin, end = tensor["data_offsets"]
        if 8 + length + end > size:
            raise InputError(f"{path}: truncated: tensor {name} ends at byte {8 + length + end} of {size}")
        yield tensor["dtype"], end - begin
