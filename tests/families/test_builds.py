"""Whole builds of every family's tiny model, in both key forms, and what the two halves then compute."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from safetensors.numpy import load_file

from pdconvert import families
from pdconvert.pipeline import build
from pdconvert.program import worst_db
from pdconvert.recipe import load_recipe
from pdconvert.runtime.manifest import read_manifest
from pdconvert.runtime.weights import DecodeWeights
from pdconvert.verify import open_prefill

PROMPT = [(7 * i + 3) % 256 for i in range(41)]
"""Longer than one call of 16 tokens: past keys, raw or rotated, come into play."""

TOKENS = 12


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDCONVERT_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(params=families.names())
def family(request: pytest.FixtureRequest) -> ModuleType:
    return families.get({"model_type": request.param})


def recipe_file(folder: Path, family: ModuleType, scheme: str, rope: str, outputs: str) -> Path:
    """A recipe of all passes on the family's tiny config with seeded random weights."""
    content = {
        "version": 1,
        "name": f"tiny-{family.TINY['model_type']}",
        "source": {"random": {"seed": 3, "config": family.TINY}},
        "prefill": {
            "target": "iOS18",
            "outputs": outputs,
            "embedding": "host",
            "kv": {"rope": rope, "storage": "io"},
            "functions": [{"tokens": 16}, {"tokens": 16, "past": 48}],
        },
        "passes": [
            "linear_to_conv2d",
            "eager_gqa_attention",
            {"safe_rms_norm": {"method": "row_max"}},
            "rope_as_input",
            *(["fold_norm_gain"] if rope == "raw" else []),
            {"quantize_weights": {"scheme": scheme, "granularity": "per_channel"}},
            *(["fold_attention_scale", {"scale_residual": {"factor": 0.25}}] if rope == "raw" else []),
        ],
        "decode": {"grid": "shared"},
        "gates": {},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def shipped_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """What a decode folder holds, de-quantized, by name."""
    weights = DecodeWeights(folder)
    tensors = {}
    for path in folder.glob("model*.safetensors"):
        for name, value in load_file(path).items():
            module, _, kind = name.rpartition(".")
            if kind == "weight" and module in weights.grids:
                tensors[name] = torch.from_numpy(weights.rows(module, range(len(value))))
            elif kind in ("weight", "bias"):
                tensors[name] = torch.from_numpy(value).float()
    return tensors


def greedy(model: Any, prompt: list[int], tokens: int) -> tuple[list[int], torch.Tensor]:
    """A prompt's greedy continuation by Hugging Face, and its logits (prompt + tokens − 1, V)."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(tokens):
            logits = model(torch.tensor([ids])).logits[0]
            ids.append(int(logits[-1].argmax()))
    return ids[len(prompt) :], logits


@pytest.mark.parametrize(
    ("scheme", "rope", "outputs"),
    [("w8a16", "rotated", "kv"), ("none", "raw", "kv"), ("w8a16", "raw", "logits")],
)
def test_a_build_passes_and_its_pair_says_what_hugging_face_says(
    family: ModuleType, scheme: str, rope: str, outputs: str, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    from pdconvert.executors.mlx import DecodeModel

    recipe = load_recipe(str(recipe_file(tmp_path, family, scheme, rope, outputs)))
    result = build(recipe, tmp_path / "out")
    assert result.verdict == "pass", result.summary

    shipped = read_manifest(tmp_path / "out")
    tensors = shipped_tensors(shipped.decode)
    model = AutoModelForCausalLM.from_config(family.hf_config(family.TINY)).eval()
    model.load_state_dict(tensors, strict=not family.TINY["tie_word_embeddings"])
    wanted, expected = greedy(model, PROMPT, TOKENS)

    decode = DecodeModel.load(shipped.decode, products="dequantized")
    fed = [*PROMPT, *wanted[:-1]]
    got = torch.from_numpy(decode.logits(fed, decode.new_cache()))
    assert worst_db({"logits": expected}, {"logits": got}) >= 50

    cache, seen = decode.new_cache(), len(PROMPT) - 1
    decode.take_up(fed[:seen], cache)
    rest = torch.from_numpy(decode.logits(fed[seen:], cache))
    assert worst_db({"logits": expected[seen:]}, {"logits": rest}) >= 50

    cache = decode.new_cache(open_prefill(shipped, "mil", "fp16").run(PROMPT))
    pair = torch.from_numpy(decode.logits([PROMPT[-1], *wanted[:-1]], cache))
    tail = expected[len(PROMPT) - 1 :]
    assert worst_db({"logits": tail}, {"logits": pair}) >= 40
    best = tail.topk(2).values
    clear = best[:, 0] - best[:, 1] > 0.02 * tail.std()
    assert clear.sum() >= TOKENS // 2
    assert torch.equal(pair.argmax(-1)[clear], torch.tensor(wanted)[clear])
