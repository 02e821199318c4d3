"""Weights that a form does not fit: said in plan, manifest, summary and page, with what they got and what it costs."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import pdconvert
from pdconvert.cli import main
from pdconvert.errors import InputError
from pdconvert.prepare import Plan, make_plan
from pdconvert.recipe import Recipe, load_recipe, recipe_from_data
from pdconvert.replaced import fp16_notes, named, size_notes
from pdconvert.sources import open_source

GROUPS = {"granularity": "per_group", "force": True}


def recipe_of(
    folder: Path, quantize: dict[str, Any], decode: dict[str, Any] | None = None, **config: Any
) -> Recipe:
    """The tiny recipe with another quantizer and another config: 64 channels, 128 in the MLP."""
    data = load_recipe("tiny").resolved()
    data["passes"] = [item for item in data["passes"] if "quantize_weights" not in item]
    data["passes"].append({"quantize_weights": quantize})
    data["source"]["random"]["config"] |= config
    data["decode"] = decode or {"grid": "shared"}
    return recipe_from_data(data, where="test", folder=folder)


def plan_of(recipe: Recipe) -> Plan:
    return make_plan(recipe, open_source(recipe.source))


INPUTS = "layers.*.self_attn.q_proj, layers.*.self_attn.k_proj, layers.*.self_attn.v_proj"
MLP = "layers.*.mlp.gate_proj, layers.*.mlp.up_proj"

NOTES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "all sizes divide": ({"scheme": "w4a16", "group_size": 32, **GROUPS}, {}, []),
    "no groups": ({"scheme": "w4a16", "symmetric": False}, {"intermediate_size": 72}, []),
    "one table": ({"scheme": "w4a16", "form": "lut", "granularity": "per_tensor"}, {}, []),
    "half a group": (
        {"scheme": "w8a16", "group_size": 128, **GROUPS},
        {},
        [
            f"quantize_weights: {INPUTS}, layers.*.self_attn.o_proj, {MLP} (12 weights): groups of 128 do not divide "
            "64 input channels; groups of 64, 8.25 bits per weight"
        ],
    ),
    "the default size": (
        {"scheme": "w4a16", **GROUPS},
        {"intermediate_size": 96},
        [
            "quantize_weights: layers.*.mlp.down_proj (2 weights): groups of 64 do not divide 96 input channels; "
            "groups of 32, 4.50 bits per weight"
        ],
    ),
    "a whole row": (
        {"scheme": "w4a16", "symmetric": False, **GROUPS},
        {"intermediate_size": 48},
        [
            "quantize_weights: layers.*.mlp.down_proj (2 weights): groups of 64 do not divide 48 input channels; one "
            "scale per output channel, 4.42 bits per weight"
        ],
    ),
    "lpbq, a whole row": (
        {"scheme": "w4a16", "form": "lpbq", "force": True},
        {"intermediate_size": 48},
        [
            "quantize_weights: layers.*.mlp.down_proj (2 weights): groups of 64 do not divide 48 input channels; one "
            "scale per output channel, 4.33 bits per weight"
        ],
    ),
    "tables": (
        {"scheme": "w6a16", "form": "lut"},
        {"intermediate_size": 72},
        [
            f"quantize_weights: {MLP} (4 weights): groups of 16 do not divide 72 output channels; tables of 8, 8.00 "
            "bits per weight"
        ],
    ),
    "one layer has other bits": (
        {"scheme": "w4a16", "form": "lut", "bits": {"layers.1.mlp.up_proj": 6}},
        {"intermediate_size": 72},
        [
            "quantize_weights: layers.1.mlp.up_proj (1 weight): groups of 16 do not divide 72 output channels; tables "
            "of 8, 8.00 bits per weight"
        ],
    ),
}


@pytest.mark.parametrize(("quantize", "config", "expected"), NOTES.values(), ids=NOTES)
def test_replaced_sizes_are_named(
    quantize: dict[str, Any], config: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    assert list(size_notes(plan_of(recipe_of(tmp_path, quantize, **config)))) == expected


def test_the_grid_of_the_mlx_half_is_named_too(tmp_path: Path) -> None:
    decode = {"grid": "own", "bits": 4, "group_size": 128}
    recipe = recipe_of(tmp_path, {"scheme": "w4a16", "form": "lut"}, decode)
    (note,) = size_notes(plan_of(recipe))
    assert note.startswith("decode.grid own: ") and note.endswith("groups of 64, 4.25 bits per weight")


def test_weights_that_mlx_has_no_form_for_are_named_by_reason() -> None:
    layers = [f"model.layers.{index}.mlp.down_proj.weight" for index in range(3)]
    reasons = dict.fromkeys(layers, "MLX has no tables") | {"lm_head.weight": "its size"}
    assert fp16_notes(reasons) == (
        "decode: model.layers.*.mlp.down_proj (3 weights): MLX has no tables; fp16, 16 bits per weight",
        "decode: lm_head (1 weight): its size; fp16, 16 bits per weight",
    )
    assert fp16_notes({}) == () and named(["model.layers.7.up.weight"]) == "model.layers.7.up (1 weight)"


def test_a_build_says_it_in_every_place(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, {"scheme": "w8a16", "symmetric": False, **GROUPS}, intermediate_size=48)
    expected = [
        "quantize_weights: layers.*.mlp.down_proj (2 weights): groups of 64 do not divide 48 input channels; one scale "
        "per output channel, 8.50 bits per weight",
        "decode: model.layers.*.mlp.down_proj (2 weights): MLX's groups (128, 64, 32) do not divide 48 input channels; "
        "fp16, 16 bits per weight",
    ]
    assert list(pdconvert.plan(recipe).notes)[-2:] == expected
    result = pdconvert.build(recipe, tmp_path / "out", use_cache=False)
    assert result.verdict == "pass", result.summary
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["source"]["notes"][-2:] == expected
    lines = result.summary.splitlines()
    assert max(map(len, lines)) <= 80
    page = (tmp_path / "out" / "report" / "index.html").read_text()
    for note in expected:
        assert note.replace("'", "&#39;") in page
        assert note in " ".join(" ".join(lines).split())


def test_lpbq_is_refused_for_the_ane_unless_forced(tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        plan_of(recipe_of(tmp_path, {"scheme": "w4a16", "form": "lpbq"}))
    assert str(error.value).startswith(
        "recipe: quantize_weights.form lpbq is not for the package: integer weights in groups are reported silently "
        "wrong on the ANE (coremltools#2510)"
    )


def test_the_command_line_takes_the_new_options(tmp_path: Path) -> None:
    changed = [f"--set=passes.quantize_weights.{option}" for option in ("scheme=w4a16", "symmetric=false")]
    found = CliRunner().invoke(main, ["plan", "tiny", "--json", *changed])
    assert found.exit_code == 0, found.output
    # 4 bits, and 16 + 4 per row of 64 (of 128 in down_proj).
    weights = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)
    rows = 2 * (64 + 32 + 32 + 64 + 128 + 128 + 64)
    assert json.loads(found.output)["bits_per_weight"] == pytest.approx(4 + 20 * rows / weights, abs=1e-4)
