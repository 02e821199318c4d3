from dataclasses import replace

import pytest
import torch
from check_pass import check_pass
from checkpoints import head_block
from torch import nn

from passes import EagerGqaAttention, LinearToConv2d, QuantizeWeights, RopeAsInput, SafeRmsNorm
from passes.quantize_weights import to_fp16
from pdconvert.errors import InputError
from pdconvert.measure import sqnr_db
from pdconvert.program import Block, Probe
from pdconvert.quant.grid import LutLinear
from pdconvert.reference import Reference
from pdconvert.rewriting import set_parameter

MATRICES = {
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}
ADAPTED = (LinearToConv2d(), EagerGqaAttention(), SafeRmsNorm(), RopeAsInput())


@pytest.mark.parametrize("earlier", [(), ADAPTED], ids=["plain", "adapted"])
def test_matrices_go_to_eight_bits_and_everything_else_to_fp16(
    earlier: tuple, layer: Block, probe: Probe
) -> None:
    for rewrite in earlier:
        layer = rewrite.run(layer)
    new = check_pass(QuantizeWeights(scheme="w8a16"), layer, probe)
    assert set(new.records) == MATRICES
    for name, value in new.module.named_parameters():
        old = layer.module.get_parameter(name)
        assert value.shape == old.shape and value.dtype == torch.float32 and not value.requires_grad
        if name in MATRICES:
            record = new.records[name]
            assert torch.equal(value.flatten(1), record.codes.float() * record.scales.float())
            assert record.scales.shape == (old.shape[0], 1) and record.group == 0 and record.bits == 8
        else:
            assert torch.equal(value, old.half().float())


def test_the_grid_does_not_depend_on_the_form(layer: Block) -> None:
    plain, turned = QuantizeWeights().run(layer), QuantizeWeights().run(LinearToConv2d().run(layer))
    for name in MATRICES:
        assert torch.equal(plain.records[name].codes, turned.records[name].codes)
        assert torch.equal(plain.records[name].scales, turned.records[name].scales)


def test_scheme_none_rounds_to_fp16_only(layer: Block, probe: Probe) -> None:
    new = check_pass(QuantizeWeights(scheme="none"), layer, probe)
    assert not new.records
    for name, value in new.module.named_parameters():
        assert torch.equal(value, layer.module.get_parameter(name).half().float())


def test_groups_give_a_scale_per_thirty_two_inputs(reference: Reference, probe: Probe) -> None:
    new = check_pass(QuantizeWeights(granularity="per_group"), head_block(reference), probe)
    record = new.records["lm_head.weight"]
    assert record.group == 32 and record.scales.shape == (reference.spec.vocab_size, 1)


@pytest.mark.parametrize("scheme", ["w8a16", "w4a16"])
@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"symmetric": False}, {"codes", "scales", "zero_points"}),
        (
            {"symmetric": False, "granularity": "per_group", "group_size": 16},
            {"codes", "scales", "zero_points"},
        ),
        ({"form": "lpbq", "group_size": 16}, {"codes", "scales", "block_scales"}),
    ],
    ids=["zero points", "zero points in groups", "lpbq"],
)
def test_a_blank_record_has_the_parts_of_a_real_one(
    scheme: str, options: dict, parts: set[str], layer: Block, probe: Probe
) -> None:
    quantizer = QuantizeWeights(scheme=scheme, **options)  # type: ignore[arg-type]
    new = check_pass(quantizer, layer, probe)
    for name, record in new.records.items():
        assert record.parts().keys() == parts
        blank = quantizer.blank(f"layers.0.{name}", record.shape, "meta")
        assert blank.part_bits() == record.part_bits()
        assert {part: (t.shape, t.dtype) for part, t in blank.parts().items()} == {
            part: (t.shape, t.dtype) for part, t in record.parts().items()
        }
        assert torch.equal(new.module.get_parameter(name), record.dequantize())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"form": "lut", "symmetric": False},
            "symmetric: false is for form integer, not lut; leave it out",
        ),
        (
            {"form": "lpbq", "symmetric": False},
            "symmetric: false is for form integer, not lpbq; leave it out",
        ),
        (
            {"form": "lpbq", "granularity": "per_channel"},
            "granularity per_channel is not for form lpbq; use per_group",
        ),
        (
            {"form": "lpbq", "scheme": "w6a16"},
            "6 bits are not a width of form lpbq: integers have 4 or 8, tables also 6",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict, message: str) -> None:
    with pytest.raises(InputError) as error:
        QuantizeWeights(**options)
    assert str(error.value) == message


def test_the_floor_follows_the_scheme() -> None:
    assert QuantizeWeights(scheme="none").floor_db > QuantizeWeights(scheme="w8a16").floor_db > 0


def test_a_block_without_matrices_keeps_no_records(layer: Block) -> None:
    block = replace(layer, module=nn.Sequential(nn.LayerNorm(4)))
    new = QuantizeWeights().run(block)
    QuantizeWeights().ensures(block, new)
    assert not new.records


def test_a_second_time_is_refused(layer: Block) -> None:
    with pytest.raises(InputError) as error:
        QuantizeWeights().requires(QuantizeWeights().run(layer))
    assert str(error.value) == "quantize_weights is listed twice in the recipe"


def with_value(layer: Block, name: str, value: float) -> Block:
    """The layer with one value of one parameter replaced."""
    block = LinearToConv2d().run(layer)
    path, _, kind = name.rpartition(".")
    changed = block.module.get_parameter(name).detach().clone()
    changed.view(-1)[3] = value
    set_parameter(block.module.get_submodule(path), kind, changed)
    return block


@pytest.mark.parametrize("scheme", ["none", "w8a16"])
def test_a_norm_gain_beyond_fp16_is_refused_by_name(scheme: str, layer: Block) -> None:
    block = with_value(layer, "input_layernorm.weight", -7e4)
    with pytest.raises(InputError) as error:
        QuantizeWeights(scheme=scheme).run(block)  # type: ignore[arg-type]
    assert str(error.value) == "layers.0.input_layernorm.weight: a value of 7e+04 exceeds fp16 (65504)"


def test_a_matrix_beyond_the_grid_is_refused_by_name(layer: Block) -> None:
    with pytest.raises(InputError) as error:
        QuantizeWeights().run(with_value(layer, "mlp.up_proj.weight", 6.6e4))
    assert str(error.value) == (
        "layers.0.mlp.up_proj.weight: weights up to 6.6e+04 do not fit an fp16 grid of 8 bits; "
        "leave quantize_weights out of the recipe for this model, or rescale the checkpoint"
    )


def test_fp16_holds_its_own_largest_number() -> None:
    assert to_fp16(torch.tensor([65504.0, -65504.0]), "x").tolist() == [65504.0, -65504.0]


def test_a_matrix_without_record_does_not_pass_unseen(layer: Block) -> None:
    new = QuantizeWeights().run(layer)
    some = {name: record for name, record in new.records.items() if "mlp" in name}
    with pytest.raises(AssertionError, match="a weight was skipped"):
        QuantizeWeights().ensures(layer, replace(new, records=some))


def test_channels_that_no_group_divides_share_tables_in_smaller_groups() -> None:
    """120 output channels in groups of 16: elsewhere such a weight was passed over, and scaled all the same."""
    weight = torch.randn(120, 64, generator=torch.Generator().manual_seed(0))
    linear = nn.Linear(64, 120, bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    block = Block("layers.0", nn.Sequential(linear), None)  # type: ignore[arg-type]
    new = QuantizeWeights(scheme="w4a16", form="lut", group_size=16).run(block)
    record = new.records["0.weight"]
    assert isinstance(record, LutLinear) and record.rows == 8 and record.tables.shape == (15, 16)
    assert torch.equal(new.module[0].weight, record.dequantize())
    assert sqnr_db(weight, record.dequantize()) > 18
