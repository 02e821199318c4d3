"""Small GGUF files to test with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType

from pdconvert.recipe import SourceSpec
from pdconvert.sources import Source, open_source

HEADS = {"q": 4, "k": 2}
METADATA: dict[str, Any] = {
    "general.license": "mit",
    "llama.block_count": 1,
    "llama.context_length": 256,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500000.0,
    "llama.rope.dimension_count": 16,
    "llama.vocab_size": 320,
}
TWO_LAYERS = METADATA | {"llama.block_count": 2}
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Written out, not taken from the package that the source uses."""


def gguf_name(name: str) -> str:
    """The name under which llama.cpp stores a Hugging Face tensor."""
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    module, _, kind = name.rpartition(".")
    if module in outer:
        return f"{outer[module]}.{kind}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest]}.{kind}"


def interleave(value: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k in llama.cpp's order: the two halves of a head side by side, pair by pair."""
    size = value.shape[0] // heads
    order = [
        h * size + half * (size // 2) + i for h in range(heads) for i in range(size // 2) for half in (0, 1)
    ]
    return value[order]


def write_gguf(
    path: Path,
    tensors: Mapping[str, torch.Tensor | tuple[np.ndarray, GGMLQuantizationType]],
    metadata: Mapping[str, Any] = METADATA,
    arch: str = "llama",
) -> Path:
    """A GGUF file of tensors by GGUF name: fp32 values, or raw bytes with their type."""
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Hugging Face tensors as llama.cpp stores them."""
    result = {}
    for name, value in weights.items():
        kind = next((kind for kind in HEADS if f".{kind}_proj." in name), None)
        result[gguf_name(name)] = interleave(value, HEADS[kind]) if kind else value
    return result


def opened(path: Path) -> Source:
    return open_source(SourceSpec(gguf=str(path)))
