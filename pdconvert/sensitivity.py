"""What each linear costs when it alone has few bits: the KL divergence that mixed precision is chosen by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pdconvert.basis import Basis, into, out_of
from pdconvert.forms import plain_layer
from pdconvert.layer_tensors import block_shapes
from pdconvert.measure import kl_divergence_nats
from pdconvert.program import Block, Pass, applied
from pdconvert.quant.allocation import Linear
from pdconvert.quant.calibration import Calibration, reference_inputs, stages
from pdconvert.reference import Reference

if TYPE_CHECKING:
    from passes import QuantizeWeights

MEASURED = (4, 256)
"""Sequences, the last ones, and tokens of each that the cost is measured on."""

SEEN = (16, 512)
"""Sequences, the first ones, and tokens of each that the rounding sees: other ones, since few tokens can be fitted
by any rounding."""


@torch.no_grad()
def measure_linears(
    reference: Reference,
    sequences: Sequence[Sequence[int]],
    quantizer: QuantizeWeights,
    passes: Sequence[Pass] = (),
    basis: Basis | None = None,
    device: str = "cpu",
    track: Callable[[Iterator[int]], Iterator[int]] = lambda items: items,
) -> dict[str, Linear]:
    """Damage of every linear of the decoder, each rounded alone by GPTQ, the others as they were.

    Args:
        sequences: calibration text; a part is rounded by, another measured on.
        quantizer: the pass, which says to what grid.
        passes: those before it, whose weights are what is rounded.
        basis: of the residual stream after these.
        track: wraps the loop over layers, for a progress bar.

    Returns:
        By block and name, such as "layers.3.mlp.down_proj".
    """
    table = reference.source.read("model.embed_tokens.weight") * reference.spec.embedding_scale
    measured, seen = (table[ids].to(device) for ids in _parts(sequences))
    depth = len(reference.spec.layers)
    layers = [reference.module(i, reference.read_layer(i)).to(device) for i in range(depth)]
    head = {name: value.to(device) for name, value in reference.head_tensors().items()}

    def logits(state: Tensor, first: int) -> Tensor:
        for layer in layers[first:]:
            state, _ = reference.run(layer, state)
        return reference.logits(state, head).flatten(0, 1)

    expected = logits(measured, 0)
    found: dict[str, Linear] = {}
    for index in track(iter(range(depth))):
        calibration = Calibration([seen], [seen], partial(reference.probe, index), device, quantizer.nearest)
        block = plain_layer(reference.spec, index, reference.read_layer(index), raw_keys=False).to(device)
        for item in passes:
            block = applied(item, block, calibration)
        parameters, shapes = dict(block.module.named_parameters()), block_shapes(reference.spec, index)
        tensors = {name: parameters[name].detach().view(shape) for name, shape in shapes.items()}
        for name, rows in _inputs(block, calibration).items():
            weight = tensors[f"{name}.weight"]
            path = f"layers.{index}.{name}"
            rounded = quantizer.rounded(weight, rows.T @ rows, f"{path}.weight")
            changed = reference.module(index, {**tensors, f"{name}.weight": rounded})
            state = out_of(reference.run(changed, into(measured, basis))[0], basis)
            got = logits(state, index + 1)
            found[path] = Linear(weight.numel(), kl_divergence_nats(expected, got).mean().item())
        measured, seen = (reference.run(layers[index], hidden)[0] for hidden in (measured, seen))
    return found


def _parts(sequences: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """Token ids to measure on and to round by, (N, W) each; the same where there are not enough for both."""
    others = sequences[: -MEASURED[0]] or sequences
    for chosen, width in ((sequences[-MEASURED[0] :], MEASURED[1]), (others[: SEEN[0]], SEEN[1])):
        shared = min(width, *map(len, chosen))
        yield torch.tensor([list(sequence[:shared]) for sequence in chosen])


def _inputs(block: Block, calibration: Calibration) -> dict[str, Tensor]:
    """What each linear of a layer reads, (tokens, I), by name in the block."""
    groups = stages(block, next(calibration.windows(calibration.reference)))
    found = reference_inputs(block, calibration, [names[0] for names in groups])
    return {name: found[names[0]] for names in groups for name in names}
