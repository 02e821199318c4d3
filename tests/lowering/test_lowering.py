"""Lowered programs, run by the MIL executor, against Hugging Face."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import MemorySource, layer_block, random_source, reference_of
from lowered import FULL, Call, Form, call, inputs, lowering, package, run
from torch import Tensor, nn

from passes import (
    EagerGqaAttention,
    FoldAttentionScale,
    FoldNormGain,
    LinearToConv2d,
    QuantizeWeights,
    RopeAsInput,
    SafeRmsNorm,
    ScaleResidual,
)
from pdconvert.errors import InputError
from pdconvert.families import llama
from pdconvert.lowering.contract import FunctionShape
from pdconvert.lowering.export import export_block, signature
from pdconvert.measure import sqnr_db
from pdconvert.program import Pass
from pdconvert.reference import Reference

CONFIG = {
    **llama.TINY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "head_dim": 16,
    "attention_bias": True,
    "mlp_bias": True,
}
"""A head's attention scale, 0.25, is exact in fp16."""

PREFILL = FunctionShape(16)
FP16_WEIGHTS_DB = 60
"""Loss to fp16 weights in fp32 arithmetic; the tiny models here reach about 67."""

OPTIONAL = (LinearToConv2d(), EagerGqaAttention(), SafeRmsNorm())
LEGAL = [
    (*chosen, RopeAsInput())
    for size in range(4)
    for chosen in combinations(OPTIONAL, size)
    if LinearToConv2d() in chosen or EagerGqaAttention() not in chosen
]
"""Every recipe that leaves out some passes: the eager attention needs channels first."""


@pytest.fixture(scope="module")
def reference() -> Reference:
    return reference_of(random_source(CONFIG))


@pytest.fixture(scope="module")
def prompt(reference: Reference) -> Call:
    return call(reference, [(7 * i) % 320 for i in range(12)])


def names(passes: tuple[Pass, ...]) -> str:
    return "+".join(item.name for item in passes)


def assert_close(new: Call, got: dict[str, Tensor], floor_db: float = FP16_WEIGHTS_DB) -> None:
    """Compare the outputs of a package with Hugging Face's."""
    found = {"k": sqnr_db(new.keys, got["k"]), "v": sqnr_db(new.values, got["v"])}
    if "logits" in got:
        found["logits"] = sqnr_db(new.logits[-1], got["logits"][0, :, 0, 0])
    assert min(found.values()) > floor_db, found


@pytest.mark.parametrize("outputs", ["kv", "logits"])
def test_recipes_that_leave_passes_out_give_the_same_numbers(
    outputs: str, reference: Reference, prompt: Call, tmp_path: Path
) -> None:
    results = {}
    for passes in LEGAL:
        form = Form(passes, outputs=outputs)
        opened = package(tmp_path / f"{names(passes)}.mlpackage", reference, form)
        results[passes] = run(opened, PREFILL.name, inputs(reference, form, PREFILL, prompt), 12)
        assert_close(prompt, results[passes])
    assert len(results) == 6
    for passes, got in results.items():
        for name, value in results[FULL].items():
            assert sqnr_db(value, got[name]) > 90, (names(passes), name)


@pytest.mark.parametrize("passes", LEGAL, ids=names)
def test_fp16_arithmetic_stays_close(
    passes: tuple[Pass, ...], reference: Reference, prompt: Call, tmp_path: Path
) -> None:
    form = Form(passes, outputs="logits")
    opened = package(tmp_path / "x.mlpackage", reference, form)
    assert_close(prompt, run(opened, PREFILL.name, inputs(reference, form, PREFILL, prompt), 12, "fp16"), 50)


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


@pytest.mark.parametrize("raw_keys", [False, True], ids=["rotated", "raw"])
@pytest.mark.parametrize("passes", [FULL, LEGAL[1], (RopeAsInput(),)], ids=names)
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


def loud(reference: Reference, factor: float) -> Reference:
    """The model with a residual stream `factor` times as loud, which the norms undo."""
    writers = (
        "embed_tokens.weight",
        *(f"{name}_proj.{part}" for name in ("o", "down") for part in ("weight", "bias")),
    )
    values = {
        name: value * factor if name.endswith(writers) else value
        for name, value in reference.source.values.items()
    }
    return reference_of(MemorySource(CONFIG, values))


FOLDING = {
    "gains": (FoldNormGain(),),
    "attention scale": (FoldAttentionScale(),),
    "residual": (ScaleResidual(0.125),),
    "all": (FoldNormGain(), FoldAttentionScale(), ScaleResidual(0.125)),
}


@pytest.mark.parametrize("embedding", ["host", "graph"])
@pytest.mark.parametrize("scheme", ["none", "w8a16"])
@pytest.mark.parametrize("case", list(FOLDING))
def test_what_is_folded_into_the_weights_gives_the_same_numbers(
    case: str, scheme: str, embedding: str, reference: Reference, prompt: Call, tmp_path: Path
) -> None:
    form = Form((*FULL, *FOLDING[case]), scheme, outputs="logits", embedding=embedding)
    opened = package(tmp_path / "x.mlpackage", reference, form)
    got = run(opened, PREFILL.name, inputs(reference, form, PREFILL, prompt), 12)
    assert_close(prompt, got, 30 if scheme == "w8a16" else 55)


def test_a_scaled_residual_stream_survives_what_exceeds_fp16_itself(
    reference: Reference, tmp_path: Path
) -> None:
    model = loud(reference, 60000.0)
    prompt = call(model, list(range(10)))
    found = []
    for passes in (FULL, (*FULL, ScaleResidual(2.0**-8))):
        form = Form(passes, outputs="logits")
        opened = package(tmp_path / f"{len(passes)}.mlpackage", model, form)
        got = run(opened, PREFILL.name, inputs(model, form, PREFILL, prompt), 10, "fp16")
        found.append(sqnr_db(prompt.logits[-1], got["logits"][0, :, 0, 0]))
    assert not found[0] > 10 and found[1] > 40, found


class Strange(nn.Module):
    """Stands where a norm should, and uses an op that the table lacks."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.erfinv(x.tanh())


def test_an_op_without_a_row_is_an_error_that_names_it_and_its_line(reference: Reference) -> None:
    lowered, _ = lowering(reference, Form())
    lowered.skeletons[0].module.input_layernorm = Strange()
    with pytest.raises(InputError) as error:
        lowered.program([PREFILL])
    message = str(error.value)
    assert message.startswith(
        "layers.0: aten.erfinv.default has no row in the lowering table (pdconvert/lowering/aten.py); it comes from "
    )
    assert "test_lowering.py" in message and "return torch.erfinv(x.tanh())" in message
    assert message.endswith("Add a row, or rewrite the block without it")


def test_a_block_that_takes_positions_is_refused(reference: Reference) -> None:
    lowered, _ = lowering(reference, Form(FULL[:3]))
    with pytest.raises(InputError) as error:
        lowered.program([PREFILL])
    assert str(error.value) == "block layers.0 takes positions, the graph gives rope_cos; list rope_as_input"


def test_an_unknown_target_is_refused(reference: Reference) -> None:
    lowered, _ = lowering(reference, Form(target="iOS15"))
    with pytest.raises(InputError) as error:
        lowered.program([PREFILL])
    assert str(error.value) == "target iOS15 is not supported; use one of iOS16, iOS17, iOS18"


def test_weights_in_groups_need_ios18(reference: Reference) -> None:
    lowered, store = lowering(reference, Form(target="iOS17"))
    record = (
        QuantizeWeights(granularity="per_group").run(layer_block(reference)).records["mlp.up_proj.weight"]
    )
    store["layers.0"] = {**store["layers.0"], "mlp.up_proj.weight": record}
    with pytest.raises(InputError) as error:
        lowered.program([PREFILL])
    assert (
        str(error.value) == "layers_0_mlp_up_proj_weight: weights in groups need the target iOS18, not iOS17"
    )


def test_layers_that_are_alike_are_exported_once(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pdconvert.lowering import assemble

    source = random_source({**CONFIG, "num_hidden_layers": 5})
    lowered, _ = lowering(reference_of(source), Form(shapes=[PREFILL, FunctionShape(8)]))
    exported = []

    def count(block, rope_dims, shape):
        exported.append((block.name, shape.name))
        return export_block(block, rope_dims, shape)

    monkeypatch.setattr(assemble, "export_block", count)
    lowered.program([PREFILL, FunctionShape(8)])
    assert exported == [
        (name, shape) for shape in ("prefill_16", "prefill_8") for name in ("layers.0", "layers.4")
    ]


def test_a_signature_tells_forms_apart(reference: Reference) -> None:
    block = layer_block(reference)
    forms = [block]
    for rewrite in FULL:
        forms.append(rewrite.run(forms[-1]))
    found = {signature(form, PREFILL) for form in forms}
    assert len(found) == len(forms)
    assert signature(block, PREFILL) == signature(layer_block(reference, 1), PREFILL)
    assert signature(block, PREFILL) != signature(block, FunctionShape(8))


def test_exporting_reads_no_weights(reference: Reference) -> None:
    block = layer_block(reference)
    before = {name: (id(value), value.clone()) for name, value in block.module.named_parameters()}
    for rewrite in FULL:
        block = rewrite.run(block)
    graph = export_block(block, reference.spec.rope.dims, PREFILL)
    assert graph.inputs == ("hidden", "rest_0", "rest_1", "rest_2")
    assert set(graph.parameters.values()) == set(before)
    assert all(
        node.meta["val"].device.type == "meta" for node in graph.graph.nodes if node.op == "call_function"
    )
    for name, (_, value) in before.items():
        assert np.array_equal(block.module.get_parameter(name).numpy().reshape(value.shape), value.numpy())
