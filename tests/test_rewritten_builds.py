"""Whole builds whose weights were rewritten in both halves before rounding: rotated, scaled by activations."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import one_thread, random_source, reference_of
from safetensors.numpy import load_file
from safetensors.torch import save_file

from passes import FoldNormGain, LinearToConv2d, QuantizeWeights, RotateResidual, ScaleChannels
from pdconvert.basis import Basis, into
from pdconvert.calibrate import Flow, random_sequences
from pdconvert.errors import InputError
from pdconvert.families import gemma3_text, llama
from pdconvert.forms import plain_layer
from pdconvert.measure import sqnr_db
from pdconvert.pipeline import build
from pdconvert.prepare import make_forms, make_plan
from pdconvert.quant.calibration import grams, reference_inputs
from pdconvert.ranges import measure_ranges
from pdconvert.recipe import Recipe, load_recipe, recipe_from_data
from pdconvert.reference import Reference
from pdconvert.runtime.run import run_build
from pdconvert.sensitivity import measure_linears
from pdconvert.sources import open_source
from pdconvert.verify import verify_build

__all__ = ["one_thread"]

W8, W4 = {"scheme": "w8a16"}, {"scheme": "w4a16"}
GPTQ = {**W4, "rounding": "gptq"}
TIED = {"tie_word_embeddings": True}
TEXT = {"tokens": 6 * 48, "length": 48}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDCONVERT_CACHE", str(tmp_path_factory.mktemp("cache")))


def recipe(
    passes: list[Any], config: dict[str, Any] | None = None, family: Any = llama, **sections: dict[str, Any]
) -> Recipe:
    """The tiny recipe with passes in front of the quantizer."""
    data = load_recipe("tiny").resolved()
    data["passes"] = [*data["passes"][:-1], *passes]
    data["source"] = {"random": {"seed": 0, "config": {**family.TINY, **(config or {})}}}
    data["prefill"] |= {"functions": [{"tokens": 32}, {"tokens": 1, "past": 64}], "outputs": "logits"}
    data["prefill"] |= sections.pop("prefill", {})
    data["calibration"] = TEXT
    del data["gates"], data["decode"]
    return recipe_from_data({**data, **sections}, where="test", folder=Path())


def built(folder: Path, *args: Any, **sections: Any) -> dict[str, Any]:
    """The report of a build that passes; a build runs both of its halves."""
    result = build(recipe(*args, **sections), folder)
    assert result.verdict == "pass", result.summary
    return json.loads((folder / "report" / "report.json").read_text())


def mlx_db(folder: Path, one: Recipe) -> float:
    """SQNR of MLX's logits against the checkpoint's."""
    from pdconvert.executors.mlx import DecodeModel

    plan = make_plan(one, open_source(one.source))
    reference = Reference(plan.source, plan.family, plan.spec)
    ids = [7 * i % 320 for i in range(40)]
    hidden = reference.embed(ids)[None]
    for index in range(len(plan.spec.layers)):
        hidden, _ = reference.run(reference.layer(index), hidden)
    wanted = reference.logits(hidden[0], reference.head_tensors())
    decode = DecodeModel.load(folder / "decode", products="dequantized")
    return sqnr_db(wanted, torch.from_numpy(decode.logits(ids, decode.new_cache())))


@pytest.mark.parametrize(
    ("embedding", "quantizer", "least_db"), [("host", {"scheme": "none"}, 50.0), ("graph", W8, 28.0)]
)
def test_a_rotated_pair_is_untied_and_agrees(
    embedding: str, quantizer: dict[str, Any], least_db: float, tmp_path: Path
) -> None:
    args = ([{"rotate_residual": {"seed": 4}}, {"quantize_weights": quantizer}], TIED)
    built(tmp_path / "out", *args, prefill={"embedding": embedding})
    assert verify_build(tmp_path / "out")["verdict"] == "pass"
    config = json.loads((tmp_path / "out/decode/config.json").read_text())
    assert config["tie_word_embeddings"] is False
    tensors = load_file(tmp_path / "out/decode/model.safetensors")
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= tensors.keys()
    assert mlx_db(tmp_path / "out", recipe(*args)) >= least_db
    whole = [
        run_build(tmp_path / "out", "abc", max_tokens=6, decode=half).token_ids for half in ("mlx", "package")
    ]
    assert whole[0] == whole[1]


@pytest.mark.parametrize(
    ("passes", "sections"),
    [
        (["rotate_residual", {"quantize_weights": {**GPTQ, "form": "lut"}}], {"decode": {"grid": "own"}}),
        (["rotate_residual", "scale_channels", {"quantize_weights": {**GPTQ, "learning_steps": 5}}], {}),
        (
            [
                "fold_norm_gain",
                "scale_channels",
                {"quantize_weights": W4},
                {"scale_residual": {"factor": 0.25}},
            ],
            {},
        ),
        (["rotate_residual", {"quantize_weights": {**GPTQ, "budget": {"bits_per_weight": 6.0}}}], {}),
        (["rotate_residual", {"quantize_weights": GPTQ}], {}),
    ],
    ids=["tables", "learned", "scaled", "budget", "gptq"],
)
def test_any_order_and_subset_builds(passes: list[Any], sections: dict[str, Any], tmp_path: Path) -> None:
    report = built(tmp_path / "out", passes, TIED, **sections)
    exact = [step for step in report["steps"] if step["step"] in ("rotate_residual", "scale_channels")]
    assert exact and all(float(step["previous_db"]) > 100 for step in exact)
    assert all(row["isolated_db"] > 10 and row["cumulative_db"] > 8 for row in report["projections"])
    assert mlx_db(tmp_path / "out", recipe(passes, TIED, **sections)) > 10


def loud_channels(folder: Path) -> dict[str, Any]:
    """The tiny model with loud channels behind norms and behind up_proj, as a source."""
    source = open_source(load_recipe("tiny").source)
    tensors = {name: source.read(name).clone() for name in source.tensors()}
    for name, value in tensors.items():
        if name.endswith("layernorm.weight"):
            value[::16] *= 8
        if name.endswith("up_proj.weight"):
            value[::24] *= 8
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(source.config))
    source.write_tokenizer(folder)
    return {"path": str(folder)}


def test_scaling_lowers_the_error_weighted_by_activations(tmp_path: Path) -> None:
    """`isolated_db` is that of a stored weight on the input that the checkpoint gives it."""
    source = loud_channels(tmp_path / "source")
    gates = {
        "kld": 9.0,
        "top1": 0.0,
        "kv_db": 8.0,
        "reason": "random weights have no meaningful distribution",
    }
    found: dict[str, dict[tuple[str, str], float]] = {}
    for name, extra in (("without", []), ("with", ["scale_channels"])):
        passes = [*extra, {"quantize_weights": W4}]
        report = built(tmp_path / name, passes, source=source, gates=gates, probe={"eval_windows": 1})
        found[name] = {(row["block"], row["name"]): row["isolated_db"] for row in report["projections"]}
    gains = {key: found["with"][key] - db for key, db in found["without"].items()}
    assert all(gain > 1 for (_, name), gain in gains.items() if name in ("q_proj", "gate_proj", "down_proj"))
    assert all(abs(gain) < 1e-3 for (_, name), gain in gains.items() if name == "o_proj")


def test_learning_leaves_gains_that_linears_hold(tmp_path: Path) -> None:
    learning = {**GPTQ, "learning_steps": 12, "learning_rate": 5e-3}
    built(tmp_path / "out", ["fold_norm_gain", {"quantize_weights": learning}])
    gain = load_file(tmp_path / "out/decode/model.safetensors")["model.layers.0.input_layernorm.weight"]
    assert bool((gain == 1).all())


@pytest.mark.parametrize(
    ("passes", "folded"),
    [
        (["fold_norm_gain"], True),
        (["rotate_residual"], False),
        (["rotate_residual", "fold_norm_gain"], True),
        (["fold_norm_gain", "scale_channels"], False),
    ],
)
def test_the_graph_says_which_gains_it_leaves_out(passes: list[Any], folded: bool) -> None:
    one = recipe([*passes, {"quantize_weights": W4}])
    found = make_forms(make_plan(one, open_source(one.source))).folded_gains()
    assert found == ({"input_layernorm.weight", "post_attention_layernorm.weight"} if folded else set())


REFUSED: dict[str, tuple[list[Any], Any, dict[str, Any], str]] = {
    "norms behind": (
        ["rotate_residual"],
        gemma3_text,
        {},
        "rotate_residual: the model has norms behind attention …",
    ),
    "source grid": (
        ["rotate_residual", {"quantize_weights": W8}],
        llama,
        {"decode": {"grid": "source"}},
        "recipe: decode.grid source keeps the checkpoint's codes, which rotate_residual changes; …",
    ),
    "nothing is rounded": (
        ["scale_channels", {"quantize_weights": {"scheme": "none"}}],
        llama,
        {},
        "recipe: scale_channels scales weights for their rounding; list quantize_weights after it, with a scheme",
    ),
    "folded away": (
        ["scale_channels", "fold_norm_gain", {"quantize_weights": W4}],
        llama,
        {},
        "recipe: fold_norm_gain would fold the gains of scale_channels away again; list it before scale_channels",
    ),
    "turned away": (
        ["scale_channels", "rotate_residual", {"quantize_weights": W4}],
        llama,
        {},
        "recipe: rotate_residual would fold the gains of scale_channels away again; list it before scale_channels",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_before_anything_is_read(case: str) -> None:
    passes, family, sections, said = REFUSED[case]
    one = recipe(passes, None, family, **sections)
    with pytest.raises(InputError) as error:
        make_plan(one, open_source(one.source))
    assert str(error.value).startswith(said.removesuffix("…"))


def test_a_scale_after_the_quantizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="^scale_channels must come before quantize_weights; move it up"):
        build(recipe([{"quantize_weights": W4}, "scale_channels"]), tmp_path / "out")


@pytest.fixture
def reference() -> Reference:
    with torch.no_grad():
        return reference_of(random_source(llama.TINY))


def rotated(reference: Reference, index: int) -> dict[str, torch.Tensor]:
    block = plain_layer(reference.spec, index, reference.read_layer(index), raw_keys=False)
    return {name: value.detach() for name, value in RotateResidual().run(block).module.named_parameters()}


def test_both_calibration_streams_lie_in_one_basis(reference: Reference) -> None:
    """Nothing is rounded, so the stored stream is the reference's, and X̂ᵀX is X̂ᵀX̂."""
    basis, ids = (
        Basis(reference.spec.hidden_size, 0),
        random_sequences(reference.spec.vocab_size, [24] * 5, 0),
    )
    table = into(reference.source.read("model.embed_tokens.weight"), basis)
    found = Flow(reference, ids, lambda: table, basis=basis).before(
        1, lambda index: dict(rotated(reference, index))
    )
    assert torch.allclose(found.stored[0], found.reference[0], atol=1e-4)
    block = plain_layer(reference.spec, 1, reference.read_layer(1), raw_keys=False)
    block = RotateResidual().run(LinearToConv2d().run(block))
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        sums = grams(block, found, name, reference_inputs(block, found, [name])[name])
        assert torch.allclose(sums.cross, sums.own, rtol=1e-3, atol=1e-3)


def test_sensitivity_is_that_of_the_rotated_weights(reference: Reference) -> None:
    ids = random_sequences(reference.spec.vocab_size, [32] * 4, 0)
    basis = Basis(reference.spec.hidden_size, 0)
    quantizer = QuantizeWeights(**GPTQ)
    passes = (LinearToConv2d(), RotateResidual(), FoldNormGain(), ScaleChannels())
    plain = measure_linears(reference, ids, quantizer)
    turned = measure_linears(reference, ids, quantizer, passes, basis)
    assert plain.keys() == turned.keys()
    for name, one in plain.items():
        assert 0 < turned[name].damage < 4 * one.damage, name


def test_ranges_of_a_rotated_stream_are_measured_in_its_basis(reference: Reference) -> None:
    reference.source.values["model.embed_tokens.weight"][:, 5] = 300.0  # type: ignore[attr-defined]
    readers, ids = ("input_layernorm", "post_attention_layernorm"), [[1, 2, 3], [9, 8, 7, 6]]
    plain = measure_ranges(reference, ids, readers)
    turned = measure_ranges(reference, ids, readers, Basis(reference.spec.hidden_size, 0))
    assert plain.residual_peak > 290 and turned.residual_peak < 100
    assert plain.peaks["layers.0"]["mlp"] == turned.peaks["layers.0"]["mlp"]
