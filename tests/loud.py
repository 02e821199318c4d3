"""Checkpoints of a tiny model with some tensors multiplied, so that fp16 overflows where a test wants it."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from pdconvert.recipe import load_recipe
from pdconvert.sources import open_source

LOUD_EMBEDDING = {"model.embed_tokens.weight": 5000.0}
LOUD_LAYER = {"model.layers.0.mlp.up_proj.weight": 1e5, "model.layers.0.mlp.down_proj.weight": 200.0}


def loud_checkpoint(folder: Path, factors: dict[str, float], outputs: str, passes: tuple) -> Path:
    """A recipe for the tiny model with some tensors multiplied, and further passes."""
    source = open_source(load_recipe("tiny").source)
    folder.mkdir()
    tensors = {name: source.read(name).numpy() for name in source.tensors()}
    for name, factor in factors.items():
        tensors[name] = tensors[name] * np.float32(factor)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(source.config))
    source.write_tokenizer(folder)
    data = load_recipe("tiny").resolved()
    data["source"] = {"path": str(folder)}
    data["prefill"]["outputs"] = outputs
    data["passes"] = [item for item in data["passes"] if "safe_rms_norm" not in str(item)] + list(passes)
    data["probe"] = {"eval_windows": 1}
    data["gates"] = {"kld": 1.0, "reason": "random weights have no meaningful distribution"}
    (folder / "recipe.json").write_text(json.dumps(data))
    return folder / "recipe.json"
