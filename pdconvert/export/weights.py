"""Compressed weights: codes and DequantizeLinear, or tables and a look-up.

A DequantizeLinear has the name of the weight as its output and `NAME_codes`, `NAME_scale` as inputs. ONNX has no
form for lookup tables: codes (`NAME_codes`) are cast to int32 and choose from `NAME_tables` by GatherElements, one
row of which belongs to a table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pdconvert.export.graph import GraphWriter, held_array, record_key, refusal

if TYPE_CHECKING:
    from pdconvert.executors.mil.view import Op, Value

CODE_TYPES = {"int4": "INT4", "uint4": "UINT4", "int8": "INT8", "uint8": "UINT8"}


@dataclass(frozen=True)
class QuantizedWeight:
    """The integer form of a weight, as its encodings need it.

    Attributes:
        bits: of a code.
        signed: whether codes are.
        scale: float32: () per tensor, (n,) per channel, of the weight's shape but for `axis` per block.
        zero_point: like scale, or None for zero.
        axis: of the channels, or along which blocks lie; None per tensor.
        block_size: entries of `axis` that share a scale; 0 per channel.
        block_scales: of an LPBQ grid, the whole numbers in `scale`, of its shape; the rest of it is per channel.
    """

    bits: int
    signed: bool
    scale: np.ndarray
    zero_point: np.ndarray | None
    axis: int | None
    block_size: int = 0
    block_scales: np.ndarray | None = None


def shift_scale(graph: GraphWriter, op: Op) -> None:
    """constexpr_blockwise_shift_scale: scale · (data − offset), by channel or by block of one axis."""
    data = _plain(op, "data")
    values, whole = _scales(op)
    zeros = held_array(_plain(op, "offset")) if op.input("offset") is not None else None
    if zeros is not None and zeros.dtype.kind == "f":
        raise refusal(op, "has an offset that is no integer")
    shape, blocks = data.shape, values.shape
    axis, block, held = None, 0, blocks
    if math.prod(blocks) == 1:
        held = ()
    else:
        per_channel = [
            a for a in range(len(shape)) if blocks[a] == shape[a] and math.prod(blocks) == blocks[a]
        ]
        cut = [a for a in range(len(shape)) if blocks[a] != shape[a]]
        if per_channel:
            axis, held = per_channel[0], (blocks[per_channel[0]],)
        elif len(cut) == 1:
            axis, block = cut[0], shape[cut[0]] // blocks[cut[0]]
        else:
            raise refusal(
                op, f"has scales {blocks} for data {shape}, which are not by channel or one axis' blocks"
            )
    zeros = None if zeros is None else zeros.reshape(held)
    _dequantize(graph, op, data, _form(data, values.reshape(held), zeros, axis, block, whole))


def affine(graph: GraphWriter, op: Op) -> None:
    """constexpr_affine_dequantize: scale · (data − zero point), both scalars or along one axis."""
    data, scale, zero = (_plain(op, name) for name in ("quantized_data", "scale", "zero_point"))
    values, zeros = held_array(scale).astype(np.float32), held_array(zero)
    axis = op.param("axis", 0) % len(data.shape) if values.ndim else None
    if values.ndim:
        zeros = np.broadcast_to(zeros, values.shape)
    _dequantize(graph, op, data, _form(data, values, zeros if zeros.any() else None, axis))


def tables(graph: GraphWriter, op: Op) -> None:
    """constexpr_lut_to_dense: one table, or one for each run of output channels (axis 0)."""
    indices, lut = _plain(op, "indices"), _plain(op, "lut")
    groups, size = lut.shape[0], lut.shape[-2]
    if len(lut.shape) != len(indices.shape) + 2 or math.prod(lut.shape) != groups * size:
        raise refusal(op, f"has tables of shape {lut.shape}, which are not by output channels")
    kind = "UINT4" if indices.dtype == "uint4" else "UINT8"
    flat = groups, math.prod(indices.shape) // groups
    codes = f"{op.name}_codes"
    key = record_key(indices, f"{kind} {flat}")
    graph.add_initializer(codes, kind, flat, key, lambda: held_array(indices).astype(np.uint8))
    entries = held_array(lut).astype(np.float32)
    graph.add_initializer(
        f"{op.name}_tables", "FLOAT", (groups, size), record_key(lut, "FLOAT"), lambda: entries
    )
    from onnx import TensorProto

    index = graph.node("Cast", [codes], f"{op.name}_index", to=TensorProto.INT32)
    chosen = graph.node("GatherElements", [f"{op.name}_tables", index], f"{op.name}_flat", axis=1)
    graph.node("Reshape", [chosen, graph.integers(op.name, op.out.shape)], op.name)


def _plain(op: Op, parameter: str) -> Value:
    """A parameter that stands in the package, not one that another op computes."""
    value = op.input(parameter)
    if value is None or value.held is None:
        raise refusal(op, f"has no plain constant {parameter}")
    return value


def _scales(op: Op) -> tuple[np.ndarray, np.ndarray | None]:
    """An op's scales in float32; of an LPBQ grid, whose scales another op computes, their whole numbers too."""
    value = op.input("scale")
    maker = None if value is None else value.maker
    if maker is None or maker.type != op.type:
        return held_array(_plain(op, "scale")).astype(np.float32), None
    if maker.input("offset") is not None:
        raise refusal(op, "has scales with an offset")
    whole, channel = (held_array(_plain(maker, name)).astype(np.float32) for name in ("data", "scale"))
    if channel.shape != (len(whole), *(1,) * (whole.ndim - 1)):
        raise refusal(op, f"has scales {channel.shape} of scales {whole.shape}, which are not by channel")
    return whole * channel, whole


def _form(
    data: Value,
    scale: np.ndarray,
    zeros: np.ndarray | None,
    axis: int | None,
    block: int = 0,
    whole: np.ndarray | None = None,
) -> QuantizedWeight:
    bits = 4 if data.dtype.endswith("4") else 8
    return QuantizedWeight(bits, not data.dtype.startswith("u"), scale, zeros, axis, block, whole)


def _dequantize(graph: GraphWriter, op: Op, data: Value, form: QuantizedWeight) -> None:
    if data.dtype not in CODE_TYPES:
        raise refusal(op, f"has codes of type {data.dtype}")
    kind = CODE_TYPES[data.dtype]
    names = [f"{op.name}_codes", f"{op.name}_scale"]
    graph.add_initializer(names[0], kind, data.shape, record_key(data, kind), lambda: held_array(data))
    scales = op.input("scale")
    key = None if scales is None else record_key(scales, "FLOAT")
    graph.add_initializer(names[1], "FLOAT", form.scale.shape, key, lambda: form.scale)
    if form.zero_point is not None:
        zeros = form.zero_point
        names.append(f"{op.name}_zero_point")
        graph.add_initializer(names[2], kind, zeros.shape, None, lambda: zeros)
    attributes: dict[str, Any] = {} if form.axis is None else {"axis": form.axis}
    attributes |= {"block_size": form.block_size} if form.block_size else {}
    graph.node("DequantizeLinear", names, op.name, **attributes)
    graph.quantized[op.name] = form
