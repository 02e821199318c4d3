"""GGUF files of families other than llama: their config is one that the family reads, their tensors all it needs."""

from pathlib import Path

import pytest
import torch
from checkpoints import random_source
from gguf_files import GGUF_NAMES, TWO_LAYERS, opened, write_gguf

from pdconvert import families
from pdconvert.inventory import check_inventory

NAMES = GGUF_NAMES | {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def stored_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in OUTER:
        return f"{OUTER[module]}.{kind}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{kind}"


@pytest.mark.parametrize(("name", "head_dim"), [("qwen2", 16), ("qwen3", 32)])
def test_a_gguf_file_is_the_checkpoint_that_it_was_made_of(tmp_path: Path, name: str, head_dim: int) -> None:
    family = families.get({"model_type": name})
    weights = random_source(family.TINY).values
    metadata = {key.replace("llama.", f"{name}."): value for key, value in TWO_LAYERS.items()}
    del metadata[f"{name}.rope.dimension_count"]
    metadata |= {f"{name}.attention.{kind}_length": head_dim for kind in ("key", "value")}
    tensors = {stored_name(key): value for key, value in weights.items()}
    source = opened(write_gguf(tmp_path / "m.gguf", tensors, metadata, arch=name))
    spec = family.read_config(source.config)
    wanted = family.read_config({**family.TINY, "rope_theta": 5e5, "max_position_embeddings": 256})
    assert spec == wanted
    assert check_inventory(source, family, spec) == []
    assert all(torch.equal(source.read(key), value) for key, value in weights.items())
