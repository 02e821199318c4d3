"""Builds as ONNX models: every form of weights and every op of our packages, run by ONNX Runtime."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import helper, numpy_helper

from pdconvert.checks import Check
from pdconvert.cli import main
from pdconvert.emit.vectors import read_vectors
from pdconvert.errors import CheckFailed, InputError
from pdconvert.executors.mil import Package
from pdconvert.executors.mil.view import view_package
from pdconvert.export import onnx_build, optimize, rows
from pdconvert.export.data import packed
from pdconvert.export.onnx_build import export_onnx
from pdconvert.export.session import feed, open_session, run_case
from pdconvert.families import gemma3_text
from pdconvert.measure import sqnr_db
from pdconvert.pipeline import build
from pdconvert.recipe import load_recipe, recipe_from_data
from pdconvert.runtime.weights import DecodeWeights

ROOT = Path(__file__).parents[2]
CONV = ["linear_to_conv2d", "eager_gqa_attention", {"safe_rms_norm": {"method": "row_max"}}, "rope_as_input"]
LAYER_NORM = [*CONV[:2], {"safe_rms_norm": {"method": "layer_norm"}}, "rope_as_input"]
LONG = [{"tokens": 16}, {"tokens": 16, "past": 32}]
WINDOWS = {**gemma3_text.TINY, "vocab_size": 320, "bos_token_id": 256, "eos_token_id": 257}

FORMS: dict[str, dict[str, Any]] = {
    "w8": {"quantize": {"scheme": "w8a16"}},
    "w8 iOS16": {"quantize": {"scheme": "w8a16"}, "prefill": {"target": "iOS16"}},
    "w4 groups, embedding in the graph": {
        "quantize": {"scheme": "w4a16", "granularity": "per_group", "group_size": 32, "force": True},
        "prefill": {"embedding": "graph", "outputs": "logits", "functions": LONG},
    },
    "w4 with zero points": {
        "quantize": {
            "scheme": "w4a16",
            "granularity": "per_group",
            "group_size": 32,
            "symmetric": False,
            "force": True,
        },
        "prefill": {"functions": LONG},
    },
    "w8 with zero points": {"quantize": {"scheme": "w8a16", "symmetric": False}},
    "lpbq": {"quantize": {"scheme": "w4a16", "form": "lpbq", "group_size": 32, "force": True}},
    "tables, states": {
        "quantize": {"scheme": "w4a16", "form": "lut"},
        "passes": LAYER_NORM,
        "prefill": {"kv": {"storage": "state"}, "outputs": "logits", "functions": LONG},
    },
    "tables of 6 bits": {"quantize": {"scheme": "w6a16", "form": "lut", "granularity": "per_tensor"}},
    "linears, no other pass": {"quantize": {"scheme": "w8a16"}, "passes": ["rope_as_input"]},
    "windows, two embeddings of positions": {
        "quantize": {"scheme": "w8a16"},
        "source": {"random": {"seed": 0, "config": WINDOWS}},
        "prefill": {"functions": LONG},
    },
    "fp16": {"quantize": {"scheme": "none"}, "prefill": {"outputs": "logits", "logits": "all"}},
}

_made: dict[str, Path] = {}


@pytest.fixture
def built(tmp_path_factory, request):
    """Builds by form, each made once."""

    def make(name: str) -> Path:
        if name not in _made:
            form, data = FORMS[name], load_recipe("tiny").resolved()
            data["passes"] = [*form.get("passes", CONV), {"quantize_weights": form["quantize"]}]
            data["prefill"] |= {"functions": LONG[:1], **form.get("prefill", {})}
            data["decode"] = {"grid": "shared"}
            data["source"] = form.get("source", data["source"])
            data["gates"] = {}
            folder = tmp_path_factory.mktemp("build")
            recipe = recipe_from_data(data, where="test", folder=folder)
            assert build(recipe, folder / "out", use_cache=False).verdict == "pass"
            _made[name] = folder / "out"
        return _made[name]

    return make


def cli(*args: str) -> Any:
    return CliRunner().invoke(main, ["export", "onnx", *args])


@pytest.mark.parametrize("name", FORMS)
def test_every_form_agrees_with_the_package_after_every_step(built, tmp_path, name):
    report = export_onnx(built(name), tmp_path / "out", steps=optimize.STEPS)
    assert report["verdict"] == "pass"
    assert min(float(check["value"]) for check in report["checks"]) > 100
    manifest = json.loads((built(name) / "manifest.json").read_text())["prefill"]
    assert report["functions"].keys() == manifest["functions"].keys()
    for function, ports in manifest["functions"].items():
        path = tmp_path / "out" / f"{function}.onnx"
        onnx.checker.check_model(str(path), full_check=True)
        graph = onnx.load(path, load_external_data=False).graph
        states = [port["name"] for port in ports.get("states", [])]
        shapes = {port["name"]: port["shape"] for kind in ("inputs", "outputs") for port in ports[kind]}
        given = {item.name: dims(item) for item in (*graph.input, *graph.output)}
        assert {key: value for key, value in given.items() if not key.startswith(("k_c", "v_c"))} == shapes
        assert [item.name for item in graph.output][2:] == [
            *(port["name"] for port in ports["outputs"][2:]),
            *(f"{state}_next" for state in states),
        ]


def dims(item: Any) -> list[int]:
    return [size.dim_value for size in item.type.tensor_type.shape.dim]


def test_outputs_meet_the_test_vectors_beside_the_models(built, tmp_path):
    """As a user replays them, without the package."""
    export_onnx(built("w8"), tmp_path / "out")
    (case,), _ = read_vectors(tmp_path / "out" / "test_vectors")
    values, _ = run_case(open_session(tmp_path / "out" / "prefill_16.onnx"), case)
    for side in ("k", "v"):
        real = case.expected[side][..., : case.tokens], values[side][..., : case.tokens]
        assert sqnr_db(*(torch_of(value) for value in real)) > 60


def torch_of(value: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(value, np.float32))


def initializers(path: Path) -> dict[str, np.ndarray]:
    return {item.name: numpy_helper.to_array(item) for item in onnx.load(path).graph.initializer}


def test_a_weight_is_the_decode_folders_weight(built, tmp_path):
    """Both halves hold the same codes and scales, and so does the ONNX model."""
    export_onnx(built("w8"), tmp_path / "out")
    held = initializers(tmp_path / "out" / "prefill_16.onnx")
    codes, scale = (held[f"layers_0_self_attn_q_proj_weight_{part}"] for part in ("codes", "scale"))
    assert codes.dtype == np.int8
    value = codes[:, :, 0, 0].astype(np.float32) * scale[:, None]
    expected = DecodeWeights(built("w8") / "decode").rows(
        "model.layers.0.self_attn.q_proj", range(len(value))
    )
    np.testing.assert_array_equal(value, expected)


def test_functions_share_the_weights(built, tmp_path):
    for folder, functions in (("one", ["prefill_16"]), ("both", [])):
        export_onnx(built("w4 groups, embedding in the graph"), tmp_path / folder, functions)
    sizes = [(tmp_path / folder / "weights.data").stat().st_size for folder in ("one", "both")]
    assert sizes[0] == sizes[1]
    assert not (tmp_path / "one" / "extend_16_ctx32.onnx").exists()


def test_blocks_have_their_scales_and_tables_their_codes(built, tmp_path):
    export_onnx(built("w4 groups, embedding in the graph"), tmp_path / "blocks")
    model = onnx.load(tmp_path / "blocks" / "prefill_16.onnx")
    node = next(n for n in model.graph.node if n.name == "layers_0_mlp_down_proj_weight")
    attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
    assert node.op_type == "DequantizeLinear" and attributes == {"axis": 1, "block_size": 32}
    export_onnx(built("tables, states"), tmp_path / "tables")
    held = {item.name: item for item in onnx.load(tmp_path / "tables" / "prefill_16.onnx").graph.initializer}
    assert held["layers_0_self_attn_q_proj_weight_codes"].data_type == onnx.TensorProto.UINT4
    assert list(held["layers_0_self_attn_q_proj_weight_tables"].dims) == [16, 16]


def encoded(build: Path, out: Path, version: str) -> tuple[Any, Path]:
    export_onnx(build, out)
    function = "prefill_16"
    return json.loads((out / f"{function}.encodings-{version}.json").read_text()), out / f"{function}.onnx"


@pytest.mark.parametrize("name", ["w8", "w8 iOS16", "w4 groups, embedding in the graph"])
def test_encodings_of_weights_give_the_weights(built, tmp_path, name):
    """Version 1.0.0 has a flat list of scales, and offsets of the unsigned code."""
    content, path = encoded(built(name), tmp_path / "out", "1.0.0")
    held, entries = initializers(path), {entry["name"]: entry for entry in content["param_encodings"]}
    assert len(entries) == sum(n.op_type == "DequantizeLinear" for n in onnx.load(path).graph.node)
    entry = entries["layers_0_mlp_gate_proj_weight"]
    codes = held["layers_0_mlp_gate_proj_weight_codes"].astype(np.int64).reshape(128, 64)
    unsigned = codes + (1 << entry["bw"] - 1)
    per_row = entry.get("block_size", 64)
    scales, offsets = (
        np.repeat(np.reshape(entry[key], (128, -1)), per_row, 1) for key in ("scale", "offset")
    )
    expected = DecodeWeights(built(name) / "decode").rows("model.layers.0.mlp.gate_proj", range(128))
    np.testing.assert_array_equal(((unsigned + offsets) * scales).astype(np.float32), expected)


@pytest.mark.parametrize("name", ["w8", "tables, states", "linears, no other pass"])
def test_a_model_with_its_encodings_applied_still_computes_the_same(built, tmp_path, name):
    """Every activation through its 16-bit grid: what an NPU of such integers would give."""
    content, path = encoded(built(name), tmp_path / "out", "2.0.0")
    case = read_vectors(tmp_path / "out" / "test_vectors")[0][0]
    plain, _ = run_case(open_session(path), case)
    plainly = onnxruntime.SessionOptions()  # an optimizer would make integer products of the pairs
    plainly.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    entries = [entry for entry in content["encodings"] if entry["output_dtype"] == "uint16"]
    session = open_session(simulated(path, entries), plainly)
    names = [output.name for output in session.get_outputs()]
    rounded = dict(zip(names, session.run(names, feed(case)), strict=True))
    for output, value in plain.items():
        columns = slice(None) if output == "logits" else slice(case.tokens)
        got = rounded[f"{output}_rounded"][..., columns]
        assert sqnr_db(torch_of(value[..., columns]), torch_of(got)) > 55, output


def simulated(path: Path, entries: list[Mapping[str, Any]]) -> Path:
    """The model with a pair of QuantizeLinear and DequantizeLinear after every encoded tensor."""
    model = onnx.load(path, load_external_data=False)
    graph, nodes = model.graph, []
    outputs = {item.name for item in graph.output}
    computed = {name for node in graph.node for name in node.output} | {item.name for item in graph.input}
    assert {entry["name"] for entry in entries} <= computed
    pairs = {}
    for entry in entries:
        name = entry["name"]
        scale = helper.make_tensor(f"{name}_s", onnx.TensorProto.FLOAT, (), [entry["y_scale"]])
        zero = helper.make_tensor(f"{name}_z", onnx.TensorProto.UINT16, (), [entry["y_zero_point"]])
        graph.initializer.extend([scale, zero])
        grid = [f"{name}_s", f"{name}_z"]
        pairs[name] = [
            helper.make_node("QuantizeLinear", [name, *grid], [f"{name}_u16"]),
            helper.make_node("DequantizeLinear", [f"{name}_u16", *grid], [f"{name}_rounded"]),
        ]
    for item in graph.input:
        nodes += pairs.get(item.name, [])
    for node in graph.node:
        node.input[:] = [f"{name}_rounded" if name in pairs else name for name in node.input]
        nodes += [node, *(pair for name in node.output for pair in pairs.get(name, []))]
    del graph.node[:]
    graph.node.extend(nodes)
    for item in graph.output:
        item.name = f"{item.name}_rounded" if item.name in outputs & set(pairs) else item.name
    target = path.with_name("simulated.onnx")
    onnx.save(model, target)
    return target


def test_the_mask_does_not_take_the_range_of_the_scores(built, tmp_path):
    content, _ = encoded(built("windows, two embeddings of positions"), tmp_path / "out", "2.0.0")
    step = {entry["name"]: entry["y_scale"] for entry in content["encodings"]}
    assert step["mask"] < 1e-2 and step["mask_window"] < 1e-2


def test_every_op_that_the_lowering_writes_has_a_row():
    """Read off the sources, so that a new row there asks for one here."""
    text = "".join(path.read_text() for path in (ROOT / "pdconvert" / "lowering").glob("*.py"))
    written = set(re.findall(r"\bmb\.([a-z_0-9]+)", text))
    known = {*rows.ROWS, "const", "placeholder", "state_tensor_placeholder", "name_count"}
    assert written - known == {"coreml_update_state"}, "which a package holds as write_state and read_state"


def test_packages_hold_only_ops_with_a_row(built):
    for name in FORMS:
        for view in view_package(Package.open(built(name) / "prefill.mlpackage")).functions:
            assert {op.type for op in view.ops} <= set(rows.ROWS)


def test_an_op_without_a_row_is_refused_by_name(built, tmp_path, monkeypatch):
    monkeypatch.delitem(rows.ROWS, "softmax")
    with pytest.raises(
        InputError, match=r"export onnx: softmax 'layers_0_\w+' in function prefill_16 has no row"
    ):
        export_onnx(built("w8"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_that_differs_fails_and_is_kept(built, tmp_path, monkeypatch):
    monkeypatch.setitem(rows.ROWS, "silu", rows.ROWS["sigmoid"])
    ended = cli(str(built("w8")), "--out", str(tmp_path / "out"))
    assert ended.exit_code == 1 and f"fail: {tmp_path / 'out'}" in ended.output
    assert json.loads((tmp_path / "out" / "export.json").read_text())["verdict"] == "fail"


def test_a_step_that_hides_a_softmax_is_refused(built, tmp_path, monkeypatch):
    def hide(model, options, **more):
        open_session(model, options, **more)
        written = onnx.load(options.optimized_model_filepath, load_external_data=False)
        node = next(node for node in written.graph.node if node.op_type == "Softmax")
        node.op_type = "Sigmoid"
        onnx.save(written, options.optimized_model_filepath)

    monkeypatch.setattr(optimize, "open_session", hide)
    with pytest.raises(CheckFailed, match="step fold left 0 of 1 Softmax nodes; leave it out"):
        export_onnx(built("w8"), tmp_path / "out", steps=["fold"])


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["nowhere", "--out", "x"], "nowhere is not a build"),
        (["BUILD", "--out", "x", "--function", "extend_9"], "no function 'extend_9'; it has prefill_16"),
        (["BUILD", "--out", "BUILD"], "already holds a build"),
        (["BUILD", "--out", "x", "--optimize", "magic"], "'magic' is not one of 'fold', 'fuse'"),
    ],
)
def test_wrong_use_is_refused(built, tmp_path, monkeypatch, args, expected):
    monkeypatch.chdir(tmp_path)
    given = [str(built("w8")) if item == "BUILD" else item for item in args]
    ended = cli(*given)
    assert ended.exit_code == 2 and expected in " ".join(ended.output.split())
    assert list(tmp_path.iterdir()) == []


def test_a_model_in_parts_is_refused(built, tmp_path):
    folder = shutil.copytree(built("w8"), tmp_path / "parts")
    manifest = json.loads((folder / "manifest.json").read_text())
    section, functions = manifest["prefill"], manifest["prefill"]["functions"]
    part = {"package": section.pop("package"), "functions": functions}
    section["parts"] = [{**part, "layers": [0, 1]}, {**part, "layers": [1, 2]}]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="in 2 parts; build it without split_model"):
        export_onnx(folder, tmp_path / "out")


def test_json_is_one_object(built, tmp_path):
    ended = cli(str(built("w8")), "--out", str(tmp_path / "out"), "--json")
    report = json.loads(ended.stdout)
    assert report["path"] == str(tmp_path / "out") and report["verdict"] == "pass"
    assert [Check.from_json(line).passed for line in report["checks"]] == [True, True]


def test_codes_of_4_bits_are_packed_low_half_first():
    assert packed(np.array([[1, -1, 7]], np.int8), "INT4") == bytes([0xF1, 0x07])


def test_the_command_line_offers_every_step():
    """It names them itself, so that --help imports nothing heavy."""
    from pdconvert.cli import export

    assert export.STEPS == optimize.STEPS and onnx_build.FLOOR_DB == 55
