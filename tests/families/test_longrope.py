"""Phi-3's two sets of RoPE factors: the short ones in both halves, in a context that ends where the others begin."""

import json
import random

import pytest
import torch
from checkpoints import mlx_logits, random_source, reference_of
from drawing import measure

from pdconvert.errors import InputError
from pdconvert.families import phi3
from pdconvert.pipeline import build
from pdconvert.prepare import make_plan
from pdconvert.program import worst_db
from pdconvert.recipe import load_recipe, recipe_from_data
from pdconvert.runtime.manifest import read_manifest
from pdconvert.runtime.run import run_build
from pdconvert.sources import open_source

SHORT, LONG = [1.0, 1.1, 1.2, 1.3, 1.5, 2.0], [4.0, 5.0, 6.0, 8.0, 9.0, 12.0]
CONFIG = {
    **phi3.TINY,
    "max_position_embeddings": 256,
    "original_max_position_embeddings": 64,
    "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
}


def test_the_short_factors_hold_in_a_context_of_the_original_length() -> None:
    spec = phi3.read_config(CONFIG)
    assert spec.max_positions == 64
    expected = [1 / (factor * 10000.0 ** (2 * pair / 12)) for pair, factor in enumerate(SHORT)]
    assert spec.rope.inv_freq == pytest.approx(expected)
    assert spec.rope.attention_factor == pytest.approx(
        (1 + torch.log(torch.tensor(4.0)) / 64**0 / 4.15888308) ** 0.5
    )


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
@pytest.mark.parametrize("nested", [True, False])
def test_every_spelling_is_the_same_model(name: str, nested: bool) -> None:
    scaling = {"rope_type": name, "short_factor": SHORT, "long_factor": LONG}
    config = {**CONFIG, "rope_scaling": scaling}
    if nested:
        inside = {
            "original_max_position_embeddings": 64,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
        }
        config |= {
            "rope_parameters": {**scaling, **inside},
            "rope_scaling": None,
            "partial_rotary_factor": None,
        }
    assert phi3.read_config(config) == phi3.read_config(CONFIG)
    decode = phi3.decode_config(config, phi3.read_config(config))
    assert decode == phi3.decode_config(CONFIG, phi3.read_config(CONFIG))


def test_blocks_and_mlx_equal_hugging_face() -> None:
    for seed in range(4):
        found = measure(CONFIG, random.Random(seed).choice)
        assert found.plain_db >= 90 and found.adapted_db >= 60 and found.mlx_db >= 100


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 10, 64])
def test_whole_prompts_equal_hugging_faces_own_model(length: int) -> None:
    from transformers import AutoModelForCausalLM

    source = random_source(CONFIG)
    model = AutoModelForCausalLM.from_config(phi3.hf_config(CONFIG)).eval()
    model.load_state_dict(source.values)
    ids = [7 * i % 256 for i in range(length)]
    expected = model(torch.tensor([ids])).logits[0]
    decode = phi3.decode_config(CONFIG, reference_of(source).spec)
    assert worst_db({"logits": expected}, {"logits": mlx_logits(decode, source.values, ids)}) > 100


def test_a_build_holds_no_more_than_the_original_length(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PDCONVERT_CACHE", str(tmp_path / "cache"))
    data = load_recipe("tiny").resolved()
    data["source"] = {"random": {"seed": 1, "config": CONFIG}}
    data["prefill"]["functions"] = [{"tokens": 16}, {"tokens": 16, "past": 48}]
    recipe = recipe_from_data(data, where="test", folder=tmp_path)
    result = build(recipe, tmp_path / "out")
    assert result.verdict == "pass", result.summary
    assert json.loads((tmp_path / "out/manifest.json").read_text())["max_positions"] == 64
    assert len(read_manifest(tmp_path / "out").rope.inv_freq) == 6
    text = run_build(tmp_path / "out", "abcdefgh" * 7, max_tokens=100)
    assert (text.stop_reason, len(text.token_ids)) == ("context", 64 + 1 - text.prompt_tokens)
    data["prefill"]["functions"] = [{"tokens": 100}]
    recipe = recipe_from_data(data, where="test", folder=tmp_path)
    with pytest.raises(InputError, match=r"prefill_100 reaches position 100, the model ends at 64 \(max_pos"):
        make_plan(recipe, open_source(recipe.source))
