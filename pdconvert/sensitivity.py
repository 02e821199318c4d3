"""What each linear costs when it alone has few bits: the KL divergence that mixed precision is chosen by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pdconvert.compile import plain_layer
from pdconvert.measure import kl_divergence_nats
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
    device: str = "cpu",
    track: Callable[[Iterator[int]], Iterator[int]] = lambda items: items,
) -> dict[str, Linear]:
    """Damage of every linear of the decoder, each rounded alone by GPTQ, the others as in the checkpoint.

    Args:
        sequences: calibration text; a part is rounded by, another measured on.
        quantizer: the pass, which says to what grid.
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
        tensors = reference.read_layer(index)
        inputs = _inputs(reference, index, tensors, seen, device)
        for name, rows in inputs.items():
            weight = tensors[f"{name}.weight"].to(device)
            path = f"layers.{index}.{name}"
            rounded = quantizer.rounded(weight, rows.T @ rows, f"{path}.weight")
            changed = reference.module(index, {**tensors, f"{name}.weight": rounded.cpu()}).to(device)
            got = logits(reference.run(changed, measured)[0], index + 1)
            found[path] = Linear(weight.numel(), kl_divergence_nats(expected, got).mean().item())
        measured, seen = (reference.run(layers[index], hidden)[0] for hidden in (measured, seen))
    return found


def _parts(sequences: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """Token ids to measure on and to round by, (N, W) each; the same where there are not enough for both."""
    others = sequences[: -MEASURED[0]] or sequences
    for chosen, width in ((sequences[-MEASURED[0] :], MEASURED[1]), (others[: SEEN[0]], SEEN[1])):
        yield torch.tensor([list(sequence[:width]) for sequence in chosen])


def _inputs(
    reference: Reference, index: int, tensors: Mapping[str, Tensor], hidden: Tensor, device: str
) -> dict[str, Tensor]:
    """What each linear of a layer reads, (tokens, I), by name in the block."""
    block = plain_layer(reference.spec, index, tensors, raw_keys=False).to(device)
    calibration = Calibration(hidden, hidden, partial(reference.probe, index), device)
    groups = stages(block, next(calibration.windows(hidden)))
    found = reference_inputs(block, calibration, [names[0] for names in groups])
    return {name: found[names[0]] for names in groups for name in names}
