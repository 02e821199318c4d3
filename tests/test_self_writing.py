"""What the model writes: a sample of the checkpoint, whatever the family, and each length as asked for."""

from importlib import import_module

import pytest
import torch
from torch import Tensor

from pdconvert import families, self_writing
from pdconvert.recipe import load_recipe
from pdconvert.reference import Reference
from pdconvert.self_writing import sample, write_sequences
from pdconvert.sources import open_source
from pdconvert.sources.random import RandomSource


def reference_of(config: dict[str, object]) -> Reference:
    source = RandomSource(config, 0)
    family = families.get(source.config)
    return Reference(source, family, family.read_config(source.config))


@pytest.fixture(scope="module")
def tiny() -> Reference:
    source = open_source(load_recipe("tiny").source)
    family = families.get(source.config)
    return Reference(source, family, family.read_config(source.config))


@pytest.mark.parametrize("name", families.names())
def test_every_step_has_the_reference_s_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sampled token's logits, from caches that are cut while rows leave, against the whole text in one run."""
    reference = reference_of(import_module(f"pdconvert.families.{name}").TINY)
    steps: list[Tensor] = []

    def watched(logits: Tensor, draw: torch.Generator) -> Tensor:
        steps.append(logits)
        return sample(logits, draw)

    monkeypatch.setattr(self_writing, "sample", watched)
    written = write_sequences(reference, [9, 40, 24, 40], 0)
    assert [len(ids) for ids in written] == [40, 40, 24, 9]
    begin = reference.source.config.get("bos_token_id")
    head = reference.head_tensors()
    for row, ids in enumerate(written):
        fed = ids if begin is None else [begin, *ids]
        hidden = reference.embed(fed[:-1])[None]
        for index in range(len(reference.spec.layers)):
            hidden, _ = reference.run(reference.layer(index), hidden)
        expected = reference.logits(hidden[0], head)
        got = torch.stack([logits[row] for logits in steps if row < len(logits)])
        assert torch.allclose(got, expected, atol=2e-4 * expected.abs().max().item()), row


def test_what_the_model_writes_is_seeded_and_its_own(tiny: Reference) -> None:
    one, again, other = (write_sequences(tiny, [40] * 6, seed) for seed in (3, 3, 4))
    assert one == again and one != other
    assert [len(ids) for ids in one] == [40] * 6
    assert len({tuple(ids) for ids in one}) == 6


def test_sampling_follows_the_model(tiny: Reference) -> None:
    """Drawn often, first tokens come as often as the model says; without a cache, by hand."""
    ids = torch.tensor(write_sequences(tiny, [1] * 20000, 0))[:, 0]
    hidden = tiny.embed([tiny.source.config["bos_token_id"]])[None]
    for index in range(len(tiny.spec.layers)):
        hidden, _ = tiny.run(tiny.layer(index), hidden)
    expected = tiny.logits(hidden[0, -1], tiny.head_tensors()).softmax(-1)
    found = torch.bincount(ids, minlength=len(expected))
    mine, uniform = (
        ((found - len(ids) * share) ** 2 / (len(ids) * share)).sum()
        for share in (expected, expected * 0 + 1 / 320)
    )
    assert mine < 320 + 5 * 640**0.5, "chi-squared, 319 degrees of freedom"
    assert uniform > mine + 300


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((1000, 5), -torch.inf)
    logits[:, 2], logits[:, 3] = 0, 1
    drawn = sample(logits, torch.Generator().manual_seed(0))
    assert set(drawn.tolist()) == {2, 3}


def test_caches_stay_within_their_room(tiny: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """With little room the sequences are written in several batches of the same mix."""
    lengths = [32] * 4 + [16] * 8
    batches = self_writing._batches(lengths, 100)
    assert sorted(sum(map(list, batches), [])) == sorted(lengths)
    for batch in batches:
        assert max(length * sum(other >= length for other in batch) for length in batch) <= 100
    assert self_writing._batches(lengths, 10**6) == [lengths]
    assert self_writing._batches([32, 32], 1) == [[32], [32]], "one at a time at least"
    monkeypatch.setattr(self_writing, "CACHE_BYTES", 8 * 100 * 2 * 2 * 16)
    seen: list[int] = []
    found = write_sequences(
        tiny, lengths, 0, track=lambda steps: (seen.append(step) or step for step in steps)
    )
    assert [len(ids) for ids in found] == lengths
    assert len(seen) == 32 * len(batches)
