"""Linear layers as 1×1 convolutions on (1, C, 1, S), the layout that the ANE computes in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from pdconvert.blocks import RMSNorm
from pdconvert.errors import InputError
from pdconvert.program import Block
from pdconvert.rewriting import rewrite


def to_conv2d(linear: nn.Linear) -> nn.Conv2d:
    """The same map as a 1×1 `nn.Conv2d`: weight (O, I) viewed as (O, I, 1, 1), storage and bias shared."""
    conv = nn.Conv2d(linear.in_features, linear.out_features, 1, bias=linear.bias is not None, device="meta")
    conv.weight = nn.Parameter(linear.weight.detach()[:, :, None, None], requires_grad=False)
    conv.bias = linear.bias
    return conv.train(linear.training)


def convert(module: nn.Module) -> nn.Module:
    """A copy of any module tree in which every `nn.Linear`, however deep, is a 1×1 `nn.Conv2d`."""
    return rewrite(module, lambda child: to_conv2d(child) if isinstance(child, nn.Linear) else None)


@dataclass(frozen=True)
class LinearToConv2d:
    """Replace every `nn.Linear` by a 1×1 `nn.Conv2d` and turn the block to channels first.

    Before: hidden (B, S, H) → Linear(H, O) → (B, S, O), weight (O, H).
    After:  hidden (1, H, 1, S) → Conv2d(H, O, 1) → (1, O, 1, S), weight (O, H, 1, 1), bit-equal.

    Source: Apple, "Deploying Transformers on the Apple Neural Engine" (principle 1: data format).
    """

    name: ClassVar[str] = "linear_to_conv2d"
    floor_db: ClassVar[float] = 80.0

    def requires(self, block: Block) -> None:
        if block.layout.channels_first:
            raise InputError(
                f"linear_to_conv2d: block {block.name} is channels first already; list the pass once"
            )
        if block.records:
            raise InputError("linear_to_conv2d must come before quantize_weights; move it up in the recipe")

    def run(self, block: Block) -> Block:
        module = convert(block.module)
        for part in module.modules():
            if isinstance(part, RMSNorm) and not part.per_head:
                part.channel_axis = 1
        return block.with_layout(module, channels_first=True)

    def ensures(self, before: Block, after: Block) -> None:
        convs = {name: part for name, part in after.module.named_modules() if isinstance(part, nn.Conv2d)}
        for name, part in before.module.named_modules():
            if isinstance(part, nn.Linear):
                assert name in convs, f"{name} was not replaced"
                assert convs[name].weight.data_ptr() == part.weight.data_ptr(), (
                    f"{name} does not share its weight"
                )
        assert not any(isinstance(part, nn.Linear) for part in after.module.modules()), "a Linear is left"
