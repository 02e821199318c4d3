"""Learning of scales and table entries: it lowers the divergence, and leaves codes alone."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdconvert import families
from pdconvert.calibrate import random_sequences
from pdconvert.learn import Learned, learn
from pdconvert.measure import kl_divergence_nats
from pdconvert.pipeline import build
from pdconvert.quant.grid import LutLinear, QuantizedLinear
from pdconvert.quant.grids import integer_grid, table_grid
from pdconvert.quant.store import Stored, dequantized
from pdconvert.recipe import load_recipe
from pdconvert.reference import Reference
from pdconvert.sources import open_source


class Loud(Reference):
    """A reference with opinions: seeded weights give next to equal logits."""

    def head_tensors(self) -> dict[str, Tensor]:
        tensors = super().head_tensors()
        return {**tensors, "lm_head.weight": 40 * tensors["lm_head.weight"]}


@pytest.fixture(scope="module")
def reference() -> Reference:
    source = open_source(load_recipe("tiny").source)
    family = families.get(source.config)
    return Loud(source, family, family.read_config(source.config))


def stored_layers(reference: Reference, form: str) -> list[dict[str, Stored]]:
    """The layers rounded to nearest at 4 bits."""

    def round_to(name: str, value: Tensor) -> Stored:
        if value.dim() != 2:
            return value.half()
        grid = (
            table_grid(value, torch.ones(value.shape[1]), 4, 4, name)
            if form == "lut"
            else integer_grid(
                value,
                None,
                4,
                0 if form == "channels" else 32,
                name,
                symmetric=form != "zero points",
                lpbq=form == "lpbq",
            )
        )
        return grid.record(grid.nearest(value, torch.arange(value.shape[1])))

    return [
        {name: round_to(name, value) for name, value in reference.read_layer(index).items()}
        for index in range(len(reference.spec.layers))
    ]


def divergence(reference: Reference, layers: list[dict[str, Stored]], ids: list[list[int]]) -> float:
    start = reference.source.read("model.embed_tokens.weight")[torch.tensor(ids)]
    head, results = reference.head_tensors(), []
    for stored in (None, layers):
        hidden = start
        for index in range(len(reference.spec.layers)):
            tensors = reference.read_layer(index)
            if stored is not None:
                tensors = {name: dequantized(stored[index][name]) for name in tensors}
            hidden, _ = reference.run(reference.module(index, tensors), hidden)
        results.append(reference.logits(hidden, head).flatten(0, 1))
    return kl_divergence_nats(*results).mean().item()


@pytest.mark.parametrize("form", ["lut", "channels", "groups", "zero points", "lpbq"])
def test_what_is_learned_holds_on_other_text(reference: Reference, form: str) -> None:
    layers = stored_layers(reference, form)
    embedding = reference.source.read("model.embed_tokens.weight")
    vocab = reference.spec.vocab_size
    found = learn(
        reference,
        embedding,
        layers,
        reference.head_tensors(),
        random_sequences(vocab, [48] * 64, 0),
        steps=40,
        rate=2e-3,
    )
    other = random_sequences(vocab, [48] * 4, 1)
    before, after = divergence(reference, layers, other), divergence(reference, found, other)
    assert after < 0.95 * before
    for old, new in zip(layers, found, strict=True):
        assert old.keys() == new.keys()
        for name, value in old.items():
            learned = new[name]
            if isinstance(value, QuantizedLinear | LutLinear):
                assert type(learned) is type(value)
                fixed = value.parts().keys() - {"scales", "tables"}
                assert all(torch.equal(learned.parts()[part], value.parts()[part]) for part in fixed)
                assert not torch.equal(dequantized(learned), dequantized(value))
            elif name.endswith("norm.weight"):
                assert isinstance(learned, Tensor) and learned.dtype == torch.float16


@pytest.mark.parametrize("form", ["lut", "channels", "groups", "zero points", "lpbq"])
def test_nothing_learned_changes_nothing(reference: Reference, form: str) -> None:
    for value in stored_layers(reference, form)[0].values():
        item = Learned.of(value, "cpu")
        assert torch.equal(item.value(), dequantized(value))
        assert torch.equal(dequantized(item.record()), dequantized(value))


def test_a_build_that_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDCONVERT_CACHE", str(tmp_path / "cache"))
    scheme = "passes.quantize_weights.scheme=w4a16"
    recipe = load_recipe("tiny", overrides=(scheme, "calibration.tokens=384", "calibration.length=48"))
    *others, quantizer = recipe.passes
    for steps in (0, 10):
        options = {
            "form": "lut",
            "granularity": None,
            "rounding": "gptq",
            "learning_steps": steps,
        }
        chosen = (*others, replace(quantizer, **options))
        result = build(recipe.model_copy(update={"passes": chosen}), tmp_path / str(steps))
        assert result.verdict == "pass", result.summary
    steps_of = [
        json.loads((tmp_path / n / "report" / "report.json").read_text())["steps"] for n in ("0", "10")
    ]
    assert {step["step"] for step in steps_of[1]} == {step["step"] for step in steps_of[0]} | {"learn_scales"}
    learned = [step for step in steps_of[1] if step["step"] == "learn_scales"]
    assert all(10 < float(step["previous_db"]) < 100 for step in learned)
    blobs = [
        (tmp_path / n / "prefill.mlpackage/Data/com.apple.CoreML/weights/weight.bin").read_bytes()
        for n in ("0", "10")
    ]
    assert len(blobs[0]) == len(blobs[1]) and blobs[0] != blobs[1]
