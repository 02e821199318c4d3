"""Rules on weights: how they are stored, and what functions share."""

from collections import defaultdict
from collections.abc import Iterator

from pdconvert.executors.mil.view import FunctionView, Op, PackageView, Value
from pdconvert.lint.rule import Found, function_rule, package_rule
from pdconvert.lint.targets import CHIPS, INT8_FOLDS, MAC_SIZE, PHONE_SIZE

MEASURED_GROUP = 8
BYTE_TYPES = ("int8", "uint8")
_SCALED = ("constexpr_blockwise_shift_scale", "constexpr_sparse_blockwise_shift_scale")
_LUTS = ("constexpr_lut_to_dense", "constexpr_lut_to_sparse")


@function_rule(
    "blockwise-weights",
    "silent",
    title="Weights with a scale for each block do not run on the Neural Engine, or run wrong",
    source="coremltools#2510: `ANE only support per-cout/per-tensor quantization`, runs on the CPU; coreai-models#279:"
    " cosine 0.367 on the Neural Engine; coreai-models#205: on the GPU without an error (issues). By a private route"
    " blockwise weights stream from A15 on (reverse-engineered)",
    mend="use one scale per output channel, or a table of 16 values (LUT)",
)
def blockwise_weights(function: FunctionView) -> Iterator[Found]:
    """`constexpr_blockwise_shift_scale` with scales along another axis than the output channels, or for part of one."""
    for op in function.ops:
        scale = op.input("scale") if op.type in _SCALED else None
        if scale is None or _is_table(op):
            continue
        shape, axis = op.out.shape, _output_axis(op)
        split = {i: size for i, size in enumerate(scale.shape) if size > 1}
        if split and split != {axis: shape[axis]}:
            blocks = "x".join(str(shape[i] // size) for i, size in enumerate(scale.shape))
            yield Found(f"weight with one scale for each block of {blocks}", op)


@function_rule(
    "lut-groups",
    "perf",
    title="Tables for fewer than 8 output channels are slow on the Neural Engine",
    source="coremltools `opt-opt1_3.md`, OPT-1.3B on iPhone 15 Pro: fp16 92 ms; 4-bit LUT per tensor 14.8, groups of 8"
    " 15.5, of 4 17.1, of 2 30.7, of 1 59.1 (documentation)",
    mend="use one table for 8 or more output channels",
)
def lut_groups(function: FunctionView) -> Iterator[Found]:
    """`constexpr_lut_to_dense` with a table for fewer than 8 output channels, or for groups of another axis."""
    for op in function.ops:
        table = op.input("lut") if op.type in _LUTS else None
        if table is None or len(table.shape) < 3:  # the form of iOS 16 has one table
            continue
        shape, groups, axis = op.out.shape, table.shape[:-2], _output_axis(op)
        others = [i for i, size in enumerate(groups) if size > 1 and i != axis]
        if others:
            yield Found(f"tables for groups of axis {others[0]}, a form that was not measured", op)
        elif groups[axis] > 1 and shape[axis] // groups[axis] < MEASURED_GROUP:
            yield Found(f"one table for {shape[axis] // groups[axis]} output channels", op)


@function_rule(
    "int8-folds",
    "info",
    title="8-bit weights are expanded to fp16 in memory: smaller on disk, no faster",
    source=INT8_FOLDS,
    mend="none needed; a table of 16 values (LUT) crosses memory in its small form on every chip",
    chips=tuple(chip.name for chip in CHIPS if chip.int8.value == "folds"),
)
def int8_folds(function: FunctionView) -> Iterator[Found]:
    """8-bit weights with a scale."""
    for op in function.ops:
        data = _coded(op)
        if (
            data is not None
            and data.dtype in BYTE_TYPES
            and op.input("scale") is not None
            and not _is_table(op)
        ):
            yield Found("8-bit weight", op)


@function_rule(
    "palette-ios18",
    "info",
    title="Tables in packages for iOS 18 gave wrong numbers or crashed with some versions",
    source="coremltools#2688 and #2716, open: coremltools 9.0, macOS 26 on M4 (issues)",
    mend="run the package on the device before it is trusted; one by coremltools 8.3 did not crash for one user",
)
def palette_ios18(function: FunctionView) -> Iterator[Found]:
    """`constexpr_lut_to_dense` in its form of iOS 18."""
    for op in function.ops:
        table = op.input("lut") if op.type in _LUTS else None
        if table is not None and len(table.shape) > 2:
            yield Found("weight in tables, form of iOS 18", op)


@function_rule(
    "scaled-palette",
    "fatal",
    title="Tables with a scale per output channel crash when the Neural Engine loads them",
    source="coremltools#2688, confirmed there by a second user: `mps.dequantize` fails verification (issue)",
    mend="palettize without enable_per_channel_scale, or multiply the output of the op by the scale",
)
def scaled_palette(function: FunctionView) -> Iterator[Found]:
    """`constexpr_blockwise_shift_scale` of a table's result, or of the table with more than one scale.

    coremltools 9.0 moves the scale of the first form onto the table before it saves.
    """
    for op in function.ops:
        data = _coded(op) if op.type in _SCALED else None
        if data is not None and data.maker is not None and data.maker.type in _LUTS:
            yield Found("table with a scale", op)
        scale = op.input("scale")
        if op.type in _SCALED and _is_table(op) and scale is not None and scale.elements > 1:
            yield Found("table with scales", op)


@package_rule(
    "weight-size",
    "silent",
    title="Large packages were seen to run on the GPU without a word",
    source=f"{PHONE_SIZE}; {MAC_SIZE}",
    mend="fewer bits a weight, or split the model into several packages",
)
def weight_size(package: PackageView) -> Iterator[Found]:
    """A weight file larger than 1 GB for phones, 2 GB for Macs."""
    for name, size in package.weight_files.items():
        chips = tuple(chip.name for chip in CHIPS if size > chip.package_bytes.value)
        if chips:
            yield Found(f"weight file of {size / 1e9:.2f} GB", name=name, chips=chips)


@package_rule(
    "unshared-weights",
    "perf",
    title="Functions share a weight only where all its bytes are equal",
    source="coremltools, save_multifunction (code); Anemll: k-means for each function by itself gave 862 MB, shared"
    " tables 472 MB (documentation)",
    mend="compress once, then combine the functions (multifunction packages that pdconvert writes do)",
)
def unshared_weights(package: PackageView) -> Iterator[Found]:
    """Weights of equal name, shape and type in two functions that lie at different places of the weight file."""
    places: dict[tuple[str, tuple[int, ...], str], dict[frozenset[tuple[str, int]], int]] = defaultdict(dict)
    for function in package.functions:
        for value in _weights(function):
            records = value.records()
            if records:
                key = (value.name, value.shape, value.dtype)
                places[key][frozenset(records)] = sum(records.values())
    for (name, shape, dtype), copies in places.items():
        if len(copies) > 1:
            extra = sum(copies.values()) - max(copies.values())
            value = Value(name, shape, dtype)
            yield Found(
                f"weight stored {len(copies)} times", name=f"{name} ({extra} bytes more)", value=value
            )


def _coded(op: Op) -> Value | None:
    """The codes that a constant expression scales, also in its sparse form and in that of iOS 16."""
    if not op.type.startswith("constexpr_"):
        return None
    return op.input("data") or op.input("nonzero_data") or op.input("quantized_data")


def _is_table(op: Op) -> bool:
    """Whether what an op makes is a lookup table, not a weight."""
    return any(user.type in _LUTS and op.out in user.inputs.get("lut", ()) for user in op.out.users)


def _weights(function: FunctionView) -> Iterator[Value]:
    """Constants that computed ops take, each once."""
    seen: set[int] = set()
    for op in function.computed_ops:
        for value in op.values():
            if value.is_constant and id(value) not in seen:
                seen.add(id(value))
                yield value


def _output_axis(op: Op) -> int:
    """The axis of output channels of a weight, as the op that multiplies by it has it."""
    value = op.outputs[-1]  # sparse forms give a mask of the dense shape first, then the packed values
    while value.users and value.users[0].is_constant and value.users[0].type.startswith("constexpr_"):
        value = value.users[0].outputs[-1]
    user = value.users[0] if value.users else None
    if user is not None and user.type == "conv_transpose":
        return 1
    if user is not None and user.type == "matmul":
        if user.input("y") is value:
            return len(value.shape) - (2 if user.param("transpose_y", False) else 1)
        return len(value.shape) - (1 if user.param("transpose_x", False) else 2)
    return 0
