"""A block on its way through the passes, and the one loop that runs and checks every pass."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from pdconvert.basis import into, out_of
from pdconvert.blocks import Head, KeysValuesLayer, Layout, rotate
from pdconvert.ledger import Step
from pdconvert.measure import sqnr_db
from pdconvert.model import LayerSpec
from pdconvert.quant.grid import Record
from pdconvert.rewriting import set_parameter

if TYPE_CHECKING:
    from pdconvert.quant.calibration import Calibration

MASKED = -4e4
"""Value of a masked position: finite, since the ANE mishandles −inf (Apple's engine rules), with headroom to −65504."""


FAMILY_FLOOR_DB = 90.0
"""Least SQNR of a family's plain block against Hugging Face's, both in fp32."""


@dataclass(frozen=True)
class Probe:
    """What a block is run on, in Hugging Face's layout.

    Attributes:
        hidden: (1, S, H) fp32, the block's input.
        positions: (S,) int64.
        cos, sin: (S, D_rot) fp32, of these positions, in the RoPE of the block's layer.
    """

    hidden: Tensor
    positions: Tensor
    cos: Tensor
    sin: Tensor

    def part(self, start: int, end: int) -> Probe:
        """Tokens start … end − 1."""
        tokens = slice(start, end)
        return Probe(self.hidden[:, tokens], self.positions[tokens], self.cos[tokens], self.sin[tokens])

    def to(self, device: str) -> Probe:
        """The probe on a device."""
        return Probe(*(value.to(device) for value in (self.hidden, self.positions, self.cos, self.sin)))


@dataclass(frozen=True)
class Block:
    """One block as a value: passes return a new one and leave this one alone.

    Attributes:
        name: "layers.3" or "head".
        module: the torch form, an `nn.Module`; its parameters are shared between the forms of a block.
        layout: form of the inputs and outputs.
        tokens: static number of new tokens, or None while the shape is free.
        records: quantized weights by parameter name; the module holds their de-quantized values.
        scales: by path of a part, what it divides its outputs by and the linears that read them multiply with.
        factors: by parameter name, what the graph multiplies a stored tensor by; the module holds the product.
    """

    name: str
    module: Any
    spec: LayerSpec
    layout: Layout = field(default_factory=Layout)
    tokens: int | None = None
    records: Mapping[str, Record] = field(default_factory=lambda: MappingProxyType({}))
    scales: Mapping[str, Tensor] = field(default_factory=lambda: MappingProxyType({}))
    factors: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def outputs(self) -> tuple[str, ...]:
        if isinstance(self.module, Head):
            return ("logits",)
        return ("k", "v") if isinstance(self.module, KeysValuesLayer) else ("hidden", "k", "v")

    def to(self, device: str) -> Block:
        """The block with its module on a device; on the CPU the block itself."""
        return self if device == "cpu" else replace(self, module=copy.deepcopy(self.module).to(device))

    def with_layout(self, module: Any, **changes: Any) -> Block:
        """This block with another module, and the new layout set on the block and on its attention."""
        layout = replace(self.layout, **changes)
        for part in module.modules():
            if isinstance(getattr(part, "layout", None), Layout):
                part.layout = layout
        return replace(self, module=module, layout=layout)

    def run(self, probe: Probe) -> dict[str, Tensor]:
        """Run the block on a probe in whatever form it has; a static shape takes a longer probe in chunks.

        Returns:
            hidden (1, S, H), k and v (1, heads, S, D), or logits (1, S, V): Hugging Face's layout.
        """
        length = probe.hidden.shape[1]
        size = self.tokens or length
        chunks: list[dict[str, Tensor]] = []
        past: tuple[Tensor, Tensor] | None = None
        for start in range(0, length, size):
            chunk = probe.part(start, min(start + size, length))
            chunks.append(self._run_chunk(chunk, size, past))
            if start + size < length and "k" in self.outputs:
                past = self._extend(past, chunks[-1], chunk)
        return {name: torch.cat([chunk[name] for chunk in chunks], -2) for name in self.outputs}

    def _run_chunk(self, probe: Probe, size: int, past: tuple[Tensor, Tensor] | None) -> dict[str, Tensor]:
        """One call of the block; `past` holds rotated keys and values, (1, heads, P, D)."""
        length = probe.hidden.shape[1]
        hidden = _pad(into(probe.hidden, self.layout.basis), size) * self.layout.residual
        if self.layout.channels_first:
            hidden = hidden.transpose(1, 2)[:, :, None, :]
        # oneDNN reorders the weight of a 1x1 convolution at each call: 2 to 3 times slower than the plain product.
        with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
            if isinstance(self.module, Head):
                result = (self.module(hidden),)
            elif isinstance(self.module, KeysValuesLayer):
                result = self.module(hidden, self._rope(probe, size))
            else:
                held = past and tuple(self._plain("k", part) for part in past)
                mask = self._mask(size, past[0].shape[2] if past else 0).to(hidden.device)
                result = self.module(hidden, self._rope(probe, size), mask, held)
        return {
            name: self._plain(name, value)[..., :length, :]
            for name, value in zip(self.outputs, result, strict=True)
        }

    def _extend(
        self, past: tuple[Tensor, Tensor] | None, new: Mapping[str, Tensor], probe: Probe
    ) -> tuple[Tensor, Tensor]:
        keys, values = new["k"], new["v"]
        if self.layout.raw_keys and self.spec.rotary:
            keys = rotate(keys, probe.cos[None, None], probe.sin[None, None], axis=3)
        if past is None:
            return keys, values
        return torch.cat((past[0], keys), 2), torch.cat((past[1], values), 2)

    def _rope(self, probe: Probe, size: int) -> tuple[Tensor, ...]:
        if not self.layout.rope_inputs:
            start = probe.positions.tolist()
            padded = [start + [start[-1]] * (size - len(start))]
            return (torch.tensor(padded, device=probe.hidden.device),)
        cos, sin = (_pad(table[None, None], size) for table in (probe.cos, probe.sin))
        return (cos.transpose(2, 3), sin.transpose(2, 3)) if self.layout.heads_first else (cos, sin)

    def _mask(self, size: int, past: int) -> Tensor:
        mask = torch.full((size, past + size), MASKED).triu(past + 1)
        if self.spec.window:
            mask += torch.full_like(mask, MASKED).tril(past - self.spec.window)
        mask = mask[None, None]
        return mask.transpose(2, 3) if self.layout.heads_first else mask

    def _plain(self, name: str, value: Tensor) -> Tensor:
        """An output in Hugging Face's layout; for k and v the change is its own inverse."""
        if name in ("k", "v"):
            return value.transpose(2, 3) if self.layout.heads_first else value
        plain = value[:, :, 0, :].transpose(1, 2) if self.layout.channels_first else value
        return out_of(plain / self.layout.residual, self.layout.basis) if name == "hidden" else plain

    def times(self, module: Any, name: str, factor: float) -> Block:
        """This block with a stored tensor multiplied in the graph alone; the other half keeps it as stored.

        Args:
            module: a rewritten copy of the block's module, which is changed and put into the new block.
            name: of a parameter.
        """
        path, _, kind = name.rpartition(".")
        part = module.get_submodule(path)
        set_parameter(part, kind, part._parameters[kind].detach() * factor)
        factors = {**self.factors, name: self.factors.get(name, 1.0) * factor}
        return replace(self, module=module, factors=MappingProxyType(factors))


def _pad(x: Tensor, size: int) -> Tensor:
    """Repeat the last entry of axis −2 up to `size`; a result must not depend on it."""
    missing = size - x.shape[-2]
    return (
        x if missing == 0 else torch.cat((x, x[..., -1:, :].expand(*x.shape[:-2], missing, x.shape[-1])), -2)
    )


@runtime_checkable
class Pass(Protocol):
    """A rewrite of a block: a frozen dataclass whose fields are its options in a recipe."""

    name: ClassVar[str]

    @property
    def floor_db(self) -> float:
        """The least SQNR against the previous step that the pass promises."""

    def requires(self, block: Block) -> None:
        """Raise InputError unless the block is in a form that the pass can take."""

    def run(self, block: Block) -> Block:
        """The rewritten block; the given one and its tensors stay as they are."""

    def ensures(self, before: Block, after: Block) -> None:
        """Raise AssertionError unless the rewritten block has the promised form."""


@runtime_checkable
class CalibratedPass(Protocol):
    """A pass that can look at calibration text."""

    @property
    def calibrated(self) -> bool:
        """Whether it does."""

    def run_on(self, block: Block, calibration: Calibration) -> Block:
        """The rewritten block."""


def applied(rewrite: Pass, block: Block, calibration: Calibration | None) -> Block:
    """A pass run on a block: by calibration text, where there is some and the pass looks at it."""
    if calibration is not None and isinstance(rewrite, CalibratedPass) and rewrite.calibrated:
        return rewrite.run_on(block, calibration)
    return rewrite.run(block)


def worst_db(expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> float:
    """The lowest SQNR over the outputs of `got`; NaN if any is NaN."""
    values = [sqnr_db(expected[name], got[name]) for name in got]
    return math.nan if any(map(math.isnan, values)) else min(values)


def check_family(
    block: Block, probe: Probe, original: Mapping[str, Tensor]
) -> tuple[Mapping[str, Tensor], Step]:
    """Run the family's plain block and compare it with Hugging Face's own outputs: the first line of the ledger."""
    started = time.perf_counter()
    outputs = block.run(probe)
    value = worst_db(original, outputs)
    return outputs, Step(block.name, "family", value, value, FAMILY_FLOOR_DB, time.perf_counter() - started)


def run_passes(
    block: Block,
    passes: Sequence[Pass],
    probe: Probe,
    original: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    calibration: Calibration | None = None,
) -> tuple[Block, Mapping[str, Tensor], list[Step]]:
    """Run passes in order: requires, run, ensures, execute, SQNR against the original and the previous step.

    Args:
        original: the outputs of Hugging Face's own block on the probe.
        outputs: those of `block` as it comes in.
        calibration: what a calibrated pass looks at.

    Returns:
        The rewritten block, its outputs, and one step per pass.
    """
    steps: list[Step] = []
    for rewrite in passes:
        started = time.perf_counter()
        try:
            rewrite.requires(block)
            new = applied(rewrite, block, calibration)
            rewrite.ensures(block, new)
            new_outputs = new.run(probe)
        except Exception as error:
            done = ", ".join(step.step for step in steps) or "no pass"
            error.add_note(f"in pass {rewrite.name} on {block.name}, after {done}")
            raise
        previous_db = worst_db({name: outputs[name] for name in new.outputs}, new_outputs)
        original_db = worst_db(original, new_outputs)
        seconds = time.perf_counter() - started
        steps.append(Step(block.name, rewrite.name, original_db, previous_db, rewrite.floor_db, seconds))
        block, outputs = new, new_outputs
    return block, outputs, steps
