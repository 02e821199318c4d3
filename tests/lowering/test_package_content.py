"""What lies in a shipped package: ops, types, names and shared weights, read from its protobuf."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import random_source, reference_of
from lowered import CONFIG, FULL, PREFILL, Form, operations, package

from passes import FoldAttentionScale, FoldNormGain, RopeAsInput, ScaleResidual
from pdconvert.executors.mil import Package
from pdconvert.executors.mil.values import value_info
from pdconvert.lowering.contract import FunctionShape, Interface, input_ports, output_ports
from pdconvert.reference import Reference

EXTEND, DECODE = FunctionShape(8, 24), FunctionShape(1, 24)
FORBIDDEN = {
    "linear": "a projection is a 1x1 convolution",
    "gather": "the embedding lies on the host",
    "tile": "K and V are broadcast to their group, not repeated",
    "scaled_dot_product_attention": "the fused attention is wrong on several ANE generations",
    "cast": "everything is fp16 from the inputs to the outputs",
    "transpose": "heads come first, so attention moves nothing",
    "sin": "RoPE tables are inputs",
    "cos": "RoPE tables are inputs",
    "pow": "a square is a product",
}
FORMS = {
    "kv": Form(scheme="w8a16"),
    "fp16": Form(),
    "logits": Form(scheme="w8a16", outputs="logits"),
    "functions": Form(scheme="w8a16", outputs="logits", shapes=[PREFILL, EXTEND, DECODE]),
    "raw": Form(scheme="w8a16", raw_keys=True),
    "iOS16": Form(scheme="w8a16", target="iOS16"),
    "folded": Form((*FULL, FoldNormGain(), FoldAttentionScale(), ScaleResidual(0.25)), "w8a16"),
}


@pytest.fixture(scope="module", params=list(FORMS))
def opened(
    request: pytest.FixtureRequest, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Package:
    folder = tmp_path_factory.mktemp(request.param) / "x.mlpackage"
    return package(folder, reference, FORMS[request.param])


def every_operation(opened: Package) -> list[Any]:
    return [operation for name in opened.function_names for operation in operations(opened, name)]


def test_no_op_that_the_ane_is_known_to_leave(opened: Package) -> None:
    found = Counter(operation.type for operation in every_operation(opened))
    assert {name: FORBIDDEN[name] for name in FORBIDDEN if found[name]} == {}


def test_no_fp32_anywhere(opened: Package) -> None:
    kinds = {
        value_info(output.type).dtype
        for operation in every_operation(opened)
        for output in operation.outputs
        if output.type.WhichOneof("type") == "tensorType"
    }
    assert kinds & {"fp32", "fp64"} == set() and "fp16" in kinds


def test_every_shape_is_static_and_of_at_most_four_dimensions(opened: Package) -> None:
    for operation in every_operation(opened):
        for output in operation.outputs:
            info = value_info(output.type)
            assert info.is_static and len(info.shape) <= 4, output.name


def test_softmax_runs_over_the_key_axis(opened: Package) -> None:
    for name in opened.function_names:
        keys, tokens = opened.function(name).inputs["mask"].shape[2:]
        for operation in operations(opened, name):
            if operation.type == "softmax":
                assert value_info(operation.outputs[0].type).shape == (2, 2, keys, tokens)


def test_names_are_unique_within_a_function(opened: Package) -> None:
    for name in opened.function_names:
        inputs = list(opened.function(name).inputs)
        outputs = [output.name for operation in operations(opened, name) for output in operation.outputs]
        repeated = [value for value, count in Counter([*inputs, *outputs]).items() if count > 1]
        assert repeated == []


def test_what_is_computed_is_used(opened: Package) -> None:
    for name in opened.function_names:
        block = operations(opened, name)
        used = set(opened.function(name).outputs)
        for operation in block:
            for argument in operation.inputs.values():
                used |= {part.name for part in argument.arguments if part.WhichOneof("binding") == "name"}
        made = {output.name for operation in block for output in operation.outputs}
        assert made - used == set()


def test_inputs_and_outputs_are_those_of_the_contract(
    opened: Package, reference: Reference, request: pytest.FixtureRequest
) -> None:
    form = FORMS[request.node.callspec.params["opened"]]
    assert opened.function_names == sorted(shape.name for shape in form.shapes)
    for shape in form.shapes:
        function = opened.function(shape.name)
        expected = input_ports(reference.spec, shape, Interface(form.embedding, form.outputs))
        given = output_ports(reference.spec, shape, Interface(form.embedding, form.outputs))
        for ports, values in ((expected, function.inputs), (given, function.outputs)):
            assert [(port.name, port.shape, port.dtype) for port in ports] == [
                (name, value.shape, value.dtype) for name, value in values.items()
            ]
            assert all(len(port.axes) == len(port.shape) for port in ports)


def test_the_contract_of_a_function_with_a_past(reference: Reference) -> None:
    shape = FunctionShape(8, 24)
    assert shape.name == "extend_8_ctx24" and FunctionShape(1, 24).name == "decode_1_ctx24"
    assert FunctionShape(16).name == "prefill_16" and FunctionShape(1).name == "prefill_1"
    ports = {
        port.name: port.shape for port in input_ports(reference.spec, shape, Interface(outputs="logits"))
    }
    assert ports == {
        "hidden": (1, 32, 1, 8),
        "rope_cos": (1, 1, 16, 8),
        "rope_sin": (1, 1, 16, 8),
        "mask": (1, 1, 32, 8),
        "past_k": (1, 4, 16, 24),
        "past_v": (1, 4, 16, 24),
        "row": (1, 1, 8, 1),
    }
    outputs = {
        port.name: port.shape for port in output_ports(reference.spec, shape, Interface(outputs="logits"))
    }
    assert outputs == {"k": (1, 4, 16, 8), "v": (1, 4, 16, 8), "logits": (1, 320, 1, 1)}


def weight_bytes(opened: Package) -> int:
    return sum(path.stat().st_size for path in opened.path.rglob("weight.bin"))


@pytest.mark.parametrize("scheme", ["none", "w8a16"])
def test_functions_share_one_copy_of_the_weights(scheme: str, reference: Reference, tmp_path: Path) -> None:
    one = Form(scheme=scheme, outputs="logits")
    several = replace(one, shapes=[PREFILL, EXTEND, DECODE, FunctionShape(4)])
    alone = package(tmp_path / "one.mlpackage", reference, one)
    together = package(tmp_path / "several.mlpackage", reference, several)
    assert len(together.function_names) == 4
    assert weight_bytes(together) == weight_bytes(alone)


def test_eight_bit_weights_take_half_the_bytes_of_fp16(reference: Reference, tmp_path: Path) -> None:
    config = {**CONFIG, "hidden_size": 128, "intermediate_size": 256}
    larger = reference_of(random_source(config))
    sizes = [
        weight_bytes(package(tmp_path / f"{scheme}.mlpackage", larger, Form(scheme=scheme)))
        for scheme in ("none", "w8a16")
    ]
    assert 0.5 < sizes[1] / sizes[0] < 0.56


@pytest.mark.parametrize(
    ("target", "op"),
    [
        ("iOS16", "constexpr_affine_dequantize"),
        ("iOS17", "constexpr_affine_dequantize"),
        ("iOS18", "constexpr_blockwise_shift_scale"),
    ],
)
def test_codes_are_written_as_the_target_takes_them(
    target: str, op: str, reference: Reference, tmp_path: Path
) -> None:
    opened = package(tmp_path / "x.mlpackage", reference, Form(scheme="w8a16", target=target))
    found = Counter(operation.type for operation in operations(opened))
    # Seven projections of the whole layer, two of the truncated one.
    assert {name: count for name, count in found.items() if "constexpr" in name} == {op: 9}
    assert found["conv"] == 9


def test_the_last_layer_is_cut_down_to_its_keys_and_values(reference: Reference, tmp_path: Path) -> None:
    counts = {}
    for outputs in ("kv", "logits"):
        opened = package(tmp_path / f"{outputs}.mlpackage", reference, Form(outputs=outputs))
        counts[outputs] = Counter(operation.type for operation in operations(opened))
    assert counts["kv"]["conv"] == 9 and counts["logits"]["conv"] == 15
    assert counts["kv"]["softmax"] == 1 and counts["logits"]["softmax"] == 2


def test_a_plain_recipe_still_has_static_fp16_only(reference: Reference, tmp_path: Path) -> None:
    opened = package(tmp_path / "x.mlpackage", reference, Form((RopeAsInput(),), outputs="logits"))
    test_no_fp32_anywhere(opened)
    assert Counter(operation.type for operation in operations(opened))["linear"] == 15


def test_folding_leaves_the_ops_out_that_it_folds(reference: Reference, tmp_path: Path) -> None:
    plain = package(tmp_path / "plain.mlpackage", reference, Form(outputs="logits"))
    passes = (*FULL, FoldNormGain(), FoldAttentionScale())
    folded = package(tmp_path / "folded.mlpackage", reference, Form(passes, outputs="logits"))
    before, after = (Counter(operation.type for operation in operations(one)) for one in (plain, folded))
    # Five norms, two attentions.
    assert before["mul"] - after["mul"] == 7
    assert before["conv"] == after["conv"]
