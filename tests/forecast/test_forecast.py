"""`plan` against what builds really write and compute."""

import json
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

import pdconvert
from pdconvert.cli import main
from pdconvert.errors import InputError
from pdconvert.executors.mil.package import Package
from pdconvert.executors.mil.view import view_package
from pdconvert.forecast.chips import CHIPS, chosen_chips
from pdconvert.forecast.roofline import _prompt, call_s
from pdconvert.forecast.sizes import BLOB_ALIGNMENT
from pdconvert.forecast.work import DecodeWork
from pdconvert.inspect_cost import estimate
from pdconvert.recipe import load_recipe, recipe_from_data
from pdconvert.runtime.chunks import reach

LONG = [{"tokens": 16}, {"tokens": 16, "past": 48}, {"tokens": 1, "past": 48}]

VARIANTS = {
    "w8": ({}, {}),
    "logits": ({"functions": LONG, "outputs": "logits", "embedding": "graph"}, {"scheme": "none"}),
    "all-rows": (
        {"functions": [{"tokens": 16}], "outputs": "logits", "logits": "all", "target": "iOS17"},
        {},
    ),
    "parts": (
        {"functions": LONG[:2], "split_model": {"parts": 2}, "kv": {"rope": "raw", "storage": "io"}},
        {},
    ),
    "w4": ({}, {"scheme": "w4a16"}),
    "rotated": ({"outputs": "logits", "embedding": "graph"}, {}),
    "tables": ({}, {"scheme": "w6a16", "form": "lut"}),
    "zero-points": ({}, {"scheme": "w4a16", "symmetric": False}),
    "zero-points-iOS16": ({"target": "iOS16"}, {"symmetric": False}),
    "lpbq": (
        {},
        {"scheme": "w4a16", "form": "lpbq", "granularity": "per_group", "group_size": 32, "force": True},
    ),
    "own-grid": ({"kv": {"rope": "rotated", "storage": "state"}, "functions": LONG[:2]}, {"scheme": "w4a16"}),
}


def variant(name: str, folder: Path):
    """The tiny recipe with another `prefill` section and options of quantize_weights."""
    prefill, quantize = VARIANTS[name]
    data = load_recipe("tiny").resolved()
    options = {"scheme": "w8a16", "granularity": "per_channel", **quantize}
    if options.get("form") == "lut":
        options["granularity"] = "per_grouped_channel"
    data["passes"] = [
        *(item for item in data["passes"] if "quantize_weights" not in item),
        {"quantize_weights": options},
    ]
    data["prefill"] |= prefill
    if name == "own-grid":
        data["decode"] |= {"grid": "own", "bits": 4, "group_size": 32}
    data["source"]["random"]["config"]["tie_word_embeddings"] = name in ("logits", "rotated")
    if name == "rotated":
        data["passes"].insert(4, "rotate_residual")
    if name == "logits":
        data["passes"].insert(4, {"scale_residual": {"factor": 0.5}})
    return recipe_from_data(data, where="test", folder=folder)


@pytest.fixture(scope="module", params=list(VARIANTS))
def case(request, tmp_path_factory):
    """A build and the forecast of its recipe."""
    folder = tmp_path_factory.mktemp(request.param)
    recipe = variant(request.param, folder)
    pdconvert.build(recipe, folder / "build", use_cache=False)
    return folder / "build", pdconvert.plan(recipe)


def size_bytes(folder: Path, *patterns: str) -> int:
    return sum(path.stat().st_size for pattern in patterns for path in folder.glob(pattern) if path.is_file())


def test_package_size(case):
    build, found = case
    weights = size_bytes(build, "prefill*/**/weight.bin")
    total = size_bytes(build, "prefill*/**/*")
    # The end of a file is not aligned.
    assert 0 <= found.sizes.package_weights - weights < BLOB_ALIGNMENT * len(found.parts)
    assert abs(found.sizes.package / total - 1) < 0.02
    assert len(found.parts) == len(list(build.glob("**/*.mlpackage")))


def test_decode_size(case):
    build, found = case
    assert found.sizes.decode_weights == size_bytes(build, "decode/model*.safetensors*")
    assert abs(found.sizes.decode / size_bytes(build, "decode/**/*") - 1) < 0.02


def test_bits_and_cache(case):
    build, found = case
    manifest = json.loads((build / "manifest.json").read_text())
    assert found.sizes.bits_per_weight == pytest.approx(manifest["quantization"]["bits_per_weight"], abs=1e-4)
    kv = manifest["kv"]
    assert found.decode.kv_bytes == 2 * 2 * kv["layers"] * kv["kv_heads"] * kv["head_dim"]


def test_work_is_what_the_program_computes(case):
    build, found = case
    flops = Counter()
    for path in build.glob("**/*.mlpackage"):
        for function in view_package(Package.open(path)).functions:
            flops[function.name] += estimate(function).flops
    names = [work.name for work in found.functions]
    assert len(flops) == len(names)
    assert [work.flops for work in found.functions] == [
        flops[name] if name in flops else flops["main"] for name in names
    ]


def test_json_is_plain_and_names_its_sources(case):
    _, found = case
    content = json.loads(json.dumps(found.to_json()))
    assert content["package"]["size_bytes"] == found.sizes.package
    assert content["build"]["peak_bytes"] > 10**8
    chip = content["predictions"]["chips"][0]
    assert chip["chip"] == "m1"
    assert all(figure["source"] for figure in chip["figures"].values())
    assert "predictions" in content["predictions"]["note"]


def test_a_config_alone_is_enough(tmp_path):
    config = load_recipe("tiny").source.random.config
    (tmp_path / "config.json").write_text(json.dumps(config))
    alone, whole = pdconvert.plan("tiny", source=str(tmp_path)), pdconvert.plan("tiny")
    assert alone.sizes.package == whole.sizes.package
    assert alone.sizes.decode_files is None
    assert any("tokenizer" in note for note in alone.notes)


def test_auto_counts_as_needed(tmp_path):
    data = load_recipe("tiny").resolved()
    data["passes"][2] = {"safe_rms_norm": {"method": "auto"}}
    found = pdconvert.plan(recipe_from_data(data, where="test", folder=tmp_path))
    assert found.notes == ("safe_rms_norm: auto is decided by the build; counted as if it were needed",)
    assert found.sizes == pdconvert.plan("tiny").sizes


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_pays_from_is_the_first_length_that_is_no_slower_to_the_end(case, chip):
    _, found = case
    (prediction,) = (item for item in found.chips if item.chip is chip)
    wins = []
    for length in range(1, reach(found.functions) + 1):
        times = _prompt(chip, found.functions, found.decode, length)
        wins.append(times["ane_s"] + times["handoff_s"] <= times["gpu_s"])
    expected = next((i + 1 for i in range(len(wins)) if all(wins[i:])), None)
    assert prediction.pays_from == expected


def test_no_call_is_faster_than_either_bound(case):
    _, found = case
    for chip in CHIPS:
        for work in found.functions:
            seconds = call_s(chip, work)
            assert seconds > work.flops / (chip.ane.value * 1e12)
            assert seconds > (work.weight_bytes + work.io_bytes) / (chip.ane_memory.value * 1e9)


def test_an_unknown_chip_is_refused():
    assert [chip.name for chip in chosen_chips(["M4-Max"])] == ["m4-max"]
    with pytest.raises(InputError, match=r"no chip 'm4max'; did you mean m4-max\? \(known: m1, "):
        chosen_chips(["m4max"])


def test_m1_reads_expanded_weights(case):
    _, found = case
    m1, m4 = (next(chip for chip in CHIPS if chip.name == name) for name in ("m1", "m4"))
    assert m1.expands_int8 and not m4.expands_int8


def test_the_command(tmp_path):
    result = CliRunner().invoke(main, ["plan", "tiny", "--chip", "m1", "--chip", "M4"])
    assert result.exit_code == 0, result.output
    assert "tiny: llama, 2 layers" in result.stdout
    assert "predictions from published figures, the best case; nothing was measured:" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    rows = [line.split()[0] for line in result.stdout.splitlines() if line.startswith("m")]
    assert rows == ["m1", "m4"]
    as_json = CliRunner().invoke(
        main, ["plan", "tiny", "--set", "passes.quantize_weights.scheme=none", "--json"]
    )
    assert json.loads(as_json.stdout)["bits_per_weight"] == 16
    refused = CliRunner().invoke(main, ["plan", "tiny", "--chip", "m9"])
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: no chip 'm9'")


def test_what_is_not_counted_is_said(tmp_path):
    data = load_recipe("tiny").resolved()
    data["passes"][-1] = {
        "quantize_weights": {"scheme": "w4a16", "rounding": "gptq", "budget": {"bits_per_weight": 5.0}}
    }
    found = pdconvert.plan(recipe_from_data(data, where="test", folder=tmp_path))
    assert [note.split(":")[1][:12] for note in found.notes] == [" memory and ", " the budget "]


def test_window_layers_keep_their_window():
    work = DecodeWork(0, 0, 0, ((10, None), (10, 4)))
    assert (work.kv_bytes, work.cache_bytes(3), work.cache_bytes(100)) == (20, 60, 1040)
