"""Lowered programs, run by the MIL executor, against Hugging Face."""

from itertools import combinations
from pathlib import Path

import pytest
import torch
from checkpoints import MemorySource, random_source, reference_of
from lowered import CONFIG, FULL, PREFILL, Call, Form, assert_close, call, inputs, lowering, package, run
from torch import Tensor

from passes import (
    EagerGqaAttention,
    LinearToConv2d,
    RopeAsInput,
    SafeRmsNorm,
)
from pdconvert.lowering.contract import FunctionShape
from pdconvert.measure import sqnr_db
from pdconvert.program import Pass
from pdconvert.reference import Reference

OPTIONAL = (LinearToConv2d(), EagerGqaAttention(), SafeRmsNorm())
LEGAL = [
    (*chosen, RopeAsInput())
    for size in range(4)
    for chosen in combinations(OPTIONAL, size)
    if LinearToConv2d() in chosen or EagerGqaAttention() not in chosen
]
"""Every recipe that leaves out some passes: the eager attention needs channels first."""


def names(passes: tuple[Pass, ...]) -> str:
    return "+".join(item.name for item in passes)


@pytest.mark.parametrize("outputs", ["kv", "logits"])
def test_recipes_that_leave_passes_out_give_the_same_numbers(
    outputs: str, reference: Reference, prompt: Call, tmp_path: Path
) -> None:
    results = {}
    for passes in LEGAL:
        form = Form(passes, outputs=outputs)
        opened = package(tmp_path / f"{names(passes)}.mlpackage", reference, form)
        given = inputs(reference, form, PREFILL, prompt)
        results[passes] = run(opened, PREFILL.name, given, 12)
        assert_close(prompt, results[passes])
        assert_close(prompt, run(opened, PREFILL.name, given, 12, "fp16"), 50)
    assert len(results) == 6
    for passes, got in results.items():
        for name, value in results[FULL].items():
            assert sqnr_db(value, got[name]) > 90, (names(passes), name)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "layer_norm", "heads": "single"},
        {"method": "layer_norm", "heads": "grouped"},
        {"method": "row_max", "heads": "single"},
    ],
    ids=lambda options: "+".join(options.values()),
)
def test_every_option_of_the_passes_lowers(
    options: dict[str, str], reference: Reference, prompt: Call, tmp_path: Path
) -> None:
    heads = EagerGqaAttention(heads=options["heads"])  # type: ignore[arg-type]
    norm = SafeRmsNorm(method=options["method"])  # type: ignore[arg-type]
    form = Form((LinearToConv2d(), heads, norm, RopeAsInput()), outputs="logits")
    opened = package(tmp_path / "x.mlpackage", reference, form)
    assert_close(prompt, run(opened, PREFILL.name, inputs(reference, form, PREFILL, prompt), 12))


@pytest.mark.parametrize("target", ["iOS16", "iOS17", "iOS18"])
def test_eight_bit_weights_hold_on_every_target(
    target: str, reference: Reference, prompt: Call, tmp_path: Path
) -> None:
    """Codes times scales as fp32 weights give the same numbers."""
    form = Form(scheme="w8a16", outputs="logits", target=target)
    opened = package(tmp_path / "w8.mlpackage", reference, form)
    got = run(opened, PREFILL.name, inputs(reference, form, PREFILL, prompt), 12)
    assert_close(prompt, got, 30)
    _, store = lowering(reference, form)
    values = dict(reference.source.values)
    for block in ("layers.0", "layers.1", "head"):
        for name, stored in store[block].items():
            source = {"norm.weight": "model.norm.weight", "lm_head.weight": name}.get(
                name, f"model.{block}.{name}"
            )
            value = stored if isinstance(stored, Tensor) else stored.dequantize()
            values[source] = value.float()
    assert_close(call(reference_of(MemorySource(CONFIG, values)), prompt.ids), got, 100)


def test_raw_keys_leave_before_they_turn(reference: Reference, prompt: Call, tmp_path: Path) -> None:
    raw = call(reference, prompt.ids, raw_keys=True)
    for passes in (FULL, (RopeAsInput(),)):
        form = Form(passes, raw_keys=True)
        opened = package(tmp_path / f"{len(passes)}.mlpackage", reference, form)
        got = run(opened, PREFILL.name, inputs(reference, form, PREFILL, prompt), 12)
        assert_close(raw, got)
        assert sqnr_db(prompt.keys, got["k"]) < 10


def test_the_embedding_can_lie_in_the_graph(reference: Reference, prompt: Call, tmp_path: Path) -> None:
    form = Form(outputs="logits", embedding="graph")
    opened = package(tmp_path / "x.mlpackage", reference, form)
    assert "hidden" not in opened.function(PREFILL.name).inputs
    assert_close(prompt, run(opened, PREFILL.name, inputs(reference, form, PREFILL, prompt), 12), 55)


@pytest.mark.parametrize(
    ("passes", "raw_keys"), [(FULL, False), (FULL, True), (LEGAL[1], False), (LEGAL[0], True)], ids=str
)
def test_functions_with_a_past_continue_where_the_prompt_ended(
    passes: tuple[Pass, ...], raw_keys: bool, reference: Reference, prompt: Call, tmp_path: Path
) -> None:
    extend, decode = FunctionShape(8, 24), FunctionShape(1, 24)
    form = Form(passes, shapes=[PREFILL, extend, decode], outputs="logits", raw_keys=raw_keys)
    opened = package(tmp_path / "x.mlpackage", reference, form)
    new = call(reference, [5, 9, 300, 2, 41], prompt, raw_keys)
    assert_close(new, run(opened, extend.name, inputs(reference, form, extend, new, prompt), 5))
    one = call(reference, [17], prompt, raw_keys)
    assert_close(one, run(opened, decode.name, inputs(reference, form, decode, one, prompt), 1))


def test_a_past_without_logits_feeds_all_layers_but_the_last(
    reference: Reference, prompt: Call, tmp_path: Path
) -> None:
    extend = FunctionShape(8, 12)
    form = Form(shapes=[PREFILL, extend])
    opened = package(tmp_path / "x.mlpackage", reference, form)
    new = call(reference, [5, 9, 300], prompt)
    assert_close(new, run(opened, extend.name, inputs(reference, form, extend, new, prompt), 3))


@pytest.mark.parametrize("mode", ["fp32", "fp16"])
def test_what_lies_in_the_padding_and_the_unused_past_does_not_matter(
    mode: str, reference: Reference, prompt: Call, tmp_path: Path
) -> None:
    extend = FunctionShape(8, 24)
    form = Form(shapes=[extend], outputs="logits")
    opened = package(tmp_path / "x.mlpackage", reference, form)
    new = call(reference, [5, 9, 300], prompt)
    given = inputs(reference, form, extend, new, prompt)
    expected = run(opened, extend.name, given, 3, mode)
    noise = torch.Generator().manual_seed(3)
    for name, first in (("hidden", 3), ("rope_cos", 3), ("rope_sin", 3), ("past_k", 12), ("past_v", 12)):
        given[name] = given[name].clone()
        given[name][..., first:].normal_(generator=noise).mul_(20)
    got = run(opened, extend.name, given, 3, mode)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


GEOMETRIES = {
    "one layer": {"num_hidden_layers": 1},
    "one kv head": {"num_key_value_heads": 1},
    "a kv head for each head": {"num_key_value_heads": 4},
    "wide heads": {"head_dim": 24},
    "heads of two": {"head_dim": 2},
    "tied": {"tie_word_embeddings": True},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
}


@pytest.mark.parametrize("outputs", ["kv", "logits"])
@pytest.mark.parametrize("geometry", list(GEOMETRIES))
def test_other_geometries_lower_too(geometry: str, outputs: str, tmp_path: Path) -> None:
    reference = reference_of(random_source({**CONFIG, **GEOMETRIES[geometry]}))
    prompt = call(reference, list(range(9)))
    form = Form(outputs=outputs)
    opened = package(tmp_path / "x.mlpackage", reference, form)
    assert_close(prompt, run(opened, PREFILL.name, inputs(reference, form, PREFILL, prompt), 9))
