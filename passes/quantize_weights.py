"""Weights on the grid that both halves of the pair store."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar, Literal

from torch import Tensor, nn

from pdconvert.blocks import rewrite
from pdconvert.errors import InputError
from pdconvert.program import Block
from pdconvert.quant.grid import FP16_MAX, QuantizedLinear, decode_group, quantize_symmetric

BITS = {"w8a16": 8}


@dataclass(frozen=True)
class QuantizeWeights:
    """Quantize the weight of every linear or 1×1 convolution; what is left (norms, biases) becomes fp16.

    Before: fp32 weights. After: values of the stored form, with the codes and scales as records of the block.

    Attributes:
        scheme: `none` (fp16 weights) or `w8a16` (8-bit weights, symmetric, fp16 activations).
        granularity: `per_channel`, one scale per output channel: the form that the ANE and MLX can both hold;
            `per_group`, one per 64 (or 32) input channels, finer, for matrices that only MLX holds.
    """

    name: ClassVar[str] = "quantize_weights"
    scheme: Literal["none", "w8a16"] = "w8a16"
    granularity: Literal["per_channel", "per_group"] = "per_channel"

    @property
    def floor_db(self) -> float:
        """25 dB per block for W8 (below it the scheme should change), 50 dB for fp16 weights."""
        return 50.0 if self.scheme == "none" else 25.0

    def requires(self, block: Block) -> None:
        if block.records:
            raise InputError("quantize_weights is listed twice in the recipe")

    def run(self, block: Block) -> Block:
        module = rewrite(block.module, lambda part: None)
        records: dict[str, QuantizedLinear] = {}
        for path, part in module.named_modules():
            for kind, parameter in list(part._parameters.items()):
                if parameter is None:
                    continue
                name = f"{path}.{kind}"
                if kind == "weight" and self.scheme != "none" and isinstance(part, nn.Linear | nn.Conv2d):
                    matrix = parameter.detach().flatten(1)
                    group = decode_group(matrix.shape[1]) if self.granularity == "per_group" else 0
                    record = quantize_symmetric(matrix, BITS[self.scheme], f"{block.name}.{name}", group)
                    records[name] = record
                    value = record.dequantize().view(parameter.shape)
                else:
                    value = to_fp16(parameter.detach(), f"{block.name}.{name}").float()
                part._parameters[kind] = nn.Parameter(value, requires_grad=False)
        return replace(block, module=module, records=MappingProxyType(records))

    def ensures(self, before: Block, after: Block) -> None:
        linears = [
            name for name, part in after.module.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)
        ]
        expected = set() if self.scheme == "none" else {f"{name}.weight" for name in linears}
        assert set(after.records) == expected, "a weight was skipped"


def to_fp16(value: Tensor, name: str) -> Tensor:
    """The tensor in fp16.

    Raises:
        InputError: a value exceeds fp16.
    """
    if value.abs().max() > FP16_MAX:
        raise InputError(f"{name}: a value of {value.abs().max().item():.4g} exceeds fp16 (65504)")
    return value.half()
