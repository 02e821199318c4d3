"""Decode folders in stock mlx-lm and in our executor, against Hugging Face on the same weights."""

import json
import shutil
import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
import torch
from mlx_lm.generate import generate_step
from mlx_lm.models import llama as mlx_llama
from tiny_pair import hf_greedy, hf_logits, make_tiny

from pdconvert.errors import CheckFailed, InputError
from pdconvert.executors import mlx_products
from pdconvert.executors.mlx import DecodeModel
from pdconvert.measure import sqnr_db

IDS = [3, 250, 17, 99, 256, 4, 180, 33, 7, 7, 41, 300]


def db(expected: np.ndarray, found: np.ndarray) -> float:
    return sqnr_db(torch.from_numpy(expected), torch.from_numpy(found))


@pytest.mark.parametrize("folder", ["w8", "fp16"])
def test_stock_mlx_lm_loads_the_folder_and_computes_the_same(folder, request):
    tiny = request.getfixturevalue(folder)
    model, tokenizer = mlx_lm.load(str(tiny.decode))
    assert tokenizer.eos_token_ids == {257}
    model.set_dtype(mx.float32)
    logits = np.array(model(mx.array([IDS]))[0])
    assert db(hf_logits(tiny.hf, IDS), logits) > 100
    tokens = [token for token, _ in generate_step(mx.array(IDS), model, max_tokens=12)]
    assert tokens == hf_greedy(tiny.hf, IDS, 12)


@pytest.mark.parametrize("products", ["quantized", "dequantized"])
@pytest.mark.parametrize("folder", ["w8", "fp16"])
def test_logits_equal_hugging_face_in_one_call_and_in_several(folder, products, request):
    tiny = request.getfixturevalue(folder)
    model = DecodeModel.load(tiny.decode, products)
    expected = hf_logits(tiny.hf, IDS)
    whole = model.logits(IDS, model.new_cache())
    assert whole.dtype == np.float32
    assert db(expected, whole) > 100
    cache = model.new_cache()
    parts = [model.logits(part, cache) for part in (IDS[:5], IDS[5:6], IDS[6:])]
    assert db(expected, np.concatenate(parts)) > 100


@pytest.mark.parametrize(
    "changes",
    [
        {"bits": 4},
        {"bits": 4, "group": 32},
        {"bits": 8, "intermediate_size": 80, "hidden_size": 96, "head_dim": 24},
        {"bits": 8, "attention_bias": True, "mlp_bias": True},
        {"bits": None, "num_key_value_heads": 4},
        {"bits": 8, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {
            "bits": 8,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        {
            "bits": 8,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        },
    ],
    ids=["w4", "w4-g32", "odd-widths", "biases", "mha", "linear", "llama3", "yarn"],
)
def test_variants_equal_hugging_face(tmp_path, changes):
    tiny = make_tiny(tmp_path / "decode", **changes)
    expected = hf_logits(tiny.hf, IDS)
    for products in ("quantized", "dequantized"):
        model = DecodeModel.load(tiny.decode, products)
        assert db(expected, model.logits(IDS, model.new_cache())) > 90


def test_dequantized_weights_are_the_stored_ones_bit_for_bit(w8):
    for keep_bytes in (0, 1 << 30):
        model = DecodeModel.load(w8.decode, "dequantized", keep_bytes=keep_bytes).model
        for name, module in (
            ("model.layers.1.mlp.down_proj.weight", model.model.layers[1].mlp.down_proj),
            ("model.embed_tokens.weight", model.model.embed_tokens),
        ):
            found = module.exact.rows(slice(None)).numpy()
            np.testing.assert_array_equal(found, w8.tensors[name].dequantize().numpy())


def test_it_says_where_it_runs_and_why(w8):
    described = DecodeModel.load(w8.decode, "dequantized").describe()
    reason = described.pop("reason")
    assert described == {
        "executor": "mlx",
        "device": "cpu",
        "dtype": "float32",
        "products": "dequantized",
    }
    assert reason == "de-quantized weights run on the CPU in float32"


def test_loading_leaves_mlx_lm_as_it_was(w8):
    stock = mlx_llama.scaled_dot_product_attention
    model = DecodeModel.load(w8.decode, "dequantized")
    model.logits(IDS, model.new_cache())
    with pytest.raises(IndexError):
        model.logits(IDS, [])
    assert mlx_llama.scaled_dot_product_attention is stock


@pytest.mark.parametrize("name", ["a b", "ñ 模型", "~x", "[x]*?"])
def test_odd_folder_names_load(w8, tmp_path, name):
    folder = tmp_path / name / "decode"
    shutil.copytree(w8.decode, folder)
    model = DecodeModel.load(folder)
    assert db(hf_logits(w8.hf, IDS), model.logits(IDS, model.new_cache())) > 100


def test_the_limit_of_open_files_is_not_lowered(w8):
    script = (
        "import resource, sys; from pathlib import Path; from pdconvert.executors.mlx import DecodeModel\n"
        "before = resource.getrlimit(resource.RLIMIT_NOFILE)[0]; DecodeModel.load(Path(sys.argv[1]))\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE); sys.exit(soft < min(before, hard))"
    )
    result = subprocess.run([sys.executable, "-c", script, str(w8.decode)], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_a_product_that_differs_from_mlx_is_refused(w8, monkeypatch):
    monkeypatch.setattr(
        nn.QuantizedLinear, "__call__", lambda self, x: mx.zeros((1, self.weight.shape[0])) + x[0, 0]
    )
    with pytest.raises(CheckFailed, match=r"^model\.layers\.0\..*: MLX's own product differs"):
        DecodeModel.load(w8.decode, "dequantized")


@pytest.mark.parametrize("window", [False, True])
def test_attention_by_torch_equals_mlx(window):
    random = np.random.default_rng(0)
    q, k, v = (
        mx.array(random.standard_normal((1, h, n, 16)), mx.float32) for h, n in ((4, 3), (2, 8), (2, 8))
    )
    mask = mx.array(random.random((3, 8)) < 0.7) if window else "causal"
    stock = mlx_llama.scaled_dot_product_attention
    expected = stock(q, k, v, cache=None, scale=0.3, mask=mask)
    found = mlx_products._attention(stock, q, k, v, None, 0.3, mask)
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-6)


def edit(folder, name, change):
    path = folder / name
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def without(key):
    return lambda config: config.pop(key)


def quantization(**values):
    return lambda config: config["quantization"].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            quantization(bits=None),
            r"config.json: quantization.bits of .* is None, expected one of \(2, 4, 8\)",
        ),
        (quantization(group_size="64"), "group_size of .* is '64', expected a positive integer"),
        (
            quantization(group_size=32),
            "16 words and 1 scales a row, which 8 bits in groups of 32 do not give",
        ),
        (without("quantization"), "config.json: quantization is missing, but model.embed_tokens is packed"),
        (without("hidden_size"), "mlx-lm cannot load it: .*hidden_size"),
        (
            lambda config: config.update(model_type="foo"),
            "mlx-lm cannot load it: Model type foo not supported",
        ),
        (lambda config: config.update(num_hidden_layers=3), "mlx-lm cannot load it: Missing 9 parameters"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(w8, tmp_path, change, message):
    folder = tmp_path / "decode"
    shutil.copytree(w8.decode, folder)
    edit(folder, "config.json", change)
    with pytest.raises(InputError, match=message):
        DecodeModel.load(folder)
