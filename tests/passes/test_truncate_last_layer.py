import pytest
import torch
from check_pass import check_pass
from checkpoints import head_block, layer_block

from passes import (
    EagerGqaAttention,
    LinearToConv2d,
    QuantizeWeights,
    RopeAsInput,
    SafeRmsNorm,
    TruncateLastLayer,
)
from pdconvert.blocks import KeysValuesLayer
from pdconvert.errors import InputError
from pdconvert.program import Block, Probe
from pdconvert.reference import Reference

ADAPTED = (LinearToConv2d(), EagerGqaAttention(), SafeRmsNorm(), RopeAsInput())
KEPT = {
    "input_layernorm.weight",
    *(f"self_attn.{name}.{part}" for name in ("k_proj", "v_proj") for part in ("weight", "bias")),
}


@pytest.mark.parametrize("earlier", [(), ADAPTED[:1], ADAPTED[:2], ADAPTED], ids=len)
@pytest.mark.parametrize("raw_keys", [False, True])
def test_only_what_keys_and_values_need_is_left(
    earlier: tuple, raw_keys: bool, reference: Reference, probe: Probe
) -> None:
    block = layer_block(reference, raw_keys=raw_keys)
    for rewrite in earlier:
        block = rewrite.run(block)
    new = check_pass(TruncateLastLayer(), block, probe)
    assert new.outputs == ("k", "v")
    assert {name for name, _ in new.module.named_parameters()} == KEPT
    assert new.layout == block.layout
    for name, value in new.module.named_parameters():
        assert value is block.module.get_parameter(name)
    got, whole = new.run(probe), block.run(probe)
    assert torch.equal(got["k"], whole["k"]) and torch.equal(got["v"], whole["v"])


def test_the_whole_layer_is_still_there_afterwards(layer: Block, probe: Probe) -> None:
    TruncateLastLayer().run(layer)
    assert hasattr(layer.module.self_attn, "q_proj") and "hidden" in layer.run(probe)


def test_records_of_dropped_weights_go_with_them(layer: Block, probe: Probe) -> None:
    quantized = QuantizeWeights().run(layer)
    new = check_pass(TruncateLastLayer(), quantized, probe)
    assert set(new.records) == {"self_attn.k_proj.weight", "self_attn.v_proj.weight"}
    assert len(quantized.records) == 7


def test_the_head_is_refused(reference: Reference) -> None:
    with pytest.raises(InputError) as error:
        TruncateLastLayer().requires(head_block(reference))
    assert str(error.value) == "truncate_last_layer: head is not a decoder layer"


def test_a_second_time_is_refused(layer: Block) -> None:
    once = TruncateLastLayer().run(layer)
    assert type(once.module) is KeysValuesLayer
    with pytest.raises(InputError) as error:
        TruncateLastLayer().requires(once)
    assert str(error.value) == "truncate_last_layer: layers.0 is not a decoder layer"


def test_a_hidden_state_that_still_comes_out_does_not_pass_unseen(layer: Block) -> None:
    with pytest.raises(AssertionError, match="the hidden state is still an output"):
        TruncateLastLayer().ensures(layer, layer)
