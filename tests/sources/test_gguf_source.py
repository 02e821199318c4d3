"""GGUF files: every type, Hugging Face names and row order, damage."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from gguf_files import METADATA, TWO_LAYERS, gguf_name, opened, stored, write_gguf

from pdconvert.errors import InputError

# Tensors


def test_names_and_row_order_are_hugging_faces(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    source = opened(write_gguf(tmp_path / "m ñ.gguf", stored(weights), TWO_LAYERS))
    assert set(source.tensors()) == set(weights)
    for name, value in weights.items():
        assert source.tensors()[name].shape == tuple(value.shape)
        assert torch.equal(source.read(name), value), name


def test_rows_of_an_interleaved_tensor(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    source = opened(write_gguf(tmp_path / "m.gguf", stored(weights), TWO_LAYERS))
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"):
        ids = list(reversed(range(weights[name].shape[0])))
        assert torch.equal(source.read_rows(name, ids), weights[name][ids])


def test_biases_of_q_and_k_are_put_in_order_too(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    weights[name] = torch.arange(64.0)
    source = opened(write_gguf(tmp_path / "m.gguf", stored(weights), TWO_LAYERS))
    assert torch.equal(source.read(name), weights[name])
    assert source.config["attention_bias"] is True
    assert source.config["mlp_bias"] is False


def test_other_architectures_store_rows_as_they_are(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    plain = {gguf_name(name): value for name, value in weights.items()}
    plain["blk.0.attn_q_norm.weight"] = torch.ones(16)
    metadata = {key.replace("llama.", "qwen3."): value for key, value in TWO_LAYERS.items()}
    source = opened(write_gguf(tmp_path / "m.gguf", plain, metadata, arch="qwen3"))
    assert source.config["model_type"] == "qwen3"
    assert "attention_bias" not in source.config
    assert torch.equal(source.read("model.layers.0.self_attn.q_norm.weight"), torch.ones(16))
    for name, value in weights.items():
        assert torch.equal(source.read(name), value)


def test_equals_what_transformers_loads(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    quantized = {
        name: (quantize(value.numpy(), GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
        if value.dim() == 2
        else value
        for name, value in stored(weights).items()
    }
    path = write_gguf(tmp_path / "m.gguf", quantized, TWO_LAYERS | {"general.name": "tiny"})
    source = opened(path)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**source.config))
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    assert set(theirs) == set(source.tensors())
    for name, value in theirs.items():
        assert torch.equal(source.read(name), value), name
    assert source.tensors()["lm_head.weight"].dtype == "Q8_0"


QUANTIZED = sorted(
    (t for t in GGML_QUANT_SIZES if t.name.startswith(("BF16", "Q", "IQ", "TQ", "MXFP", "NVFP"))),
    key=lambda t: t.name,
)


@pytest.mark.parametrize("ggml_type", QUANTIZED, ids=lambda t: t.name)
def test_every_type_that_the_gguf_package_knows(tmp_path: Path, ggml_type: GGMLQuantizationType) -> None:
    block, block_bytes = GGML_QUANT_SIZES[ggml_type]
    rows, width = 5, 512
    generator = np.random.default_rng(1)
    # bytes below 60 keep every fp16 scale finite, wherever a type puts it
    raw = generator.integers(0, 60, (rows, width // block * block_bytes), dtype=np.uint8)
    metadata = METADATA | {"llama.embedding_length": width}
    path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": (raw, ggml_type)}, metadata)
    try:
        expected = dequantize(raw, ggml_type)
    except NotImplementedError:
        with pytest.raises(InputError, match=f"has type {ggml_type.name}, which the gguf package cannot"):
            opened(path)
        return
    source = opened(path)
    assert source.tensors()["model.embed_tokens.weight"].dtype == ggml_type.name
    assert np.array_equal(source.read("model.embed_tokens.weight").numpy(), expected)
    assert np.array_equal(
        source.read_rows("model.embed_tokens.weight", [4, 0, 1]).numpy(), expected[[4, 0, 1]]
    )


def test_a_tensor_larger_than_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pdconvert.sources import gguf as module

    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 64 * 7)
    table = torch.randn(320, 64)
    source = opened(write_gguf(tmp_path / "m.gguf", {"token_embd.weight": table}))
    assert torch.equal(source.read("model.embed_tokens.weight"), table)
    ids = [319, 318, 0, 1, 2, 3, 4, 5, 6, 7, 7, 200]
    assert torch.equal(source.read_rows("model.embed_tokens.weight", ids), table[ids])


def test_nan_is_refused(tmp_path: Path) -> None:
    table = torch.zeros(320, 64)
    table[2, 2] = float("nan")
    source = opened(write_gguf(tmp_path / "m.gguf", {"token_embd.weight": table}))
    with pytest.raises(InputError, match=r"model\.embed_tokens\.weight holds 1 values that are NaN"):
        source.read("model.embed_tokens.weight")


# Damage


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda data: data[:-64], "truncated: "),
        (lambda data: data[:200], "truncated inside its header"),
        (lambda data: b"", "empty (0 bytes)"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
        (lambda data: b"x" * 100, "not a GGUF file"),
        (lambda data: b"GGUF", "not a GGUF file"),
        (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "GGUF version 1; expected 2 or 3"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "in big-endian order"),
        (lambda data: data[:24] + b"\xff" * 8 + data[32:], "damaged: its header asks for"),
        (lambda data: data[:16] + b"\xff" * 8 + data[24:], "damaged"),
    ],
)
def test_damaged_files(tmp_path: Path, damage: Callable[[bytes], bytes], expected: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": torch.zeros(320, 64)})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InputError) as caught:
        opened(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_shrinks_while_it_is_open(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": torch.zeros(320, 64)})
    source = opened(path)
    os.truncate(path, path.stat().st_size - 1000)
    with pytest.raises(InputError, match="became shorter while it was read"):
        source.read("model.embed_tokens.weight")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.gguf: no such file"):
        opened(tmp_path / "absent.gguf")
