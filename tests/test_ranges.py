import math
from pathlib import Path

import pytest
import torch
from checkpoints import MemorySource, one_thread, random_source, reference_of

from pdconvert.blocks import DecoderLayer
from pdconvert.families import llama
from pdconvert.ranges import Ranges, measure_ranges
from pdconvert.reference import Reference

__all__ = ["one_thread"]

READERS = DecoderLayer.residual_readers
SEQUENCES = [[1, 2, 3, 4], [9], list(range(20))]


def source() -> MemorySource:
    return random_source({**llama.TINY, "hidden_size": 32, "intermediate_size": 48})


def stream_peaks(reference: Reference) -> dict[str, float]:
    """The largest residual value of each layer, its middle included, and of the embedding, by hand."""
    peaks: dict[str, float] = {}
    for ids in SEQUENCES:
        hidden = reference.embed(ids)[None]
        peaks["embedding"] = max(peaks.get("embedding", 0.0), hidden.abs().max().item())
        for index in range(len(reference.spec.layers)):
            layer, name = reference.layer(index), f"layers.{index}"
            middle: list[torch.Tensor] = []
            hook = layer.post_attention_layernorm.register_forward_pre_hook(
                lambda _, inputs, found=middle: found.append(inputs[0])
            )
            hidden, _ = reference.run(layer, hidden)
            hook.remove()
            found = max(hidden.abs().max().item(), middle[0].abs().max().item())
            peaks[name] = max(peaks.get(name, 0.0), found)
    return peaks


def test_the_residual_peak_is_the_largest_value_of_the_stream_anywhere() -> None:
    reference = reference_of(source())
    expected = stream_peaks(reference)
    where = max(expected, key=lambda name: expected[name])
    ranges = measure_ranges(reference, SEQUENCES, READERS)
    assert (ranges.residual_where, ranges.residual_peak) == (where, pytest.approx(expected[where]))


def test_a_peak_in_the_middle_of_a_layer_counts() -> None:
    """The attention writes a large value that the MLP takes away again."""
    checkpoint = source()
    layer = "model.layers.0"
    for name in ("q", "k", "v", "o"):
        checkpoint.values[f"{layer}.self_attn.{name}_proj.weight"] *= 30
    reference = reference_of(checkpoint)
    assert measure_ranges(reference, SEQUENCES, READERS).residual_peak == pytest.approx(
        max(stream_peaks(reference).values())
    )


def test_every_part_of_a_layer_has_its_peak() -> None:
    reference = reference_of(source())
    ranges = measure_ranges(reference, SEQUENCES, READERS)
    assert set(ranges.peaks) == {"layers.0", "layers.1"}
    parts = {name for name, _ in reference.layer(0).named_modules()}
    assert (
        {"self_attn.q_proj", "mlp.down_proj", "input_layernorm", ""} <= set(ranges.peaks["layers.0"]) <= parts
    )
    assert all(value > 0 for value in ranges.peaks["layers.0"].values())


def test_what_is_not_finite_is_the_peak() -> None:
    checkpoint = source()
    for name in ("mlp.down_proj", "mlp.up_proj"):
        checkpoint.values[f"model.layers.1.{name}.weight"][3] = 3e38
    ranges = measure_ranges(reference_of(checkpoint), SEQUENCES, READERS)
    assert (ranges.residual_where, ranges.residual_peak) == ("layers.1", math.inf)


def test_the_layers_keep_no_hooks() -> None:
    reference = reference_of(source())
    measure_ranges(reference, SEQUENCES, READERS)
    layer = reference.layer(0)
    assert all(not part._forward_hooks and not part._forward_pre_hooks for part in layer.modules())


def test_ranges_survive_their_file(tmp_path: Path) -> None:
    ranges = Ranges(23850.0, "layers.3", {"layers.0": {"": 3.5, "mlp": 0.1}})
    ranges.write(tmp_path)
    assert Ranges.read(tmp_path) == ranges
