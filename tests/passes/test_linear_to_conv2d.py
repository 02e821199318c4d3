import pytest
import torch
from check_pass import check_pass, storages
from checkpoints import head_block
from torch import nn

from passes import LinearToConv2d, QuantizeWeights
from passes.linear_to_conv2d import convert, to_conv2d
from pdconvert.blocks import RMSNorm
from pdconvert.errors import InputError
from pdconvert.program import Block, Probe
from pdconvert.reference import Reference


def test_every_linear_of_a_layer_becomes_a_real_conv2d(layer: Block, probe: Probe) -> None:
    new = check_pass(LinearToConv2d(), layer, probe)
    linears = {name for name, part in layer.module.named_modules() if type(part) is nn.Linear}
    convs = {name: part for name, part in new.module.named_modules() if type(part) is nn.Conv2d}
    assert set(convs) == linears and len(linears) == 7
    for name, conv in convs.items():
        linear = layer.module.get_submodule(name)
        assert torch.equal(conv.weight[:, :, 0, 0], linear.weight) and conv.weight.shape[2:] == (1, 1)
        assert conv.bias is linear.bias
    assert storages(new.module) == storages(layer.module), "weights were copied"
    assert new.layout.channels_first and not new.layout.heads_first


def test_the_head_is_turned_too(reference: Reference, probe: Probe) -> None:
    new = check_pass(LinearToConv2d(), head_block(reference), probe)
    assert type(new.module.lm_head) is nn.Conv2d
    assert new.run(probe)["logits"].shape == (1, 7, reference.spec.vocab_size)


class Nested(nn.Module):
    """Linears at several depths and in every kind of container, beside parts that are none."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        make = {"dtype": dtype}
        self.one = nn.Linear(4, 6, **make)
        self.many = nn.ModuleList(
            [nn.Linear(6, 6, bias=False, **make), nn.Sequential(nn.Linear(6, 5, **make))]
        )
        self.named = nn.ModuleDict({"deep": nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(5, 3, **make)))})
        self.empty = None
        self.register_module("absent", None)
        self.norm = nn.LayerNorm(4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_nested_linears_of_any_module_tree_are_converted_bit_equal(dtype: torch.dtype) -> None:
    module = Nested(dtype).eval()
    new = convert(module)
    names = ["one", "many.0", "many.1.0", "named.deep.1.0"]
    assert [name for name, part in new.named_modules() if type(part) is nn.Conv2d] == names
    for name in names:
        conv, linear = new.get_submodule(name), module.get_submodule(name)
        assert type(linear) is nn.Linear and conv.weight.dtype == dtype and not conv.training
        assert conv.weight.flatten(1).view(torch.uint8).equal(linear.weight.view(torch.uint8))
        assert conv.weight.data_ptr() == linear.weight.data_ptr()
    assert new.absent is None and new.empty is None
    assert type(new.norm) is nn.LayerNorm


def test_a_conv_computes_what_its_linear_does() -> None:
    linear = nn.Linear(24, 10)
    x = torch.randn(1, 9, 24)
    conv = to_conv2d(linear)(x.transpose(1, 2)[:, :, None])
    assert torch.allclose(conv[:, :, 0].transpose(1, 2), linear(x), atol=1e-6)


def test_a_tree_without_linears_stays_as_it_is() -> None:
    module = nn.Sequential(nn.ReLU(), nn.Conv2d(2, 3, 1))
    new = convert(module)
    assert [type(part) for part in new] == [nn.ReLU, nn.Conv2d]
    assert storages(new) == storages(module)


def test_norms_follow_to_the_channel_axis(layer: Block) -> None:
    new = LinearToConv2d().run(layer)
    assert {part.channel_axis for part in new.module.modules() if isinstance(part, RMSNorm)} == {1}
    assert {part.channel_axis for part in layer.module.modules() if isinstance(part, RMSNorm)} == {-1}


def test_a_block_that_is_turned_already_is_refused(layer: Block) -> None:
    with pytest.raises(InputError) as error:
        LinearToConv2d().requires(LinearToConv2d().run(layer))
    assert (
        str(error.value) == "linear_to_conv2d: block layers.0 is channels first already; list the pass once"
    )


def test_quantized_weights_are_refused(layer: Block) -> None:
    with pytest.raises(InputError) as error:
        LinearToConv2d().requires(QuantizeWeights().run(layer))
    assert str(error.value) == "linear_to_conv2d must come before quantize_weights; move it up in the recipe"


def test_a_linear_left_behind_does_not_pass_unseen(layer: Block) -> None:
    with pytest.raises(AssertionError, match=r"self_attn.q_proj was not replaced"):
        LinearToConv2d().ensures(layer, layer)
