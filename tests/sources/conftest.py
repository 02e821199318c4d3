"""A small llama as files: 2 layers, hidden 64, 4 heads, 2 KV heads, vocabulary 320."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pdconvert.sources.tokenizer import write_byte_tokenizer

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


def _make_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = {"model.embed_tokens.weight": (320, 64)}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (64,),
            f"{prefix}.self_attn.q_proj.weight": (64, 64),
            f"{prefix}.self_attn.k_proj.weight": (32, 64),
            f"{prefix}.self_attn.v_proj.weight": (32, 64),
            f"{prefix}.self_attn.o_proj.weight": (64, 64),
            f"{prefix}.post_attention_layernorm.weight": (64,),
            f"{prefix}.mlp.gate_proj.weight": (128, 64),
            f"{prefix}.mlp.up_proj.weight": (128, 64),
            f"{prefix}.mlp.down_proj.weight": (64, 128),
        }
    shapes |= {"model.norm.weight": (64,), "lm_head.weight": (320, 64)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def config() -> dict[str, Any]:
    """The config, free to change."""
    return dict(CONFIG)


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    """The tensors by Hugging Face name, free to change."""
    return _make_tensors()


@pytest.fixture
def checkpoint(tmp_path: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    """A complete folder: config, one safetensors file, tokenizer, model card, licence."""
    folder = tmp_path / "a checkpoint ñ 模型"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# Tiny\n")
    (folder / "LICENSE").write_text("Do as you like.\n")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_byte_tokenizer(folder, 320, 256, 257)
    return folder


@pytest.fixture
def shard(checkpoint: Path, weights: dict[str, torch.Tensor]) -> Callable[..., dict[str, str]]:
    """Split the checkpoint's weights into two files with an index; gives the index's weight map."""

    def split(suffix: str = "safetensors", save: Callable[..., None] = save_file) -> dict[str, str]:
        (checkpoint / "model.safetensors").unlink()
        stem = "model" if suffix == "safetensors" else "pytorch_model"
        names = list(weights)
        weight_map = {}
        for number, part in enumerate((names[:8], names[8:]), start=1):
            file = f"{stem}-{number:05}-of-00002.{suffix}"
            save({name: weights[name] for name in part}, checkpoint / file)
            weight_map |= dict.fromkeys(part, file)
        index = checkpoint / f"{stem}.{suffix}.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return weight_map

    return split
