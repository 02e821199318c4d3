"""Calibration text: its lengths, what is read from files, and its way through the layers."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from pdconvert import families
from pdconvert.calibrate import Flow, random_sequences, read_sequences, refuse_held_out, sequence_lengths
from pdconvert.errors import InputError
from pdconvert.forms import plain_layer
from pdconvert.quant.calibration import grams, reference_inputs, stages
from pdconvert.quant.grid import quantize_symmetric
from pdconvert.recipe import load_recipe
from pdconvert.recipe.model import CalibrationText
from pdconvert.reference import Reference
from pdconvert.sources import open_source

GPTQ = ("passes.quantize_weights.rounding=gptq",)


class Letters:
    """A tokenizer whose tokens are the letters of a text."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 256 for letter in text]


@pytest.fixture(scope="module")
def reference() -> Reference:
    source = open_source(load_recipe("tiny").source)
    family = families.get(source.config)
    return Reference(source, family, family.read_config(source.config))


def test_lengths_share_the_tokens() -> None:
    default = CalibrationText()
    assert Counter(sequence_lengths(default, 8192)) == {2048: 6, 1024: 12, 512: 24, 256: 48}
    assert Counter(sequence_lengths(default, 600)) == {600: 27, 512: 32, 256: 64}, (
        "within the model's positions"
    )
    assert sequence_lengths(CalibrationText(tokens=256, length=(64,)), 1024) == (64,) * 4
    assert sequence_lengths(CalibrationText(tokens=300), 1024) == (256,), "no length is filled by half"


def test_a_length_is_a_number_or_a_list() -> None:
    one = load_recipe("tiny", overrides=(*GPTQ, "calibration.length=64")).calibration
    assert one.length == (64,) and CalibrationText(length=[32, 64]).length == (32, 64)
    with pytest.raises(InputError, match="calibration.length"):
        load_recipe("tiny", overrides=(*GPTQ, "calibration.length=4"))


def test_text_files_are_read_evenly(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghij")
    got = read_sequences(tmp_path / "a.txt", Letters(), [4, 4])  # type: ignore[arg-type]
    assert got == [[ord(c) for c in "abcd"], [ord(c) for c in "ghij"]]
    got = read_sequences(tmp_path / "a.txt", Letters(), [4, 2, 1])  # type: ignore[arg-type]
    assert got == [[ord(c) for c in part] for part in ("abcd", "fg", "j")]
    lines = [json.dumps({"text": "abc", "more": 1}), "", json.dumps({"text": "def"})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert read_sequences(tmp_path / "a.jsonl", Letters(), [3]) == [[97, 98, 99]]  # type: ignore[arg-type]


REFUSED = {
    "missing.txt": (None, "cannot be read"),
    "short.txt": (b"abc", "has 3 tokens, and 2 sequences need 8"),
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
        read_sequences(tmp_path / name, Letters(), [4, 4])  # type: ignore[arg-type]


def test_text_that_is_measured_on_is_refused() -> None:
    held_out = random_sequences(320, [4000], 0)[0]
    refuse_held_out(Path("own.txt"), random_sequences(320, [100, 60], 1), held_out)
    with pytest.raises(InputError, match="calibration.file: 50 % of mixed.txt is in the held-out text"):
        refuse_held_out(Path("mixed.txt"), [held_out[300:400], *random_sequences(320, [100, 8], 1)], held_out)


def test_streams_follow_both_kinds_of_weights(reference: Reference) -> None:
    sequences = random_sequences(reference.spec.vocab_size, [40, 24, 24, 24], 0)
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
    assert [tuple(alike.shape[:2]) for alike in found.stored] == [(1, 40), (3, 24)]
    again = flow.before(2, lambda index: {})
    assert all(map(torch.equal, again.reference, found.reference)), "a second call goes nowhere"
    rows = [[window for alike in side for window in alike] for side in (found.reference, found.stored)]
    for ids, original, stored_row in zip(sequences, *rows, strict=True):
        hidden = reference.embed(ids)[None]
        for index in range(2):
            hidden, _ = reference.run(reference.layer(index), hidden)
        assert torch.allclose(original, hidden[0], atol=1e-5)
        distance = (stored_row - hidden[0]).norm() / hidden.norm()
        assert 1e-5 < distance < 0.05


def test_inputs_are_taken_stage_by_stage(reference: Reference) -> None:

    block = plain_layer(reference.spec, 0, reference.read_layer(0), raw_keys=False)
    sequences = random_sequences(reference.spec.vocab_size, [30, 15, 15], 1)
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
