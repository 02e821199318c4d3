"""A tiny llama of Hugging Face, decode folders written from it, and a stand-in for its package."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdconvert.emit.mlx import mlx_group, write_decode_folder
from pdconvert.families import llama
from pdconvert.quant.grid import QuantizedLinear, quantize_symmetric
from pdconvert.sources.tokenizer import write_byte_tokenizer

BOS, EOS = 256, 257
CONFIG = {**llama.TINY, "initializer_range": 0.15}


class ByteTokenizerSource:
    """A source whose tokenizer has one token for each byte."""

    def write_tokenizer(self, folder: Path) -> None:
        write_byte_tokenizer(folder, CONFIG["vocab_size"], BOS, EOS)


@dataclass(frozen=True)
class Tiny:
    """A Hugging Face model whose weights are exactly those of a decode folder."""

    hf: Any
    decode: Path
    tensors: dict[str, Tensor | QuantizedLinear]

    @property
    def rope(self) -> tuple[list[float], float]:
        rotary = self.hf.model.rotary_emb
        return rotary.inv_freq.double().tolist(), float(rotary.attention_scaling)


def hf_model(config: Mapping[str, Any], seed: int) -> Any:
    """A seeded LlamaForCausalLM in fp32 with eager attention."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(llama.hf_config(dict(config))).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data = 1 + 0.2 * torch.randn_like(parameter)
        if name.endswith("bias"):
            parameter.data = torch.randn_like(parameter)
    return model


def make_tiny(folder: Path, bits: int | None, group: int = 0, seed: int = 0, **changes: Any) -> Tiny:
    """Writes the decode folder of a tiny model and loads its de-quantized weights into Hugging Face's.

    Args:
        folder: where decode/ goes.
        bits: of every matrix, embedding and head included; None for fp16.
        group: inputs per scale; 0 for one scale per output channel.
        seed: of the weights.
        changes: config keys that differ from the tiny llama's.
    """
    config = {**CONFIG, **changes}
    hf = hf_model(config, seed)
    tensors: dict[str, Tensor | QuantizedLinear] = {}
    exact = {}
    for name, value in hf.state_dict().items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if bits and value.dim() == 2:
            tensors[name] = quantize_groups(value, bits, group)
            exact[name] = tensors[name].dequantize()
            if mlx_group(value.shape[1], group) is None:
                exact[name] = exact[name].half().float()
        else:
            tensors[name] = value.half()
            exact[name] = value.half().float()
    missing, unexpected = hf.load_state_dict(exact, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    decode_config = llama.decode_config(config, llama.read_config(config))
    write_decode_folder(folder, decode_config, iter(tensors.items()), ByteTokenizerSource())
    return Tiny(hf, folder, tensors)


def quantize_groups(weight: Tensor, bits: int, group: int) -> QuantizedLinear:
    """Round to nearest with one scale per output channel, or per group of inputs."""
    if not group:
        return quantize_symmetric(weight, bits, "weight")
    rows, columns = weight.shape
    record = quantize_symmetric(weight.reshape(-1, group), bits, "weight")
    scales = record.scales.reshape(rows, columns // group)
    return QuantizedLinear(record.codes.reshape(rows, columns), scales, bits, group)


@torch.no_grad()
def hf_logits(hf: Any, ids: list[int]) -> np.ndarray:
    """Logits (n, V) of a whole text."""
    return hf(torch.tensor([ids])).logits[0].numpy()


@torch.no_grad()
def hf_greedy(hf: Any, ids: list[int], count: int) -> list[int]:
    """The most probable continuation, EOS or not."""
    ids = list(ids)
    start = len(ids)
    for _ in range(count):
        ids.append(int(hf_logits(hf, ids)[-1].argmax()))
    return ids[start:]


@torch.no_grad()
def hf_keys_values(hf: Any, hidden: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor) -> Iterator[tuple]:
    """Per layer raw keys, rotated keys and values, each (1, kv_heads, S, D), by Hugging Face's layers.

    Args:
        hf: the model.
        hidden: (1, S, H) embedded tokens.
        rope: cos and sin, each (1, S, D).
        mask: (1, 1, S, S) additive.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=hf.config)
    for index, layer in enumerate(hf.model.layers):
        attention = layer.self_attn
        raw = attention.k_proj(layer.input_layernorm(hidden))
        raw = raw.view(1, hidden.shape[1], -1, attention.head_dim).transpose(1, 2)
        hidden = layer(hidden, attention_mask=mask, position_embeddings=rope, cache=cache)
        yield raw, cache.layers[index].keys, cache.layers[index].values


def as_graph(parts: list[Tensor]) -> np.ndarray:
    """Per-layer (1, kv_heads, S, D) in the graph's layout (1, layers · kv_heads, D, S)."""
    return torch.cat(parts, 1).transpose(2, 3).contiguous().numpy()


class HfSession:
    """A stand-in for the package: Hugging Face's layers on exactly the inputs that a graph would get."""

    kind, reason = "fake", "a test"

    def __init__(self, hf: Any, form: str, tokens: int = 128):
        self.hf, self.form, self.tokens = hf, form, tokens
        self.calls: list[dict[str, np.ndarray]] = []

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        self.calls.append(copy.copy(dict(inputs)))
        assert set(inputs) == {"hidden", "rope_cos", "rope_sin", "mask"}
        assert all(value.dtype == np.float16 for value in inputs.values())
        given = {name: torch.from_numpy(value).float() for name, value in inputs.items()}
        hidden = given["hidden"].squeeze(2).transpose(1, 2)
        rope = given["rope_cos"][0].transpose(1, 2), given["rope_sin"][0].transpose(1, 2)
        layers = list(hf_keys_values(self.hf, hidden, rope, given["mask"].transpose(2, 3)))
        keys = [raw if self.form == "raw" else rotated for raw, rotated, _ in layers]
        return {
            "k": torch.from_numpy(as_graph(keys)),
            "v": torch.from_numpy(as_graph([values for *_, values in layers])),
        }


def manifest_of(tiny: Tiny, form: str = "rotated", tokens: tuple[int, ...] = (128,)) -> dict[str, Any]:
    """The manifest of a build with that decode folder."""
    config = tiny.hf.config
    inv_freq, factor = tiny.rope
    dim, rows = config.head_dim, config.num_hidden_layers * config.num_key_value_heads

    def port(name: str, *shape: int) -> dict[str, Any]:
        return {"name": name, "role": name, "shape": list(shape), "dtype": "fp16", "axes": []}

    functions = {
        f"prefill_{s}": {
            "sequence_length": s,
            "past_length": 0,
            "inputs": [
                port("hidden", 1, config.hidden_size, 1, s),
                port("rope_cos", 1, 1, dim, s),
                port("rope_sin", 1, 1, dim, s),
                port("mask", 1, 1, s, s),
            ],
            "outputs": [port("k", 1, rows, dim, s), port("v", 1, rows, dim, s)],
        }
        for s in tokens
    }
    return {
        "schema": "1.0",
        "name": "tiny",
        "verdict": "pass",
        "prefill": {"package": "prefill.mlpackage", "functions": functions},
        "rope": {"dims": dim, "inv_freq": inv_freq, "attention_factor": factor},
        "embedding": {"scale": 1.0},
        "kv": {
            "rope": form,
            "layers": config.num_hidden_layers,
            "kv_heads": config.num_key_value_heads,
            "head_dim": dim,
        },
        "eos_token_ids": [EOS],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
    }
