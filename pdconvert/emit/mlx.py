"""The decode half: a folder that stock `mlx_lm.load` reads, written from the quantized store.

A record becomes MLX's affine form without any new rounding: unsigned codes, the fp16 scales (block scales multiplied
in) repeated for every MLX group, and biases −2^(bits−1)·scale, or −zero point·scale. MLX knows groups of 32, 64 and
128 inputs; a weight that none of them divides is written as plain fp16 and reported, and so is one whose values come
from lookup tables, which MLX has no form for. A weight on its checkpoint's own affine grid is written as it is.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pdconvert.emit.shards import ShardWriter
from pdconvert.errors import CheckFailed, InputError
from pdconvert.quant.packing import code_offset, pack_words, unsigned_codes

if TYPE_CHECKING:
    from pdconvert.quant.grid import AffineLinear, LutLinear, QuantizedLinear
    from pdconvert.quant.store import DecodeStored

MLX_GROUPS = (128, 64, 32)
"""Group sizes of `mx.quantize(mode="affine")`, the one with the fewest scales first."""

CHUNK_VALUES = 1 << 22
"""Weights converted at a time, so that a large embedding needs little memory."""


class TokenizerSource(Protocol):
    """The part of a source that the decode folder needs."""

    def write_tokenizer(self, folder: Path) -> None:
        """Put tokenizer files, chat template, generation_config.json and licence files into a folder."""


@dataclass(frozen=True)
class DecodeFolder:
    """What was written.

    Attributes:
        files: names of the weight files and their index.
        size_bytes: bytes of all tensors, scales and biases included.
        quantization: the `quantization` object of config.json; empty where nothing is quantized.
        unquantized: records written as plain fp16, and why.
    """

    files: tuple[str, ...]
    size_bytes: int
    quantization: dict[str, Any]
    unquantized: Mapping[str, str]


@dataclass(frozen=True)
class StoreEquality:
    """Extent of a successful check: tensors and single values that were compared."""

    tensors: int
    values: int


def mlx_group(inputs: int, group: int) -> int | None:
    """The largest MLX group that keeps every scale exact.

    Args:
        inputs: size of the input axis.
        group: inputs that share a scale in the record; 0 for all of them.

    Returns:
        A group size, or None where MLX has none that divides both.
    """
    return next((size for size in MLX_GROUPS if inputs % size == 0 and group % size == 0), None)


def fp16_reason(value: DecodeStored) -> str | None:
    """Why MLX cannot hold a record's codes, so that its values are written in fp16; None where it can."""
    from torch import Tensor

    record = _as_record(value)
    if record is None:
        return None if isinstance(value, Tensor) else "MLX has no tables"
    if mlx_group(record.shape[1], record.group) is not None:
        return None
    groups = ", ".join(map(str, MLX_GROUPS))
    return f"MLX's groups ({groups}) do not divide {record.group or record.shape[1]} input channels"


def write_decode_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, DecodeStored]],
    source: TokenizerSource,
) -> DecodeFolder:
    """Writes weights, index, config.json and tokenizer.

    Args:
        folder: made if missing; must hold no `model*.safetensors`, since mlx-lm loads all that match.
        config: the mlx-lm config in old-style keys, without `quantization`.
        tensors: (name, value) as they come, each name once and ending in `.weight` for a record. Only one
            value is held at a time.
        source: writes the tokenizer.

    Raises:
        InputError: a value that fp16 cannot hold, or an MLX bias that it cannot hold exactly.
        ValueError: a name given twice, or a record whose scales do not fit its codes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stale = sorted(path.name for path in folder.glob("model*.safetensors"))
    if stale:
        raise ValueError(f"{folder} already holds {stale[0]}, which mlx-lm would load too")
    source.write_tokenizer(folder)
    grids: dict[str, tuple[int, int]] = {}
    unquantized: dict[str, str] = {}
    parameters = 0
    with ShardWriter(folder) as writer:
        for name, value in tensors:
            record, why = _as_record(value), fp16_reason(value)
            parameters += math.prod(value.shape)
            if why:
                unquantized[name] = why
            group = None if record is None else mlx_group(record.shape[1], record.group)
            if record is None or group is None:
                _write_plain(writer, name, value)
            else:
                grids[_module(name)] = (group, record.bits)
                _write_record(writer, name, record, group)
        files = writer.close({"total_parameters": parameters})
    quantization = quantization_config(grids)
    content = {**config, "quantization": quantization} if quantization else dict(config)
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    (folder / "config.json").write_text(text + "\n", "utf-8")
    return DecodeFolder(files, writer.total_bytes, quantization, unquantized)


def check_store_equality(folder: Path, tensors: Iterable[tuple[str, DecodeStored]]) -> StoreEquality:
    """Compares what MLX reads from a decode folder with the store, value by value.

    Quantized weights are de-quantized by MLX itself in fp32, and must equal codes · scales (+ biases) in fp32
    bit for bit; plain tensors must equal the stored values in fp16.

    Args:
        folder: a decode folder.
        tensors: the (name, value) pairs that it was written from, in any order.

    Raises:
        CheckFailed: a value differs, or a tensor is missing or left over.
    """
    import mlx.core as mx

    written: dict[str, Any] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        loaded: Any = mx.load(str(path))
        written.update(loaded)
    count = values = 0
    for name, value in tensors:
        record, parts = _as_record(value), {"weight": name}
        group = None if record is None else mlx_group(record.shape[1], record.group)
        if group is not None:
            parts |= {part: f"{_module(name)}.{part}" for part in ("scales", "biases")}
        missing = [part for part in parts.values() if part not in written]
        if missing:
            raise CheckFailed(f"{folder}: tensor {missing[0]} is missing; build again")
        arrays = {part: written.pop(full) for part, full in parts.items()}
        _compare(f"{folder}: {name}", arrays, value, group)
        count += 1
        values += math.prod(value.shape)
    if written:
        raise CheckFailed(f"{folder}: tensor {sorted(written)[0]} is not in the store; build again")
    return StoreEquality(count, values)


def _as_record(value: DecodeStored) -> QuantizedLinear | AffineLinear | None:
    """A value that MLX may hold as codes."""
    from pdconvert.quant.grid import AffineLinear, QuantizedLinear

    return value if isinstance(value, QuantizedLinear | AffineLinear) else None


def _module(name: str) -> str:
    """Path of the module that a record's weight belongs to."""
    if not name.endswith(".weight"):
        raise ValueError(f"quantized tensor {name} does not end in .weight")
    return name.removesuffix(".weight")


def _rows_at_a_time(shape: tuple[int, ...]) -> Iterator[slice]:
    """Slices of the first axis with about `CHUNK_VALUES` values each."""
    rows = max(1, CHUNK_VALUES // max(1, math.prod(shape[1:])))
    return (slice(start, start + rows) for start in range(0, shape[0], rows))


def _float_rows(value: DecodeStored, rows: slice) -> np.ndarray:
    """Some rows of a value in fp32."""
    from torch import Tensor

    from pdconvert.quant.grid import LutLinear

    if isinstance(value, Tensor):
        return value[rows].float().numpy()
    return (
        _looked_up(value, rows)
        if isinstance(value, LutLinear)
        else value.each(lambda part: part[rows]).dequantize().numpy()
    )


def _looked_up(record: LutLinear, rows: slice) -> np.ndarray:
    """Entries of the tables of some rows, fp32 (R, I)."""
    tables = record.tables.float().numpy()
    codes = record.codes[rows].numpy()
    chosen = np.arange(len(record.codes))[rows] // record.rows
    return tables[chosen[:, None], codes]


def _write_plain(writer: ShardWriter, name: str, value: DecodeStored) -> None:
    def halves() -> Iterator[np.ndarray]:
        for rows in _rows_at_a_time(value.shape):
            exact = _float_rows(value, rows)
            with np.errstate(over="ignore"):
                half = exact.astype("<f2")
            if not np.isfinite(half).all():
                largest = float(np.abs(exact).max())
                raise InputError(
                    f"{name}: values up to {largest:.6g} do not fit fp16 (65504); "
                    "rescale this tensor in the checkpoint"
                )
            yield half

    writer.add(name, "F16", tuple(value.shape), halves())


def _write_record(writer: ShardWriter, name: str, record: QuantizedLinear | AffineLinear, group: int) -> None:
    """The three tensors of an affine-quantized MLX module."""
    from pdconvert.quant.grid import AffineLinear

    if isinstance(record, AffineLinear):
        _write_affine(writer, name, record)
        return
    outputs, inputs = record.shape
    columns = inputs // record.group if record.group else 1
    scales = record.group_scales.half().numpy().astype("<f2", copy=False)
    if scales.shape != (outputs, columns):
        raise ValueError(
            f"{name}: scales of shape {scales.shape} for codes of shape {(outputs, inputs)} "
            f"and group {record.group}, expected {(outputs, columns)}"
        )
    biases = _biases(name, record, scales)

    def words() -> Iterator[np.ndarray]:
        for rows in _rows_at_a_time((outputs, inputs)):
            codes = record.codes[rows].numpy()
            codes = codes if record.zero_points is not None else unsigned_codes(codes, record.bits)
            yield pack_words(codes, record.bits)

    repeats = inputs // group // columns
    writer.add(name, "U32", (outputs, inputs * record.bits // 32), words())
    for part, values in (("scales", scales), ("biases", biases)):
        writer.add(f"{_module(name)}.{part}", "F16", (outputs, inputs // group), [values.repeat(repeats, 1)])


def _biases(name: str, record: QuantizedLinear, scales: np.ndarray) -> np.ndarray:
    """MLX's biases (O, G) fp16: −zero point · scale, to the bit.

    Raises:
        InputError: one is no fp16 number.
    """
    zeros: np.ndarray | int = code_offset(record.bits)
    if record.zero_points is not None:
        zeros = record.zero_points.numpy().astype(np.float32)
    exact = scales.astype(np.float32) * -zeros
    with np.errstate(over="ignore"):
        biases = exact.astype("<f2")
    wrong = biases.astype(np.float32) != exact
    if wrong.any():
        row, group = (int(axis[0]) for axis in np.nonzero(wrong))
        zero = int(np.broadcast_to(zeros, scales.shape)[row, group])
        raise InputError(
            f"{name}: output channel {row} has scale {scales[row, group]:.6g}, whose MLX bias "
            f"-{zero} x scale does not fit fp16 (65504, 11 bits); leave this weight unquantized"
        )
    return biases


def _write_affine(writer: ShardWriter, name: str, record: AffineLinear) -> None:
    """The three tensors of a module whose grid is MLX's already."""
    rows = _rows_at_a_time(record.shape)
    words = (pack_words(record.codes[part].numpy(), record.bits) for part in rows)
    writer.add(name, "U32", (record.shape[0], record.shape[1] * record.bits // 32), words)
    for part in ("scales", "biases"):
        values = getattr(record, part).numpy()
        writer.add(f"{_module(name)}.{part}", "F16", values.shape, [values])


def quantization_config(grids: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """The `quantization` object of mlx-lm: the commonest grid, and every module that has another one."""
    if not grids:
        return {}
    common = min(Counter(grids.values()).items(), key=lambda item: (-item[1], item[0]))[0]
    others = {module: grid for module, grid in sorted(grids.items()) if grid != common}
    return {
        "group_size": common[0],
        "bits": common[1],
        "mode": "affine",
        **{module: {"group_size": group, "bits": bits} for module, (group, bits) in others.items()},
    }


def _compare(where: str, arrays: Mapping[str, Any], value: DecodeStored, group: int | None) -> None:
    """Raises CheckFailed at the first row chunk in which MLX's values differ from the store's.

    `group` is the MLX group of a quantized weight, None for a plain one.
    """
    import mlx.core as mx

    record = _as_record(value)
    for rows in _rows_at_a_time(value.shape):
        stored = _float_rows(value, rows)
        if record is not None and group is not None:
            read = mx.dequantize(
                arrays["weight"][rows],
                arrays["scales"][rows].astype(mx.float32),
                arrays["biases"][rows].astype(mx.float32),
                group_size=group,
                bits=record.bits,
                stream=mx.cpu,
            )
        else:
            read, stored = arrays["weight"][rows].astype(mx.float32), stored.astype("<f2").astype(np.float32)
        found = np.array(read)
        if found.shape != stored.shape:
            raise CheckFailed(f"{where}: MLX reads shape {found.shape}, the store has {stored.shape}")
        differ = found != stored
        if differ.any():
            first = tuple(int(axis[0]) for axis in np.nonzero(differ))
            raise CheckFailed(
                f"{where}: {int(differ.sum())} values differ from the store, the first at row "
                f"{rows.start + first[0]}: {float(found[first])} instead of {float(stored[first])}"
            )
