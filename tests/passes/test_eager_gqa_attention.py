from typing import Literal

import pytest
import torch
from check_pass import assert_same, check_pass, storages
from checkpoints import head_block, layer_block, probe_of, random_source, reference_of

from passes import EagerGqaAttention, LinearToConv2d, TruncateLastLayer
from passes.eager_gqa_attention import GroupedAttention, SingleHeadAttention
from pdconvert.blocks import Attention
from pdconvert.errors import InputError
from pdconvert.families import llama
from pdconvert.program import Block, Probe
from pdconvert.reference import Reference

FORMS = {"grouped": GroupedAttention, "single": SingleHeadAttention}


@pytest.mark.parametrize("heads", ["grouped", "single"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("raw_keys", [False, True])
def test_attention_takes_the_eager_form(
    kv_heads: int, heads: Literal["grouped", "single"], raw_keys: bool
) -> None:
    config = {**llama.TINY, "hidden_size": 32, "head_dim": 6, "num_key_value_heads": kv_heads}
    reference = reference_of(random_source(config))
    probe = probe_of(reference, tokens=5)
    block = LinearToConv2d().run(layer_block(reference, raw_keys=raw_keys))
    new = check_pass(EagerGqaAttention(heads=heads), block, probe)
    assert type(new.module.self_attn) is FORMS[heads]
    assert new.layout.heads_first and new.layout.raw_keys == raw_keys
    assert storages(new.module) == storages(block.module)


def test_keys_are_never_repeated_for_their_group(layer: Block) -> None:
    block = EagerGqaAttention().run(LinearToConv2d().run(layer))
    attention, spec = block.module.self_attn, block.spec
    seen = []

    def watch(
        queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        seen.extend([queries.shape[1], keys.shape[1], values.shape[1]])
        return GroupedAttention.attend(attention, queries, keys, values, mask)

    attention.attend = watch
    hidden = torch.randn(1, spec.hidden_size, 1, 3)
    block.module(hidden, (torch.arange(3)[None],), torch.zeros(1, 1, 3, 3))
    assert seen == [spec.heads, spec.kv_heads, spec.kv_heads]


def test_past_keys_count_as_if_they_were_new(layer: Block) -> None:
    """One call on six tokens equals a call on four and one on the next two with the first four as past."""
    block = EagerGqaAttention().run(LinearToConv2d().run(layer))
    hidden = torch.randn(1, block.spec.hidden_size, 1, 6)
    mask = torch.full((6, 6), -4e4).triu(1).T[None, None]
    positions = torch.arange(6)[None]
    with torch.no_grad():
        whole, keys, values = block.module(hidden, (positions,), mask)
        _, *past = block.module(hidden[..., :4], (positions[:, :4],), mask[:, :, :4, :4])
        rest, new_keys, new_values = block.module(
            hidden[..., 4:], (positions[:, 4:],), mask[:, :, :, 4:], tuple(past)
        )
    assert torch.allclose(rest, whole[..., 4:], atol=1e-5)
    assert torch.allclose(new_keys, keys[..., 4:], atol=1e-5)
    assert torch.allclose(new_values, values[..., 4:], atol=1e-5)


def test_a_truncated_layer_changes_too(layer: Block, probe: Probe) -> None:
    block = TruncateLastLayer().run(LinearToConv2d().run(layer))
    assert type(check_pass(EagerGqaAttention(), block, probe).module.self_attn) is GroupedAttention


def test_the_head_has_no_attention_to_change(reference: Reference, probe: Probe) -> None:
    block = LinearToConv2d().run(head_block(reference))
    assert EagerGqaAttention().run(block) is block
    check_pass(EagerGqaAttention(), block, probe)


def test_a_block_with_channels_last_is_refused(layer: Block) -> None:
    with pytest.raises(InputError) as error:
        EagerGqaAttention().requires(layer)
    expected = "eager_gqa_attention needs channels-first blocks; list linear_to_conv2d before it"
    assert str(error.value) == expected


def test_a_second_time_is_refused(layer: Block) -> None:
    once = EagerGqaAttention().run(LinearToConv2d().run(layer))
    with pytest.raises(InputError) as error:
        EagerGqaAttention(heads="single").requires(once)
    assert str(error.value) == "eager_gqa_attention is listed twice in the recipe"


def test_a_plain_attention_left_behind_does_not_pass_unseen(layer: Block) -> None:
    with pytest.raises(AssertionError, match="a plain attention is left"):
        EagerGqaAttention().ensures(layer, layer)


def test_the_plain_form_stays_what_it_was(layer: Block, probe: Probe) -> None:
    outputs = layer.run(probe)
    EagerGqaAttention().run(LinearToConv2d().run(layer))
    assert type(layer.module.self_attn) is Attention
    assert_same(outputs, layer.run(probe), "the plain block changed")
