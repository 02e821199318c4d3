from dataclasses import replace

import pytest
import torch
from check_pass import check_pass, storages
from checkpoints import head_block

from passes import EagerGqaAttention, LinearToConv2d, RopeAsInput, TruncateLastLayer
from pdconvert.blocks import RotaryTable
from pdconvert.errors import InputError
from pdconvert.program import Block, Probe
from pdconvert.reference import Reference

BEFORE = {
    "plain": (),
    "channels first": (LinearToConv2d(),),
    "heads first": (LinearToConv2d(), EagerGqaAttention()),
    "truncated": (LinearToConv2d(), EagerGqaAttention(), TruncateLastLayer()),
}


@pytest.mark.parametrize("form", list(BEFORE))
def test_the_table_leaves_the_block(form: str, layer: Block, probe: Probe) -> None:
    for earlier in BEFORE[form]:
        layer = earlier.run(layer)
    new = check_pass(RopeAsInput(), layer, probe)
    assert any(isinstance(part, RotaryTable) for part in layer.module.modules())
    assert not any(isinstance(part, RotaryTable) for part in new.module.modules())
    assert storages(new.module) == storages(layer.module)


def test_the_inputs_decide_how_far_keys_turn(layer: Block, probe: Probe) -> None:
    block = RopeAsInput().run(layer)
    still = replace(probe, cos=torch.ones_like(probe.cos), sin=torch.zeros_like(probe.sin))
    raw = layer.with_layout(RopeAsInput().run(layer).module, rope_inputs=True, raw_keys=True)
    assert torch.equal(block.run(still)["k"], raw.run(probe)["k"])
    assert not torch.allclose(block.run(probe)["k"], block.run(still)["k"])


def test_positions_do_not_count_any_more(layer: Block, probe: Probe) -> None:
    block = RopeAsInput().run(layer)
    moved = replace(probe, positions=probe.positions + 100)
    assert torch.equal(block.run(probe)["k"], block.run(moved)["k"])
    assert not torch.equal(layer.run(probe)["k"], layer.run(moved)["k"])


def test_the_head_has_no_table(reference: Reference, probe: Probe) -> None:
    block = head_block(reference)
    assert RopeAsInput().run(block) is block
    check_pass(RopeAsInput(), block, probe)


def test_a_second_time_is_refused(layer: Block) -> None:
    with pytest.raises(InputError) as error:
        RopeAsInput().requires(RopeAsInput().run(layer))
    assert str(error.value) == "rope_as_input is listed twice in the recipe"


def test_a_table_left_behind_does_not_pass_unseen(layer: Block) -> None:
    with pytest.raises(AssertionError, match="a rotary table is left"):
        RopeAsInput().ensures(layer, layer)
