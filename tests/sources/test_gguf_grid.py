"""GGUF grids kept as they are for MLX: codes, scales and biases without a second rounding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import quantize
from gguf_files import TWO_LAYERS, opened, stored, write_gguf
from test_gguf_tokenizer import byte_level

from pdconvert.errors import InputError
from pdconvert.forecast.plan import forecast
from pdconvert.pipeline import build
from pdconvert.quant.grid import AffineLinear
from pdconvert.recipe import Recipe, load_recipe, recipe_from_data
from pdconvert.runtime.weights import DecodeWeights

KINDS = {
    "attn_q.": Kind.Q4_0,
    "attn_k.": Kind.Q4_1,
    "attn_v.": Kind.Q8_0,
    "attn_output.": Kind.F16,
    "ffn_gate.": Kind.Q4_1,
    "ffn_up.": Kind.Q4_0,
    "ffn_down.": Kind.Q8_0,
    "token_embd.": Kind.Q8_0,
    "output.": Kind.Q4_0,
}
Q = "model.layers.0.self_attn.q_proj"


def write_quantized(
    path: Path, weights: Mapping[str, torch.Tensor], kinds: Mapping[str, Kind], **metadata: Any
) -> Path:
    """A GGUF file whose matrices are of the given types, by a part of their names; the others are fp32."""
    tensors: dict[str, Any] = {}
    for name, value in stored(weights).items():
        kind = next((kinds[part] for part in kinds if part in name), None)
        tensors[name] = value if kind is None else (quantize(value.numpy(), kind), kind)
    return write_gguf(path, tensors, {**TWO_LAYERS, **metadata})


def recipe(gguf: Path, scheme: str = "none") -> Recipe:
    data = load_recipe(
        "tiny", source=str(gguf), overrides=[f"passes.quantize_weights.scheme={scheme}"]
    ).resolved()
    data["prefill"]["functions"] = [{"tokens": 16}]
    data["decode"] = {"grid": "source"}
    data["probe"]["eval_windows"] = 1
    return recipe_from_data(data, where="test", folder=gguf.parent)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
@pytest.mark.parametrize(
    "name", [f"{Q}.weight", "model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight"]
)
def test_mlx_reads_the_values_of_the_file(tmp_path, weights, kind, name):
    """Rows of q and k in Hugging Face's order, their codes with them."""
    source = opened(write_quantized(tmp_path / "m.gguf", weights, dict.fromkeys(KINDS, kind)))
    record = source.read_grid(name)
    assert isinstance(record, AffineLinear) and record.group == 32
    assert record.bits == (8 if kind == Kind.Q8_0 else 4)
    assert record.scales.dtype == record.biases.dtype == torch.float16
    words = record.codes.numpy().reshape(record.shape[0], -1).copy()
    if record.bits == 4:
        words = words[:, ::2] | words[:, 1::2] << 4
    parts = (
        mx.array(words.view(np.uint32)),
        *(mx.array(p.float().numpy()) for p in (record.scales, record.biases)),
    )
    read = mx.dequantize(*parts, group_size=32, bits=record.bits, stream=mx.cpu)
    np.testing.assert_array_equal(np.array(read), source.read(name).numpy())


def test_signs_and_extremes_are_held(tmp_path, weights):
    """A negative scale, the lowest code of Q8_0, a block of zeros, a tiny scale."""
    codes = np.zeros((128, 2), dtype=[("d", "<f2"), ("q", "i1", 32)])
    codes["q"] = np.arange(-128, 128, 8, dtype=np.int8)
    codes["d"] = np.resize(np.array([-0.5, 2.0**-24, 0.0, 511.0], np.float16), (128, 2))
    tensors = stored(weights) | {"blk.0.ffn_up.weight": (codes.view(np.uint8).reshape(128, -1), Kind.Q8_0)}
    source = opened(write_gguf(tmp_path / "m.gguf", tensors, TWO_LAYERS))
    record = source.read_grid("model.layers.0.mlp.up_proj.weight")
    assert torch.equal(record.dequantize(), source.read("model.layers.0.mlp.up_proj.weight"))
    assert record.dequantize().max() == 511 * 120


def test_a_bias_beyond_fp16_is_refused_by_name(tmp_path, weights):
    weights["model.layers.0.mlp.up_proj.weight"] *= 30000
    source = opened(write_quantized(tmp_path / "m.gguf", weights, {"blk.0.ffn_up.": Kind.Q8_0}))
    with pytest.raises(
        InputError, match=r"mlp\.up_proj\.weight: fp16 does not hold .* Q8_0 .*decode.grid to own"
    ):
        source.read_grid("model.layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize("scheme", ["none", "w8a16"])
def test_a_build_keeps_every_grid(tmp_path, weights, scheme):
    for name, value in weights.items():
        value *= 1 if "norm" in name else 0.1
    path = write_quantized(tmp_path / "m.gguf", weights, KINDS, **byte_level())
    chosen = recipe(path, scheme)
    result = build(chosen, tmp_path / "out", use_cache=False)
    report = json.loads((tmp_path / "out" / "report" / "report.json").read_text())
    assert result.verdict == "pass", result.summary
    assert "pair: KLD, mean" in {check["name"] for check in report["checks"]}, "the hand-off was not measured"

    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    grids = manifest["decode"]["quantization"]
    assert (grids["group_size"], grids["bits"]) == (32, 4)
    assert grids["model.layers.0.mlp.down_proj"] == {"group_size": 32, "bits": 8}
    source, held = opened(path), DecodeWeights(tmp_path / "out" / "decode")
    for name, info in source.tensors().items():
        if len(info.shape) == 2:
            got = held.rows(name.removesuffix(".weight"), range(info.shape[0]))
            np.testing.assert_array_equal(got, source.read(name).numpy(), name)
    size = sum(item.stat().st_size for item in (tmp_path / "out" / "decode").iterdir())
    assert forecast(chosen).sizes.decode == size


def test_other_types_are_refused_before_the_work(tmp_path, weights):
    kinds = KINDS | {"blk.1.ffn_down.": Kind.BF16}
    path = write_quantized(
        tmp_path / "m.gguf", weights, {"blk.1.ffn_down.": Kind.BF16, **kinds}, **byte_level()
    )
    with pytest.raises(
        InputError,
        match=r"decode.grid source: .*m.gguf stores model\.layers\.1\.mlp\.down_proj\.weight as BF16; .* own or shared",
    ):
        build(recipe(path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_sources_have_no_such_grid(tmp_path):
    data = load_recipe("tiny").resolved()
    data["decode"] = {"grid": "source"}
    with pytest.raises(InputError, match=r"decode.grid source: random:llama:0 stores .* as F32"):
        build(recipe_from_data(data, where="test", folder=tmp_path), tmp_path / "out")
