import pytest
import torch
from check_pass import check_pass
from checkpoints import head_block, probe_of, random_source, reference_of

from passes import LinearToConv2d, QuantizeWeights, SafeRmsNorm, SplitHead
from pdconvert import families
from pdconvert.errors import InputError
from pdconvert.lowering.contract import vocabulary_parts
from pdconvert.program import Block, Probe
from pdconvert.reference import Reference


@pytest.mark.parametrize("earlier", [(), (LinearToConv2d(), SafeRmsNorm())], ids=len)
@pytest.mark.parametrize(("limit", "count"), [(320, 1), (319, 2), (160, 2), (100, 4), (7, 46)])
def test_the_parts_make_up_the_whole(
    earlier: tuple, limit: int, count: int, reference: Reference, probe: Probe
) -> None:
    block = head_block(reference)
    for rewrite in earlier:
        block = rewrite.run(block)
    new = check_pass(SplitHead(limit), block, probe)
    assert len(new.module.parts) == count
    assert dict(new.module.named_parameters()).keys() == dict(block.module.named_parameters()).keys()
    assert new.outputs == ("logits",)
    hidden = probe.hidden.transpose(1, 2)[:, :, None] if earlier else probe.hidden
    axis = 1 if earlier else -1
    pieces = new.module.pieces(hidden)
    assert [piece.shape[axis] for piece in pieces] == [end - first for first, end in new.module.parts]
    torch.testing.assert_close(torch.cat(pieces, axis), block.module(hidden))


@pytest.mark.parametrize("name", families.names())
def test_heads_of_every_family(name: str) -> None:
    """Biases and divisors among them."""
    one = reference_of(random_source(families.get({"model_type": name}).TINY))
    check_pass(SplitHead(100), LinearToConv2d().run(head_block(one)), probe_of(one, tokens=7))


def test_quantized_weights_stay_one_record(reference: Reference, probe: Probe) -> None:
    block = QuantizeWeights().run(LinearToConv2d().run(head_block(reference)))
    new = check_pass(SplitHead(100), block, probe)
    assert new.records == block.records


@pytest.mark.parametrize("vocabulary", [1, 99, 100, 101, 320, 49152, 50257, 128256, 151936, 262144])
@pytest.mark.parametrize("limit", [100, 16384, 65536])
def test_parts_are_few_and_about_equal(vocabulary: int, limit: int) -> None:
    parts = vocabulary_parts(vocabulary, limit)
    assert [token for first, end in parts for token in (first, end)][1:-1:2] == [first for first, _ in parts][
        1:
    ]
    assert (parts[0][0], parts[-1][1]) == (0, vocabulary)
    assert len(parts) == -(-vocabulary // limit)
    assert max(end - first for first, end in parts) <= limit


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (0, "split_head: limit must be at least 1, not 0"),
        (-4, "split_head: limit must be at least 1, not -4"),
    ],
)
def test_a_limit_that_is_none_is_refused(limit: int, message: str, reference: Reference) -> None:
    with pytest.raises(InputError) as error:
        SplitHead(limit).requires(head_block(reference))
    assert str(error.value) == message


def test_layers_and_parts_are_refused(layer: Block, reference: Reference) -> None:
    for block in (layer, SplitHead(100).run(head_block(reference))):
        with pytest.raises(InputError, match=f"^split_head: {block.name} is not a head in one piece$"):
            SplitHead(100).requires(block)
