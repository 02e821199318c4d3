"""Calibration text: what the model writes, what is read from files, and its way through the layers."""

import json
from pathlib import Path

import pytest
import torch

from pdconvert import families
from pdconvert.calibrate import Flow, random_sequences, read_sequences, write_sequences
from pdconvert.errors import InputError
from pdconvert.forms import plain_layer
from pdconvert.quant.calibration import grams, reference_inputs, stages
from pdconvert.quant.grid import quantize_symmetric
from pdconvert.recipe import load_recipe
from pdconvert.reference import Reference
from pdconvert.sources import open_source


class Letters:
    """A tokenizer whose tokens are the letters of a text."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 256 for letter in text]


@pytest.fixture(scope="module")
def reference() -> Reference:
    source = open_source(load_recipe("tiny").source)
    family = families.get(source.config)
    return Reference(source, family, family.read_config(source.config))


def test_what_the_model_writes_is_seeded_and_its_own(reference: Reference) -> None:
    one, again, other = (write_sequences(reference, 6, 40, seed, "cpu") for seed in (3, 3, 4))
    assert one == again and one != other
    assert [len(ids) for ids in one] == [40] * 6
    assert len({tuple(ids) for ids in one}) == 6


def test_sampling_follows_the_model(reference: Reference) -> None:
    """Drawn often, second tokens come as often as the model says; without a cache, by hand."""
    ids = torch.tensor(write_sequences(reference, 4000, 1, 0, "cpu"))[:, 0]
    hidden = reference.embed([reference.source.config["bos_token_id"]])[None]
    for index in range(len(reference.spec.layers)):
        hidden, _ = reference.run(reference.layer(index), hidden)
    expected = reference.logits(hidden[0, -1], reference.head_tensors()).softmax(-1)
    found = torch.bincount(ids, minlength=len(expected))
    mine, uniform = (
        ((found - len(ids) * share) ** 2 / (len(ids) * share)).sum()
        for share in (expected, expected * 0 + 1 / 320)
    )
    assert mine < 320 + 5 * 640**0.5, "chi-squared, 319 degrees of freedom"
    assert uniform > mine + 100


def test_text_files_are_read_evenly(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghij")
    got = read_sequences(tmp_path / "a.txt", Letters(), 2, 4)  # type: ignore[arg-type]
    assert got == [[ord(c) for c in "abcd"], [ord(c) for c in "ghij"]]
    lines = [json.dumps({"text": "abc", "more": 1}), "", json.dumps({"text": "def"})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert read_sequences(tmp_path / "a.jsonl", Letters(), 1, 3) == [[97, 98, 99]]  # type: ignore[arg-type]


REFUSED = {
    "missing.txt": (None, "cannot be read"),
    "short.txt": (b"abc", "has 3 tokens, and 2 sequences of 4 need 8"),
    "binary.txt": (b"\xff\xfe", "cannot be read as UTF-8"),
    "broken.jsonl": (b'{"text": 1}', 'line 1 has no "text"'),
    "nojson.jsonl": (b'{"text": "a"}\n{', "line 2 is not JSON"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_text_files_are_refused(tmp_path: Path, name: str) -> None:
    content, said = REFUSED[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=said):
        read_sequences(tmp_path / name, Letters(), 2, 4)  # type: ignore[arg-type]


def test_streams_follow_both_kinds_of_weights(reference: Reference) -> None:
    sequences = random_sequences(reference.spec.vocab_size, 5, 24, 0)
    table = reference.source.read("model.embed_tokens.weight")
    flow = Flow(reference, sequences, lambda: table)
    stored = {
        index: {
            name: quantize_symmetric(value, 8, name) if value.dim() == 2 else value.half()
            for name, value in reference.read_layer(index).items()
        }
        for index in range(2)
    }
    found = flow.before(2, lambda index: dict(stored[index]))
    hidden = torch.stack([reference.embed(ids) for ids in sequences])
    assert torch.equal(flow.before(2, lambda index: {}).reference, found.reference), (
        "a second call goes nowhere"
    )
    for index in range(2):
        hidden, _ = reference.run(reference.layer(index), hidden)
    assert torch.allclose(found.reference, hidden, atol=1e-5)
    distance = (found.stored - hidden).norm() / hidden.norm()
    assert 1e-5 < distance < 0.05


def test_inputs_are_taken_stage_by_stage(reference: Reference) -> None:

    block = plain_layer(reference.spec, 0, reference.read_layer(0), raw_keys=False)
    sequences = random_sequences(reference.spec.vocab_size, 3, 20, 1)
    calibration = Flow(
        reference, sequences, lambda: reference.source.read("model.embed_tokens.weight")
    ).before(0, lambda index: {})
    order = stages(block, next(calibration.windows(calibration.reference)))
    assert order == [
        ["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"],
        ["self_attn.o_proj"],
        ["mlp.gate_proj", "mlp.up_proj"],
        ["mlp.down_proj"],
    ]
    inputs = reference_inputs(block, calibration, ["mlp.down_proj"])["mlp.down_proj"]
    assert inputs.shape == (60, 128)
    sums = grams(block, calibration, "mlp.down_proj", inputs)
    assert torch.allclose(sums.own, inputs.T @ inputs, rtol=1e-4, atol=1e-4)
    assert torch.allclose(sums.cross, sums.own, rtol=1e-4, atol=1e-4), "nothing is quantized yet"
    assert not any(part._forward_pre_hooks for part in block.module.modules())
