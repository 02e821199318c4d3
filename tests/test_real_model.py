"""SmolLM2-135M-Instruct, whole: what issue after issue promises for a real model."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pdconvert.pipeline import build
from pdconvert.recipe import load_recipe, recipe_from_data
from pdconvert.sources import open_source
from pdconvert.verify import verify_build

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def use_cache(cache, monkeypatch):
    monkeypatch.setenv("PDCONVERT_CACHE", str(cache))


@pytest.fixture(scope="session")
def w8(tmp_path_factory, cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDCONVERT_CACHE", str(cache))
        folder = tmp_path_factory.mktemp("w8") / "smollm2-135m"
        return folder, build(load_recipe("smollm2-135m"), folder)


def checks_of(folder: Path) -> dict[str, dict]:
    return {
        check["name"]: check for check in json.loads((folder / "report/report.json").read_text())["checks"]
    }


def test_w8_passes_its_gates(w8):
    folder, result = w8
    assert result.verdict == "pass", result.summary
    checks = checks_of(folder)
    assert checks["pair: KLD, upper 95 %"]["floor"] == 0.01
    assert checks["pair: top-1"]["floor"] == 0.93
    assert verify_build(folder, executor="mil")["verdict"] == "pass"


def test_w8_answers_paris_on_the_command_line(w8):
    command = [sys.executable, "-m", "pdconvert", "run", str(w8[0]), "--prompt", "The capital of France is"]
    result = subprocess.run(
        [*command, "--max-tokens", "8", "--json"], capture_output=True, check=True, text=True
    )
    answer = json.loads(result.stdout)
    assert "Paris" in answer["text"]
    assert answer["executors"]["prefill"]["executor"] in ("mil", "coreml")


def test_stock_mlx_lm_generates_the_same_text(w8):
    import mlx.core as mx
    from mlx_lm import load, stream_generate

    from pdconvert.runtime.run import run_build

    model, tokenizer = load(str(w8[0] / "decode"))
    model.set_dtype(mx.float32)
    prompt = "The capital of France is"
    stock = list(stream_generate(model, tokenizer, prompt=tokenizer.encode(prompt), max_tokens=12))
    ours = run_build(w8[0], prompt, max_tokens=12)
    assert list(ours.token_ids) == [piece.token for piece in stock]
    assert ours.text.strip() == "".join(piece.text for piece in stock).strip()


def test_the_package_opens_and_holds_only_what_the_engine_takes(w8):
    from pdconvert.executors.mil.proto import model_pb2
    from pdconvert.quiet import quiet_coremltools

    package = w8[0] / "prefill.mlpackage"
    quiet_coremltools().models.MLModel(str(package), skip_model_load=True)
    model = model_pb2().Model() if callable(model_pb2) else model_pb2.Model()
    model.ParseFromString((package / "Data/com.apple.CoreML/model.mlmodel").read_bytes())
    block = next(iter(model.mlProgram.functions["prefill_128"].block_specializations.values()))
    kinds = {operation.type for operation in block.operations}
    assert not kinds & {"linear", "gather", "tile", "scaled_dot_product_attention"}
    fp32 = [
        output.name
        for operation in block.operations
        for output in operation.outputs
        if output.type.tensorType.dataType == 11 and operation.type != "const"
    ]
    assert fp32 == []


@pytest.mark.parametrize("form", ["rotated", "raw"])
def test_fp16_weights_give_the_tokens_of_hugging_face(tmp_path, form):
    recipe = load_recipe("smollm2-135m-fp16", overrides=[f"prefill.kv.rope={form}"])
    result = build(recipe, tmp_path / "out")
    assert result.verdict == "pass", result.summary
    tokens = next(
        check for name, check in checks_of(tmp_path / "out").items() if name.startswith("pair: greedy")
    )
    assert tokens["value"] == 1.0 and tokens["floor"] == 1.0


def test_without_the_safe_norm_the_fp16_gate_fails(tmp_path):
    data = load_recipe("smollm2-135m").resolved()
    data["passes"] = [item for item in data["passes"] if "safe_rms_norm" not in str(item)]
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(data))
    result = build(load_recipe(str(path)), tmp_path / "out")
    assert result.verdict == "fail"
    failed = [name for name, check in checks_of(tmp_path / "out").items() if not check["passed"]]
    assert any(name.startswith("prefill_128, mil fp16") for name in failed)
    assert not any(name.startswith("prefill_128, mil fp32") for name in failed)


def test_every_linear_of_hugging_face_becomes_an_equal_conv2d():
    from torch import nn
    from transformers import LlamaConfig, LlamaForCausalLM

    from passes.linear_to_conv2d import convert

    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=100)
    )
    converted = dict(convert(model).named_modules())
    linears = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    assert len(linears) == 15
    for name, linear in linears.items():
        conv = converted[name]
        assert type(conv) is nn.Conv2d and conv.kernel_size == (1, 1)
        assert np.array_equal(conv.weight.detach().numpy()[:, :, 0, 0], linear.weight.detach().numpy())


def fp16_quality():
    """The measuring function of benchmarks/fp16_quality.py."""
    import importlib.util

    path = Path(__file__).parents[1] / "benchmarks" / "fp16_quality.py"
    spec = importlib.util.spec_from_file_location("fp16_quality", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.measure


def test_fp16_keeps_keys_values_and_logits(tmp_path):
    """20 prompts of 128 tokens through the shipped package in fp16, against its own weights in fp32."""
    recipe = load_recipe("smollm2-135m", overrides=["prefill.outputs=logits", "prefill.logits=all"])
    result = build(recipe, tmp_path / "out")
    assert result.verdict == "pass", result.summary
    found = fp16_quality()(tmp_path / "out")
    assert min(found["k_db"], found["v_db"], found["logits_db"]) >= 48, found
    assert found["top1"] >= 0.99, found


@pytest.fixture(scope="session")
def long(tmp_path_factory, cache):
    """fp16 weights, four functions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDCONVERT_CACHE", str(cache))
        folder = tmp_path_factory.mktemp("long")
        recipe = load_recipe("smollm2-135m-long")
        result = build(recipe, folder / "out")
        assert result.verdict == "pass", result.summary
        return folder / "out", open_source(recipe.source)


def rounded(read):
    """A reader whose tensors went through fp16, as the build's weights did."""
    return lambda *arguments: read(*arguments).half().float()


def test_long_prompts_give_the_tokens_of_one_whole_pass(long):
    """16 tokens after prompts around every boundary, and K and V of all chunks against one pass."""
    import torch

    from pdconvert import families, text
    from pdconvert.checks import NEAR_TIE
    from pdconvert.executors.mlx import DecodeModel
    from pdconvert.measure import sqnr_db
    from pdconvert.reference import Reference
    from pdconvert.runtime.manifest import read_manifest
    from pdconvert.runtime.tokenizer import Tokenizer
    from pdconvert.verify import open_prefill

    folder, source = long
    family = families.get(source.config)
    source.read, source.read_rows = rounded(source.read), rounded(source.read_rows)
    reference = Reference(source, family, family.read_config(source.config))
    manifest = read_manifest(folder)
    ids = Tokenizer(manifest.decode).encode(text.held_out()[0])
    lengths = (1, 2, 127, 128, 129, 255, 256, 257, 300, 511, 512, 513, 1000, 2000)
    prompts = [ids[start * 50 : start * 50 + length] for start, length in enumerate(lengths)]
    prefill, decode = open_prefill(manifest, "mil", "fp32"), DecodeModel.load(manifest.decode, "dequantized")
    for prompt, wanted in zip(prompts, reference.generate(prompts, 16), strict=True):
        kv = prefill.run(prompt)
        fed = [prompt[-1], *wanted.token_ids[:-1]]
        choices = decode.logits(fed, decode.new_cache(kv)).argmax(-1)
        counted = [
            (c, t) for c, t, m in zip(choices, wanted.token_ids, wanted.margins, strict=True) if m >= NEAR_TIE
        ]
        assert all(choice == token for choice, token in counted), len(prompt)
        if kv is None:
            continue
        state = reference.embed(prompt[:-1])[None]
        for index in range(len(reference.spec.layers)):
            state, cache = reference.run(reference.layer(index), state)
            for got, want in ((kv.keys[index], cache.keys), (kv.values[index], cache.values)):
                assert sqnr_db(want, torch.from_numpy(got.astype(np.float32))) >= 60, (len(prompt), index)


def test_six_functions_cost_hardly_more_than_one(tmp_path, long):
    data = load_recipe("smollm2-135m-fp16").resolved()
    sizes, functions = (
        {},
        [{"tokens": 128}, *({"tokens": 128, "past": past} for past in (512, 1024, 1536, 2048, 4096))],
    )
    for count in (1, 6):
        data["prefill"]["functions"] = functions[:count]
        folder = tmp_path / str(count)
        assert build(recipe_from_data(data, where="test", folder=tmp_path), folder).verdict == "pass"
        sizes[count] = sum(
            file.stat().st_size for file in (folder / "prefill.mlpackage").rglob("*") if file.is_file()
        )
    assert sizes[6] <= 1.03 * sizes[1], sizes


def test_the_w8_package_as_onnx(w8, tmp_path):
    from pdconvert.export.onnx_build import export_onnx

    report = export_onnx(w8[0], tmp_path / "onnx", steps=["fold", "fuse"])
    assert report["verdict"] == "pass", report["checks"]
    assert min(float(check["value"]) for check in report["checks"]) > 80


def test_the_files_own_grid_decodes_as_the_reference(tmp_path):
    import numpy as np

    from pdconvert.runtime.weights import DecodeWeights
    from pdconvert.sources import open_source

    recipe = load_recipe("smollm2-135m", overrides=["decode.grid=source"])
    result = build(recipe, tmp_path / "out")
    assert result.verdict == "pass", result.summary
    checks = checks_of(tmp_path / "out")
    assert checks["MLX alone: KLD, mean"]["value"] < 1e-5 < checks["pair: KLD, mean"]["value"]
    source, held = open_source(recipe.source), DecodeWeights(tmp_path / "out" / "decode")
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):
        module = f"model.layers.17.{name}"
        expected = source.read(f"{module}.weight").numpy()
        np.testing.assert_array_equal(held.rows(module, range(len(expected))), expected)
