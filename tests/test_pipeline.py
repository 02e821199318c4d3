"""Whole builds of a tiny model: every variant that a recipe can ask for, and what a build leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from loud import LOUD_EMBEDDING, LOUD_LAYER, loud_checkpoint
from safetensors.numpy import load_file

from pdconvert.checks import Check, verdict
from pdconvert.errors import InputError
from pdconvert.pipeline import build
from pdconvert.prepare import make_plan, make_texts
from pdconvert.quant.grids import table_grid
from pdconvert.recipe import Recipe, load_recipe, recipe_from_data
from pdconvert.sources import open_source
from pdconvert.verify import verify_build


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("PDCONVERT_CACHE", str(tmp_path_factory.mktemp("cache")))


def tiny(*overrides: str):
    return load_recipe("tiny", overrides=overrides)


def digest(folder: Path) -> dict[str, bytes]:
    """Contents by path, without what a build may not repeat: times and memory, which the report page shows too."""
    contents = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "index.html":
            content = path.read_bytes()
            if path.name in ("manifest.json", "report.json"):
                data = json.loads(content)
                data.pop("cost")
                for step in data.get("steps", []):
                    step.pop("seconds")
                content = json.dumps(data).encode()
            contents[str(path.relative_to(folder))] = content
    return contents


QUANTIZER = "passes.quantize_weights."
CALIBRATED = (f"{QUANTIZER}rounding=gptq", "calibration.tokens=256", "calibration.length=64")
W4 = f"{QUANTIZER}scheme=w4a16"
LUT = (W4, f"{QUANTIZER}form=lut", f"{QUANTIZER}granularity=per_grouped_channel")
GROUPS = (f"{QUANTIZER}granularity=per_group", f"{QUANTIZER}force=true")

VARIANTS = [
    (),
    ("prefill.kv.rope=raw",),
    ("prefill.outputs=logits",),
    ("prefill.embedding=graph",),
    ("prefill.outputs=logits", "prefill.logits=all"),
    ("prefill.target=iOS16",),
    ("passes.quantize_weights.scheme=none",),
    (W4,),
    (W4, *CALIBRATED, f"{QUANTIZER}sweeps=1"),
    (W4, *CALIBRATED, *GROUPS, f"{QUANTIZER}group_size=32"),
    (W4, *CALIBRATED, f"{QUANTIZER}symmetric=false", f"{QUANTIZER}learning_steps=4"),
    (*GROUPS, f"{QUANTIZER}symmetric=false", "prefill.kv.rope=raw"),
    ("prefill.target=iOS16", f"{QUANTIZER}symmetric=false"),
    (W4, *CALIBRATED, *GROUPS, f"{QUANTIZER}form=lpbq", f"{QUANTIZER}sweeps=1"),
    (*LUT, *CALIBRATED),
    (*LUT, *CALIBRATED, "decode.grid=own", "decode.group_size=32"),
    (
        f"{QUANTIZER}scheme=w6a16",
        f"{QUANTIZER}form=lut",
        f"{QUANTIZER}granularity=per_tensor",
        "prefill.outputs=logits",
    ),
    CALIBRATED,
    ("passes.eager_gqa_attention.heads=single",),
    ("passes.safe_rms_norm.method=layer_norm", "prefill.outputs=logits", "prefill.kv.rope=raw"),
]


@pytest.mark.parametrize("overrides", VARIANTS, ids=lambda value: ",".join(value) or "default")
def test_every_variant_builds_and_verifies(tmp_path, overrides):
    result = build(tiny(*overrides), tmp_path / "out")
    assert result.verdict == "pass", result.summary
    report = verify_build(tmp_path / "out", executor="mil")
    assert report["verdict"] == "pass"
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    outputs = {port["name"] for port in manifest["prefill"]["functions"]["prefill_128"]["outputs"]}
    assert outputs == ({"k", "v", "logits"} if "prefill.outputs=logits" in overrides else {"k", "v"})
    assert max(map(len, result.summary.splitlines())) <= 80


def test_equal_inputs_give_equal_bytes_with_and_without_the_cache(tmp_path):
    for name, use_cache in (("a", True), ("b", True), ("c", False)):
        build(tiny(), tmp_path / name, use_cache=use_cache)
    first = digest(tmp_path / "a")
    assert first == digest(tmp_path / "b") == digest(tmp_path / "c")
    assert not any(name.startswith(".") for name in first)


def test_an_interrupted_build_resumes_and_leaves_nothing(tmp_path, monkeypatch):
    from pdconvert import compile as compiling

    original = compiling.Compiler._head

    def interrupt(*args, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(compiling.Compiler, "_head", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build(tiny(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []

    layers = []
    layer = compiling.Compiler._layer
    monkeypatch.setattr(compiling.Compiler, "_head", original)
    monkeypatch.setattr(
        compiling.Compiler, "_layer", lambda *args, **named: layers.append(args) or layer(*args, **named)
    )
    assert build(tiny(), tmp_path / "out").verdict == "pass"
    assert layers == [], "layers were compiled again"


def test_a_changed_recipe_shares_nothing_that_it_changes(tmp_path):
    build(tiny(), tmp_path / "w8")
    build(tiny("passes.quantize_weights.scheme=none"), tmp_path / "fp16")
    w8, fp16 = (load_file(tmp_path / name / "decode" / "model.safetensors") for name in ("w8", "fp16"))
    assert any(name.endswith(".scales") for name in w8)
    assert not any(name.endswith(".scales") for name in fp16)
    assert fp16["model.layers.0.self_attn.q_proj.weight"].shape == (64, 64)


def test_both_halves_hold_the_same_codes(tmp_path):
    from pdconvert.executors.mil import Package

    build(tiny(), tmp_path / "out")
    package = Package.open(tmp_path / "out" / "prefill.mlpackage")
    blob = (tmp_path / "out/prefill.mlpackage/Data/com.apple.CoreML/weights/weight.bin").read_bytes()
    decode = load_file(tmp_path / "out" / "decode" / "model.safetensors")
    words = decode["model.layers.0.mlp.gate_proj.weight"]
    codes = (words.view(np.uint8).astype(np.int16) - 128).astype(np.int8)
    assert codes.tobytes() in blob
    scales = decode["model.layers.0.mlp.gate_proj.scales"][:, 0]
    assert scales.tobytes() in blob
    assert list(package.function_names) == ["prefill_128"]


def quantizer_db(folder: Path) -> float:
    """SQNR of the worst block after quantize_weights."""
    steps = json.loads((folder / "report" / "report.json").read_text())["steps"]
    return min(float(step["previous_db"]) for step in steps if step["step"] == "quantize_weights")


def test_calibrated_rounding_loses_less_than_rounding_to_nearest(tmp_path):
    build(tiny(W4), tmp_path / "nearest")
    build(tiny(W4, *CALIBRATED[:1], "calibration.tokens=6144"), tmp_path / "gptq")
    assert quantizer_db(tmp_path / "gptq") > quantizer_db(tmp_path / "nearest") + 0.5
    used = json.loads((tmp_path / "gptq" / "manifest.json").read_text())["quantization"]["calibration"]
    assert (used["text"], used["tokens"], used["fit"]) == ("random tokens", 6144, None)
    assert used["lengths"] == {"256": 8, "512": 4, "1024": 2}, "within the positions of the model"
    assert (
        json.loads((tmp_path / "nearest" / "manifest.json").read_text())["quantization"]["calibration"]
        is None
    )


def test_bits_are_counted_with_scales_and_tables(tmp_path):
    """Linears of 64 and 128 inputs: 4 bits, and per row a scale of 16 bits, or per 4 rows a table of 16 · 16."""
    build(tiny(W4), tmp_path / "integer")
    build(tiny(*LUT, "decode.grid=own"), tmp_path / "lut")
    counts = [
        json.loads((tmp_path / name / "manifest.json").read_text())["quantization"]
        for name in ("integer", "lut")
    ]
    rows, weights = 64 + 32 + 32 + 64 + 128 + 128 + 64, 64 * (64 + 32 + 32 + 64 + 128 + 128) + 128 * 64
    assert counts[0]["bits_per_weight"] == pytest.approx(4 + 16 * rows / weights, abs=1e-4)
    assert counts[1]["bits_per_weight"] == pytest.approx(4 + 256 * rows / 4 / weights, abs=1e-4)
    assert counts[1]["decode_bits_per_weight"] == pytest.approx(4 + 16 / 64, abs=1e-4)


def test_other_widths_for_chosen_linears(tmp_path):
    recipe = tiny(W4)
    passes = [
        replace(item, bits={"layers.1.mlp.down_proj": 8}) if item.name == "quantize_weights" else item
        for item in recipe.passes
    ]
    build(recipe.model_copy(update={"passes": tuple(passes)}), tmp_path / "mixed")
    config = json.loads((tmp_path / "mixed" / "decode" / "config.json").read_text())["quantization"]
    assert config["bits"] == 4 and config["model.layers.1.mlp.down_proj"]["bits"] == 8
    assert verify_build(tmp_path / "mixed")["verdict"] == "pass"


def with_quantizer(recipe: Recipe, **options) -> Recipe:
    *others, quantizer = recipe.passes
    return recipe.model_copy(update={"passes": (*others, replace(quantizer, **options))})


def test_bits_under_a_budget(tmp_path):
    recipe = with_quantizer(tiny(*LUT, *CALIBRATED), budget={"bits_per_weight": 6.2})
    assert build(recipe, tmp_path / "mixed").verdict == "pass"
    manifest = json.loads((tmp_path / "mixed" / "manifest.json").read_text())
    used = manifest["quantization"]["bits_per_weight"]
    assert 5.5 < used <= 6.2
    note = next(note for note in manifest["source"]["notes"] if "budget bits_per_weight 6.2" in note)
    assert f"{used:.2f}"[:3] in note
    with pytest.raises(InputError, match="no choice of .* bits meets bits_per_weight 4"):
        build(with_quantizer(tiny(*LUT, *CALIBRATED), budget={"bits_per_weight": 4}), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_tables_that_are_wrong_fail_the_build(tmp_path, monkeypatch):
    """A palettized package whose output has next to nothing to do with the model's is not delivered as one."""

    def wrong(weight, importance, bits, rows, name):
        grid = table_grid(weight, importance, bits, rows, name)
        return replace(grid, tables=grid.tables * 0.2)

    monkeypatch.setattr("passes.quantize_weights.table_grid", wrong)
    result = build(tiny(*LUT), tmp_path / "wrong")
    assert result.verdict == "fail" and "quantize_weights" in result.summary


def test_a_tampered_package_fails_verification(tmp_path):
    build(tiny(), tmp_path / "out")
    weights = tmp_path / "out/prefill.mlpackage/Data/com.apple.CoreML/weights/weight.bin"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2 :] = os.urandom(len(content) - len(content) // 2)
    weights.write_bytes(content)
    try:
        assert verify_build(tmp_path / "out", executor="mil")["verdict"] == "fail"
    except InputError as error:
        assert "weight.bin" in str(error)


def test_a_failed_gate_keeps_the_files_and_says_where(tmp_path):
    recipe = tiny("gates.fp16_db=90")
    result = build(recipe, tmp_path / "out")
    assert result.verdict == "fail"
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["verdict"] == "fail"
    assert "failed: prefill_128, mil fp16: k worst layer" in result.summary
    assert "lowest in layer" in result.summary


def test_the_norm_matters_in_fp16(tmp_path):
    """A residual stream above 256 overflows a squared norm; the row-maximum norm survives it."""
    for name, passes in (("safe", ("safe_rms_norm",)), ("plain", ())):
        path = loud_checkpoint(tmp_path / f"{name}-source", LOUD_EMBEDDING, "kv", passes)
        result = build(load_recipe(str(path)), tmp_path / name)
        assert result.verdict == ("pass" if passes else "fail")
    assert max(map(len, result.summary.splitlines())) <= 80
    said = " ".join(result.summary.split())
    assert "mul layers_0_input_layernorm_mul of block layers.0, made by family, overflows fp16" in said
    assert "use the pass safe_rms_norm" in said


def fp16_values(build_folder: Path) -> dict[str, float]:
    report = json.loads((build_folder / "report/report.json").read_text())
    return {c["name"]: float(c["value"]) for c in report["checks"] if "mil fp16" in c["name"]}


def test_a_residual_stream_beyond_fp16_is_scaled(tmp_path):
    """The stream peaks near 200,000: fp16 holds it only scaled, and `auto` finds the factor."""
    safe = {"safe_rms_norm": {"method": "auto"}}
    scale = {"scale_residual": {"factor": "auto"}}
    plain = loud_checkpoint(tmp_path / "plain", LOUD_LAYER, "logits", (safe,))
    scaled = loud_checkpoint(tmp_path / "scaled", LOUD_LAYER, "logits", (safe, scale))
    failed = build(load_recipe(str(plain)), tmp_path / "a")
    assert failed.verdict == "fail"
    assert "scale_residual" in failed.summary
    result = build(load_recipe(str(scaled)), tmp_path / "b")
    assert result.verdict == "pass", result.summary
    assert min(fp16_values(tmp_path / "b").values()) >= 40
    notes = json.loads((tmp_path / "b" / "manifest.json").read_text())["source"]["notes"]
    assert any("scaled by 1/" in note for note in notes) and any("row_max" in note for note in notes)


def test_passes_that_fold_change_nothing(tmp_path):
    path = loud_checkpoint(
        tmp_path / "fold",
        {},
        "logits",
        (
            "fold_attention_scale",
            {"safe_rms_norm": {"method": "auto"}},
            {"scale_residual": {"factor": 0.125}},
        ),
    )
    data = json.loads(path.read_text())
    data["passes"].insert(1, "fold_norm_gain")
    path.write_text(json.dumps(data))
    result = build(load_recipe(str(path)), tmp_path / "out")
    assert result.verdict == "pass", result.summary
    steps = json.loads((tmp_path / "out/report/report.json").read_text())["steps"]
    names = {step["step"] for step in steps}
    assert {"fold_norm_gain", "fold_attention_scale", "scale_residual"} <= names
    assert "safe_rms_norm" not in names, "auto adds a norm that the ranges do not need"


@pytest.mark.parametrize("moment", [0.5, 2.0, 3.5])
def test_a_killed_build_never_looks_finished(tmp_path, moment):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "pdconvert", "build", "tiny", "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(moment)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == 0 or not out.exists()
    assert subprocess.run(command, capture_output=True, check=False).returncode in (0, 2)
    assert json.loads((out / "manifest.json").read_text())["verdict"] == "pass"


def test_paths_with_spaces_and_other_letters(tmp_path):
    out = tmp_path / "a b" / "ñ 模型" / "~x"
    assert build(tiny(), out).verdict == "pass"
    assert verify_build(out, executor="mil")["verdict"] == "pass"


def test_the_verdict_is_strict():
    assert verdict([]) == "fail"
    assert verdict([Check("a", "sqnr_db", float("nan"), None)]) == "fail"
    assert verdict([Check("a", "kld_nats", 0.2, 0.1, ceiling=True)]) == "fail"
    assert verdict([Check("a", "sqnr_db", float("inf"), 60.0)]) == "pass"


@pytest.mark.parametrize(
    ("functions", "split"),
    [
        ([{"tokens": 32}], 32),
        ([{"tokens": 32}, {"tokens": 32, "past": 32}], 64),
        ([{"tokens": 32}, {"tokens": 16, "past": 32}], 48),
        ([{"tokens": 32}, {"tokens": 16, "past": 16}], 32),
        ([{"tokens": 32}, {"tokens": 1, "past": 64}], 32),
    ],
)
def test_what_is_measured_on_is_no_longer_than_the_functions_reach(functions, split):
    data = load_recipe("tiny").resolved()
    data["prefill"] |= {"functions": functions, "outputs": "logits"}
    recipe = recipe_from_data(data, where="test", folder=Path())
    assert make_texts(make_plan(recipe, open_source(recipe.source)), None).split == split
