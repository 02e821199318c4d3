"""Weights on the grid that the store keeps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor, nn

from pdconvert.errors import InputError
from pdconvert.program import Block
from pdconvert.quant.grid import (
    FP16_MAX,
    LutLinear,
    QuantizedLinear,
    Record,
    fitting_group,
    quantize_symmetric,
)
from pdconvert.quant.grids import IntegerGrid, TableGrid, integer_grid, table_grid
from pdconvert.rewriting import rewrite, set_parameter

if TYPE_CHECKING:
    from pdconvert.quant.calibration import Calibration, Grams

BITS = {"w8a16": 8, "w6a16": 6, "w4a16": 4}
GROUPED = {"per_group": 64, "per_grouped_channel": 4}
"""Granularities with a size, and its default: input channels per scale, output channels per table."""
GRANULARITIES = {
    "integer": ("per_channel", "per_group"),
    "lut": ("per_tensor", "per_grouped_channel"),
    "lpbq": ("per_group",),
}
DEFAULT_GRANULARITY = {"integer": "per_channel", "lut": "per_grouped_channel", "lpbq": "per_group"}
FLOORS = {4: 8.0, 6: 15.0, 8: 25.0}
"""Least SQNR of a block, dB, by bits; below it the scheme should change."""


@dataclass(frozen=True)
class QuantizeWeights:
    """Quantize the weight of every linear or 1×1 convolution; what is left (norms, biases) becomes fp16.

    Before: fp32 weights. After: values of the stored form, with the codes and scales as records of the block.

    Attributes:
        scheme: `none` (fp16 weights), or `w8a16`, `w6a16`, `w4a16`: bits of the weights, activations in fp16.
        form: `integer`: code times scale; `lut`: entries of tables made by k-means; `lpbq`: low-power block
            quantization, where the scale of a group is a whole number, 1 to 15, times one scale per output channel.
        symmetric: of integers, whether codes are about 0; `false` gives every scale a zero point beside it.
        granularity: for integers `per_channel`, one scale per output channel, the form that the ANE and MLX can
            both hold, or `per_group`, one per group of input channels, for MLX; for tables `per_tensor`, or
            `per_grouped_channel`, one per group of output channels: of 4 at 4 bits, 16 at 6, 64 at 8. Left out,
            per_channel or per_grouped_channel; of `lpbq`, per_group, which is the only one.
        group_size: channels in a group; 0 takes 64 input channels or 4 output ones. Where a size does not divide, a
            smaller one is taken, at last the whole row, and the build lists these weights.
        rounding: `nearest`, or `gptq`: by what the calibration text makes of it.
        correction: with gptq, how far weights move to make up for the error of the layers before, 0 … 1.
        sweeps: with gptq, passes of coordinate descent after it.
        learning_steps: then learn scales, table entries and norm gains against the reference's logits, codes frozen,
            for so many steps; 0 learns nothing. All layers are in memory meanwhile, in fp32.
        learning_rate: largest relative change per step.
        bits: other widths by linear, such as `{layers.0.mlp.down_proj: 8}`.
        budget: choose those by measuring: `{bits_per_weight: 5.0}`, or `{kld: 0.05}`, which is a prediction.
        force: allow a form that is reported wrong on the ANE.
    """

    name: ClassVar[str] = "quantize_weights"
    scheme: Literal["none", "w8a16", "w6a16", "w4a16"] = "w8a16"
    form: Literal["integer", "lut", "lpbq"] = "integer"
    symmetric: bool = True
    granularity: Literal["per_channel", "per_group", "per_tensor", "per_grouped_channel"] | None = None
    group_size: int = 0
    rounding: Literal["nearest", "gptq"] = "nearest"
    correction: float = 0.5
    sweeps: int = 0
    learning_steps: int = 0
    learning_rate: float = 1e-3
    bits: dict[str, int] = field(default_factory=dict, hash=False)
    budget: dict[str, float] = field(default_factory=dict, hash=False)
    force: bool = False

    def __post_init__(self) -> None:
        allowed = GRANULARITIES[self.form]
        if self.granularity is not None and self.granularity not in allowed:
            raise InputError(
                f"granularity {self.granularity} is not for form {self.form}; use {' or '.join(allowed)}"
            )
        if not self.symmetric and self.form != "integer":
            raise InputError(f"symmetric: false is for form integer, not {self.form}; leave it out")
        if self.group_size and self.sizes not in GROUPED:
            raise InputError(
                f"group_size {self.group_size} has no meaning with granularity {self.sizes}; leave it out"
            )
        if self.group_size < 0 or self.sweeps < 0 or not 0 <= self.correction <= 1:
            raise InputError("group_size and sweeps must not be negative, correction must be between 0 and 1")
        if (
            self.learning_steps < 0
            or self.learning_rate <= 0
            or (self.learning_steps and not self.calibrated)
        ):
            raise InputError("learning_steps and learning_rate must be positive, and need rounding: gptq")
        if self.budget and (self.bits or not self.calibrated):
            raise InputError("budget needs rounding: gptq, and chooses bits itself; leave bits out")
        if self.budget and (
            set(self.budget) not in ({"bits_per_weight"}, {"kld"}) or min(self.budget.values()) <= 0
        ):
            raise InputError(f"budget {self.budget} is not one of {{bits_per_weight: 5.0}} and {{kld: 0.05}}")
        for width in (*self.bits.values(), *([BITS[self.scheme]] if self.scheme != "none" else [])):
            if width not in self.widths:
                raise InputError(
                    f"{width} bits are not a width of form {self.form}: integers have 4 or 8, tables also 6"
                )

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits that the form can have."""
        return (4, 6, 8) if self.form == "lut" else (4, 8)

    @property
    def sizes(self) -> str:
        """The granularity, with its default."""
        return self.granularity or DEFAULT_GRANULARITY[self.form]

    @property
    def calibrated(self) -> bool:
        """Whether it needs calibration text."""
        return self.scheme != "none" and self.rounding == "gptq"

    @property
    def floor_db(self) -> float:
        """Per block: 50 dB for fp16 weights, 25 dB for W8 (below it the scheme should change), 8 dB for W4."""
        return 50.0 if self.scheme == "none" else FLOORS[min([BITS[self.scheme], *self.bits.values()])]

    def requires(self, block: Block) -> None:
        if block.records:
            raise InputError("quantize_weights is listed twice in the recipe")

    def run(self, block: Block) -> Block:
        """Round to nearest."""
        return self._with_records(block, lambda name, matrix: self._nearest(matrix, f"{block.name}.{name}"))

    def nearest(self, matrix: Tensor, path: str) -> Tensor:
        """The values of a weight (O, I) after rounding to nearest; `path` is block and name."""
        return self._nearest(matrix, path).dequantize().to(matrix.device)

    def run_on(self, block: Block, calibration: Calibration) -> Block:
        """Round by calibration text, stage by stage."""
        from pdconvert.quant.calibration import grams, reference_inputs, stages

        device = calibration.device
        moved = replace(block, module=rewrite(block.module, lambda part: None)).to(device)
        order = stages(moved, next(calibration.windows(calibration.reference)))
        inputs = reference_inputs(moved, calibration, [names[0] for names in order])
        found: dict[str, Record] = {}
        for names in order:
            sums = grams(moved, calibration, names[0], inputs.pop(names[0]))
            for name in names:
                part = moved.module.get_submodule(name)
                matrix = part.weight.detach().flatten(1)
                record = self._calibrated(matrix, sums, f"{block.name}.{name}.weight")
                found[f"{name}.weight"] = record
                value = record.dequantize().view(part.weight.shape).to(device)
                set_parameter(part, "weight", value)
        return self._with_records(block, lambda name, matrix: found[name])

    def ensures(self, before: Block, after: Block) -> None:
        linears = [
            name for name, part in after.module.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)
        ]
        expected = set() if self.scheme == "none" else {f"{name}.weight" for name in linears}
        assert set(after.records) == expected, "a weight was skipped"

    def rounded(self, matrix: Tensor, gram: Tensor, path: str) -> Tensor:
        """The values of a weight (O, I) after GPTQ alone, by XᵀX of its inputs (I, I)."""
        from pdconvert.quant.rounding import gptq

        grid = self._grid(matrix, gram, path)
        columns = torch.arange(matrix.shape[1], device=matrix.device)
        return grid.values(gptq(matrix, gram, grid), columns)

    def blank(self, path: str, shape: tuple[int, int], device: str = "cpu") -> Record:
        """A record of zeros in the form that a weight (O, I) gets; for what depends on the form alone.

        Args:
            path: block and name, which decide the bits.
            device: "meta" for no memory.
        """
        (outputs, inputs), width = shape, self._bits(path)
        if self.form == "lut":
            rows = self._rows(outputs, path)
            tables = torch.zeros((outputs // rows, 1 << width), dtype=torch.float16, device=device)
            return LutLinear(torch.zeros(shape, dtype=torch.uint8, device=device), tables, width, rows)
        group = self._group(inputs)
        groups = outputs, inputs // group if group else 1
        lpbq = self._lpbq(group)

        def zeros(shape: tuple[int, int], dtype: torch.dtype = torch.uint8) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return QuantizedLinear(
            zeros(shape, torch.int8 if self.symmetric else torch.uint8),
            zeros((outputs, 1) if lpbq else groups, torch.float16),
            width,
            group,
            zero_points=None if self.symmetric else zeros(groups),
            block_scales=zeros(groups) if lpbq else None,
        )

    def _with_records(self, block: Block, quantize: Callable[[str, Tensor], Record]) -> Block:
        """The block with the values of its records, and of everything else in fp16."""
        module = rewrite(block.module, lambda part: None)
        records: dict[str, Record] = {}
        for path, part in module.named_modules():
            for kind, parameter in list(part._parameters.items()):
                if parameter is None:
                    continue
                name = f"{path}.{kind}"
                if kind == "weight" and self.scheme != "none" and isinstance(part, nn.Linear | nn.Conv2d):
                    records[name] = quantize(name, parameter.detach().flatten(1))
                    value = records[name].dequantize().view(parameter.shape)
                else:
                    value = to_fp16(parameter.detach(), f"{block.name}.{name}").float()
                set_parameter(part, kind, value)
        return replace(block, module=module, records=MappingProxyType(records))

    def _nearest(self, matrix: Tensor, path: str) -> Record:
        if self.form == "integer" and self.symmetric and self._bits(path) == 8:
            return quantize_symmetric(matrix, 8, path, self._group(matrix.shape[1]))
        grid = self._grid(matrix, None, path)
        return grid.record(grid.nearest(matrix, torch.arange(matrix.shape[1], device=matrix.device)))

    def _calibrated(self, matrix: Tensor, sums: Grams, path: str) -> Record:
        from pdconvert.quant.rounding import corrected, descend, gptq

        target = corrected(matrix, sums.own, sums.cross, self.correction) if self.correction else matrix
        grid = self._grid(target, sums.own, path)
        codes = gptq(target, sums.own, grid)
        if self.sweeps:
            codes = descend(target, sums.own, grid, codes, sweeps=self.sweeps)
        return grid.record(codes)

    def _grid(self, matrix: Tensor, gram: Tensor | None, path: str) -> IntegerGrid | TableGrid:
        if self.form != "lut":
            group = self._group(matrix.shape[1])
            return integer_grid(
                matrix, gram, self._bits(path), group, path, symmetric=self.symmetric, lpbq=self._lpbq(group)
            )
        importance = matrix.new_ones(matrix.shape[1]) if gram is None else gram.diagonal()
        return table_grid(matrix, importance, self._bits(path), self._rows(len(matrix), path), path)

    def wanted_size(self, path: str) -> int:
        """Channels of the weight `path` that are to share a scale or a table; 0 where the form has no groups.

        At more than 4 bits so many more share a table that tables take the same share of the bits.
        """
        size = self.group_size or GROUPED.get(self.sizes, 0)
        return size << self._bits(path) - 4 if self.sizes == "per_grouped_channel" else size

    def _rows(self, outputs: int, path: str) -> int:
        """Output channels per table."""
        return math.gcd(self.wanted_size(path), outputs)  # per tensor nothing is wanted: gcd(0, n) is n

    def _group(self, inputs: int) -> int:
        """Input channels per scale; 0 for all of them."""
        return fitting_group(inputs, self.wanted_size("")) if self.sizes == "per_group" else 0

    def _lpbq(self, group: int) -> bool:
        """Whether block scales are of any use."""
        return self.form == "lpbq" and group > 0

    def _bits(self, path: str) -> int:
        return self.bits.get(path.removesuffix(".weight"), BITS[self.scheme])


def to_fp16(value: Tensor, name: str) -> Tensor:
    """The tensor in fp16.

    Raises:
        InputError: a value exceeds fp16.
    """
    if value.abs().max() > FP16_MAX:
        raise InputError(f"{name}: a value of {value.abs().max().item():.4g} exceeds fp16 (65504)")
    return value.half()
