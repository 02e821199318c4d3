"""Channels that matter made large in the weights that read them, so that rounding spares them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from pdconvert.blocks import DecoderLayer, RMSNorm
from pdconvert.errors import InputError
from pdconvert.program import Block, Probe
from pdconvert.quant.calibration import Calibration, mean_magnitudes
from pdconvert.rewriting import rewrite, set_parameter

STEPS = 20
"""Exponents that are tried: 0, 1/20, … 1."""

TOKENS = 512
"""Calibration tokens that an exponent is judged on."""

SMALLEST_SHARE = 1e-4
"""Channels quieter than this share of the loudest one count as that loud."""


@dataclass(frozen=True)
class ScaleChannels:
    """Scale input channels of linears by what they carry on calibration text; the part before undoes it.

    Before: q = W · (g ⊙ norm(h)); down(act(gate(x)) ⊙ up(x)).
    After:  q = (W · diag(s)) · (g/s ⊙ norm(h)); (down · diag(s))(act(gate(x)) ⊙ (diag(1/s) · up)(x)).

    s = mean|x|^α over the geometric mean of its extremes, one α per stage (q, k and v; gate and up; down), in 20
    steps from 0 to 1: the one with which the block's output changes least when the stage's weights, and those that
    take 1/s, are rounded to nearest as quantize_weights will. α = 0 leaves a stage as it was. Both halves of the
    pair carry the scaled weights. The output projection of attention is not scaled: 1/s would go into the values,
    which are the pair's hand-off and stay the checkpoint's. It comes after fold_norm_gain, since it brings gains
    back, and before quantize_weights. It helps `rounding: nearest`; what `gptq` rounds it makes worse.

    Source: Lin et al., "AWQ" (arXiv:2306.00978).
    """

    name: ClassVar[str] = "scale_channels"
    calibrated: ClassVar[bool] = True
    floor_db: ClassVar[float] = 80.0

    def requires(self, block: Block) -> None:
        if block.records:
            raise InputError("scale_channels must come before quantize_weights; move it up in the recipe")
        if not isinstance(block.module, DecoderLayer):
            raise InputError(f"scale_channels: {block.name} is not a decoder layer")

    def run(self, block: Block) -> Block:
        """The form of the scaled block, nothing scaled."""
        return with_scales(block, {})

    def run_on(self, block: Block, calibration: Calibration) -> Block:
        """Choose the scales of one stage after the other."""
        plain = with_scales(block, {}).to(calibration.device)
        stages = scaled_stages(plain.module)
        means = mean_magnitudes(plain, calibration, [readers[0] for _, readers in stages])
        judge = Judge.of(plain, calibration)
        chosen: dict[str, Tensor] = {}
        for source, readers in stages:
            mean = means[readers[0]]
            if mean.max() == 0:
                continue
            mean = (mean / mean.max()).clamp_min(SMALLEST_SHARE)
            best, lowest = None, judge.loss(chosen, (source, *readers))
            for step in range(1, STEPS + 1):
                power = mean ** (step / STEPS)
                scale = power / (power.max() * power.min()).sqrt()
                loss = judge.loss({**chosen, source: scale}, (source, *readers))
                if loss < lowest:
                    best, lowest = scale, loss
            if best is not None:
                chosen[source] = best
        return with_scales(block, {name: value.cpu() for name, value in chosen.items()})

    def ensures(self, before: Block, after: Block) -> None:
        for norm, _ in after.module.norm_consumers:
            assert not after.module.get_submodule(norm).gain_is_one, f"{norm} has no gain"


@dataclass(frozen=True)
class KnownScales(ScaleChannels):
    """Scales that another compilation of the block chose."""

    scales: Mapping[str, Tensor] = field(default_factory=dict)
    calibrated: ClassVar[bool] = False

    def run(self, block: Block) -> Block:
        return with_scales(block, self.scales)


def scaled_stages(module: DecoderLayer) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The part that can take 1/s of each stage, and the linears that alone read it."""
    return (*module.norm_consumers, ("mlp.up_proj", ("mlp.down_proj",)))


def with_scales(block: Block, scales: Mapping[str, Tensor]) -> Block:
    """The block with scales (I,) by the part that undoes them; its norms have a gain.

    A new gain is an fp16 number, as it will be stored, and the scale follows it, so that nothing is lost between
    the two. A channel whose gain is zero, or would be zero or infinite there, is left.
    """
    module = rewrite(block.module, lambda part: None)
    for norm, _ in module.norm_consumers:
        module.get_submodule(norm).gain_is_one = False
    used: dict[str, Tensor] = {}
    for source, readers in scaled_stages(module):
        if source not in scales:
            continue
        part = module.get_submodule(source)
        scale = scales[source].to(part.weight.device)
        if isinstance(part, RMSNorm):
            old = part.weight.detach()
            gain = (old / scale).half().float()
            kept = (gain == 0) | gain.isinf()
            gain, scale = torch.where(kept, old, gain), torch.where(kept, 1.0, old / gain)
            set_parameter(part, "weight", gain)
        else:
            set_parameter(part, "weight", part.weight.detach() / _along(scale, part.weight, 0))
            if part.bias is not None:
                set_parameter(part, "bias", part.bias.detach() / scale)
        for path in readers:
            linear = module.get_submodule(path)
            set_parameter(linear, "weight", linear.weight.detach() * _along(scale, linear.weight, 1))
        used[source] = scales[source]
    return replace(block, module=module, scales=MappingProxyType(used))


def _along(scale: Tensor, weight: Tensor, axis: int) -> Tensor:
    return scale.view([-1 if index == axis else 1 for index in range(weight.dim())])


@dataclass(frozen=True)
class Judge:
    """What a block gives on some calibration tokens, to compare a rounded one with.

    Attributes:
        block: as it is before any scale.
        probes: the tokens, behind the layers that are quantized already.
        expected: its hidden states on each.
    """

    block: Block
    probes: tuple[Probe, ...]
    expected: tuple[Tensor, ...]
    nearest: Callable[[Tensor, str], Tensor]

    @classmethod
    def of(cls, block: Block, calibration: Calibration) -> Judge:
        """The judge of a block."""
        windows = calibration.stored[0][:, :TOKENS]  # of the first length, the longest
        probes = tuple(calibration.windows([windows[: -(-TOKENS // windows.shape[1])]]))
        return cls(block, probes, tuple(block.run(probe)["hidden"] for probe in probes), calibration.nearest)

    def loss(self, scales: Mapping[str, Tensor], rounded: Sequence[str]) -> float:
        """Squared error of the hidden states with these scales and the named linears rounded; norms are passed over."""
        block = with_scales(self.block, scales)
        for path in rounded:
            part = block.module.get_submodule(path)
            if not isinstance(part, RMSNorm):
                value = self.nearest(part.weight.detach().flatten(1), f"{block.name}.{path}.weight")
                set_parameter(part, "weight", value.view(part.weight.shape))
        errors = [
            (block.run(probe)["hidden"] - hidden).square().sum()
            for probe, hidden in zip(self.probes, self.expected, strict=True)
        ]
        return float(torch.stack(errors).sum())
