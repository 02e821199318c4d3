import pytest
import torch
from check_pass import assert_same, check_pass, storages
from checkpoints import head_block, layer_block

from passes import EagerGqaAttention, FixShapes, LinearToConv2d, RopeAsInput, SafeRmsNorm, TruncateLastLayer
from pdconvert import program
from pdconvert.errors import InputError
from pdconvert.program import Block, Probe
from pdconvert.reference import Reference

ADAPTED = (LinearToConv2d(), EagerGqaAttention(), SafeRmsNorm(), RopeAsInput())


@pytest.mark.parametrize("earlier", [(), ADAPTED, (*ADAPTED, TruncateLastLayer())], ids=len)
def test_a_shorter_probe_is_padded_and_gives_the_same(earlier: tuple, layer: Block, probe: Probe) -> None:
    for rewrite in earlier:
        layer = rewrite.run(layer)
    new = check_pass(FixShapes(tokens=16), layer, probe)
    assert new.tokens == 16
    assert {name: value.shape for name, value in new.run(probe).items()} == {
        name: value.shape for name, value in layer.run(probe).items()
    }
    assert storages(new.module) == storages(layer.module)


def test_the_static_shape_reaches_the_module(layer: Block, probe: Probe) -> None:
    new = FixShapes(tokens=16).run(layer)
    seen = []
    new.module.register_forward_pre_hook(lambda module, inputs: seen.append(tuple(inputs[0].shape)))
    new.run(probe)
    assert seen == [(1, 16, layer.spec.hidden_size)]


def test_the_head_is_padded_too(reference: Reference, probe: Probe) -> None:
    check_pass(FixShapes(tokens=9), head_block(reference), probe)


def test_what_the_padding_holds_does_not_matter(
    layer: Block, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rewrite in ADAPTED:
        layer = rewrite.run(layer)
    block = FixShapes(tokens=12).run(layer)
    expected = block.run(probe)

    def pad_with_noise(x: torch.Tensor, size: int) -> torch.Tensor:
        noise = 50 * torch.randn(*x.shape[:-2], size - x.shape[-2], x.shape[-1])
        return torch.cat((x, noise), -2)

    monkeypatch.setattr(program, "_pad", pad_with_noise)
    assert_same(expected, block.run(probe), "padding reached a real token")


def test_a_probe_that_fits_exactly_gives_equal_bits(layer: Block, probe: Probe) -> None:
    new = FixShapes(tokens=probe.hidden.shape[1]).run(layer)
    assert_same(layer.run(probe), new.run(probe), "nothing was to be padded")


@pytest.mark.parametrize("raw_keys", [False, True])
@pytest.mark.parametrize("earlier", [(), ADAPTED[:1], ADAPTED, (*ADAPTED, TruncateLastLayer())], ids=len)
@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_a_longer_probe_runs_in_chunks_with_the_earlier_ones_as_past(
    tokens: int, earlier: tuple, raw_keys: bool, reference: Reference, probe: Probe
) -> None:
    layer = layer_block(reference, raw_keys=raw_keys)
    for rewrite in earlier:
        layer = rewrite.run(layer)
    check_pass(FixShapes(tokens=tokens), layer, probe)


def test_the_head_takes_a_longer_probe_in_chunks_too(reference: Reference, probe: Probe) -> None:
    check_pass(FixShapes(tokens=3), head_block(reference), probe)


def test_every_chunk_has_the_static_shape(layer: Block, probe: Probe) -> None:
    new = FixShapes(tokens=3).run(layer)
    seen = []
    new.module.register_forward_pre_hook(lambda module, inputs: seen.append(tuple(inputs[0].shape)))
    new.run(probe)
    assert seen == [(1, 3, layer.spec.hidden_size)] * 3


@pytest.mark.parametrize("tokens", [0, -1])
def test_less_than_one_token_is_refused(tokens: int, layer: Block) -> None:
    with pytest.raises(InputError) as error:
        FixShapes(tokens=tokens).requires(layer)
    assert str(error.value) == f"fix_shapes: tokens must be at least 1, not {tokens}"


def test_a_free_shape_left_behind_does_not_pass_unseen(layer: Block) -> None:
    with pytest.raises(AssertionError):
        FixShapes().ensures(layer, layer)
