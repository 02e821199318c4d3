import math
from pathlib import Path

import pytest
import torch
from checkpoints import MemorySource, one_thread, random_source, reference_of

from passes import SafeRmsNorm
from pdconvert import families
from pdconvert.blocks import stream_inputs
from pdconvert.families import llama
from pdconvert.ranges import Ranges, measure_ranges
from pdconvert.reference import Reference

__all__ = ["one_thread"]

READERS = ("input_layernorm", "post_attention_layernorm")
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


@pytest.mark.parametrize("name", families.names())
def test_norms_of_every_family_are_measured(name: str) -> None:
    """A loud q_proj raises what q_norm squares, and nothing of the residual stream before attention."""
    config = families.get({"model_type": name}).TINY
    source = random_source(config)
    reference = reference_of(source)
    readers = stream_inputs(reference.spec.layers[0])
    quiet = measure_ranges(reference, SEQUENCES, readers)
    assert quiet.norm_peak >= max(
        quiet.peaks["layers.0"][""] * (reference.spec.layers[0].norms == "before"), 1
    )
    if reference.spec.layers[0].qk_norm == "none":
        assert quiet.norm_peak <= quiet.residual_peak
        return
    source.values["model.layers.0.self_attn.q_proj.weight"].mul_(1000)
    loud = measure_ranges(reference_of(source), SEQUENCES, readers)
    assert loud.norm_where == "layers.0.self_attn.q_norm"
    assert loud.norm_peak == loud.peaks["layers.0"]["self_attn.q_proj"] > 256
    chosen, why = SafeRmsNorm("auto").resolve(loud)
    assert chosen == SafeRmsNorm("row_max")
    assert why.startswith("the input of a norm peaks at")
