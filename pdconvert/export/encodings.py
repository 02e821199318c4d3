"""AIMET-style encodings of an exported model, versions 1.0.0 and 2.0.0.

Both name the tensors of the ONNX model: weights by the output of their DequantizeLinear, with the codes' own scales;
activations as unsigned 16-bit integers over observed ranges. Weights from lookup tables are on no integer grid and
have no encoding.

| | 1.0.0 | 2.0.0 |
|---|---|---|
| value | (unsigned code + offset) · scale | (code − y_zero_point) · y_scale |
| weight, signed | `offset` −2^(bw−1) | `output_dtype` int4 or int8, no zero point |
| per channel | lists over channels | `y_scale` list, `axis` |
| per block | lists, row by row, `block_size` | `y_scale` nested as the weight, `axis`, `block_size` |
| LPBQ | `per_block_int_scale`, `scale` per channel | `per_block_int_scale`, `per_channel_float_scale` |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pdconvert.export.ranges import Range
from pdconvert.export.weights import QuantizedWeight
from pdconvert.quant.packing import BLOCK_SCALE_BITS

ACTIVATION_BITS = 16
LEVELS = (1 << ACTIVATION_BITS) - 1
SMALLEST_SCALE = 2.0**-40
"""Of an activation that is always zero."""


def grid(found: Range) -> tuple[float, int]:
    """Scale and zero point of a range on the unsigned 16-bit grid."""
    scale = max((found.high - found.low) / LEVELS, SMALLEST_SCALE)
    return scale, min(LEVELS, max(0, round(-found.low / scale)))


def encodings_1(weights: Mapping[str, QuantizedWeight], ranges: Mapping[str, Range]) -> dict[str, Any]:
    """The content of a file of version 1.0.0."""
    activation = []
    for name, found in ranges.items():
        scale, zero = grid(found)
        entry = {"name": name, "enc_type": "PER_TENSOR", "dtype": "INT", "bw": ACTIVATION_BITS}
        activation.append({**entry, "is_sym": False, "scale": [scale], "offset": [-zero]})
    return {
        "version": "1.0.0",
        "activation_encodings": activation,
        "param_encodings": [_weight_1(name, form) for name, form in weights.items()],
        "excluded_layers": [],
        "quantizer_args": {
            "activation_bitwidth": ACTIVATION_BITS,
            "param_bitwidth": max((form.bits for form in weights.values()), default=16),
            "dtype": "int",
            "is_symmetric": True,
            "per_channel_quantization": any(form.axis is not None for form in weights.values()),
            "quant_scheme": "min_max",
        },
    }


def _weight_1(name: str, form: QuantizedWeight) -> dict[str, Any]:
    kind = "PER_TENSOR" if form.axis is None else "PER_BLOCK" if form.block_size else "PER_CHANNEL"
    scales = form.scale.reshape(-1).tolist()
    zeros = [0] * len(scales) if form.zero_point is None else form.zero_point.reshape(-1).tolist()
    shift = 1 << form.bits - 1 if form.signed else 0
    entry = {
        "name": name,
        "enc_type": kind,
        "dtype": "INT",
        "bw": form.bits,
        "is_sym": form.zero_point is None,
    }
    block = {"block_size": form.block_size} if form.block_size else {}
    if form.block_scales is not None:
        wide = form.bits + BLOCK_SCALE_BITS
        channels = _per_channel(form).tolist()
        return {
            **entry,
            **block,
            "enc_type": "LPBQ",
            "bw": wide,
            "compressed_bw": form.bits,
            "per_block_int_scale": form.block_scales.reshape(-1).astype(int).tolist(),
            "scale": channels,
            "offset": [-(1 << wide - 1)] * len(channels),
        }
    return {**entry, **block, "scale": scales, "offset": [-int(zero) - shift for zero in zeros]}


def _per_channel(form: QuantizedWeight) -> np.ndarray:
    """The scales of an LPBQ grid without its whole numbers, one per output channel; exact, as the products are."""
    assert form.block_scales is not None
    return (form.scale / form.block_scales).reshape(len(form.scale), -1)[:, 0]


def encodings_2(weights: Mapping[str, QuantizedWeight], ranges: Mapping[str, Range]) -> dict[str, Any]:
    """The content of a file of version 2.0.0."""
    entries: list[dict[str, Any]] = []
    for name, found in ranges.items():
        scale, zero = grid(found)
        entries.append(
            {"name": name, "output_dtype": f"uint{ACTIVATION_BITS}", "y_scale": scale, "y_zero_point": zero}
        )
    for name, form in weights.items():
        entry: dict[str, Any] = {"name": name, "output_dtype": f"{'' if form.signed else 'u'}int{form.bits}"}
        if form.block_scales is None:
            entry["y_scale"] = form.scale.tolist()
        else:
            entry["per_block_int_scale"] = form.block_scales.astype(int).tolist()
            entry["per_channel_float_scale"] = _per_channel(form).tolist()
        if form.zero_point is not None:
            entry["y_zero_point"] = form.zero_point.tolist()
        if form.axis is not None:
            entry["axis"] = form.axis
        if form.block_size:
            entry["block_size"] = form.block_size
        entries.append(entry)
    return {"version": "2.0.0", "encodings": entries}
