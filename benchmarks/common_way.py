"""The common way to a Core ML package and an MLX folder, as a yardstick for `build_budgets.py`.

A torch module of 1×1 convolutions is written by hand for the model's geometry and goes through
`torch.jit.trace` → `coremltools.convert` → `linear_quantize_weights` → save. Its weights are random, for
they change neither time nor memory; nothing is verified. It computes what pdconvert's package computes
(keys and values of every layer; the last layer's attention and MLP are left out) in the same layout.

    python benchmarks/common_way.py checkpoint RECIPE FOLDER   a Hugging Face folder of a recipe's geometry
    python benchmarks/common_way.py package FOLDER OUT         the common way from its config.json
"""

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

TOKENS = 128


class Norm(nn.Module):
    """RMSNorm over the channels of x: (1, C, 1, S), in a form whose squares fit fp16."""

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, channels, 1, 1))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x / x.abs().amax(1, keepdim=True)
        return x * torch.rsqrt((x * x).mean(1, keepdim=True) + self.eps) * self.gain


class Layer(nn.Module):
    """One decoder layer on x: (1, C, 1, S); gives the new x, and K and V as (H_kv, D, S)."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config.get("head_dim") or width // self.heads
        self.norm, self.mlp_norm = Norm(width, 1e-5), Norm(width, 1e-5)
        self.q = nn.Conv2d(width, self.heads * self.dim, 1, bias=False)
        self.k = nn.Conv2d(width, self.kv_heads * self.dim, 1, bias=False)
        self.v = nn.Conv2d(width, self.kv_heads * self.dim, 1, bias=False)
        self.o = nn.Conv2d(self.heads * self.dim, width, 1, bias=False)
        self.gate = nn.Conv2d(width, inner, 1, bias=False)
        self.up = nn.Conv2d(width, inner, 1, bias=False)
        self.down = nn.Conv2d(inner, width, 1, bias=False)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Apply RoPE to x: (heads, D, S) with cos and sin: (1, D, S)."""
        low, high = x[:, : self.dim // 2], x[:, self.dim // 2 :]
        return x * cos + torch.cat((-high, low), 1) * sin

    def keys_values(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K (rotated) and V of normed x, each (H_kv, D, S)."""
        keys = self.rotate(self.k(x).view(self.kv_heads, self.dim, TOKENS), cos, sin)
        return keys, self.v(x).view(self.kv_heads, self.dim, TOKENS)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One layer; mask: (1, K, S), added to the scores."""
        normed = self.norm(x)
        keys, values = self.keys_values(normed, cos, sin)
        queries = self.rotate(self.q(normed).view(self.heads, self.dim, TOKENS), cos, sin)
        group = self.heads // self.kv_heads
        queries = queries.view(self.kv_heads, group, self.dim, TOKENS)
        scores = keys.transpose(1, 2).unsqueeze(1) @ queries * self.dim**-0.5 + mask
        mixed = values.unsqueeze(1) @ scores.softmax(2)
        x = x + self.o(mixed.view(1, self.heads * self.dim, 1, TOKENS))
        normed = self.mlp_norm(x)
        x = x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))
        return x, keys, values


class Prefill(nn.Module):
    """All layers; gives K and V of each as (1, L·H_kv, D, S)."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))

    def forward(
        self, hidden: torch.Tensor, rope_cos: torch.Tensor, rope_sin: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layers; hidden: (1, C, 1, S), rope_*: (1, 1, D, S), mask: (1, 1, K, S)."""
        cos, sin, mask = rope_cos[0], rope_sin[0], mask[0]
        caches = []
        for layer in self.layers[:-1]:
            hidden, keys, values = layer(hidden, cos, sin, mask)
            caches.append((keys, values))
        last = self.layers[-1]
        caches.append(last.keys_values(last.norm(hidden), cos, sin))
        k, v = (torch.cat(parts).unsqueeze(0) for parts in zip(*caches, strict=True))
        return k, v


def write_checkpoint(recipe_name: str, folder: Path) -> None:
    """Write a Hugging Face folder of a recipe's geometry with random fp16 weights and a small tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from pdconvert.recipe import load_recipe
    from pdconvert.sources import open_source

    config = dict(open_source(load_recipe(recipe_name).source).config)
    for key in ("model_type", "architectures", "dtype", "torch_dtype", "transformers_version"):
        config.pop(key, None)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float16)
    LlamaForCausalLM(LlamaConfig(**config, dtype="float16")).save_pretrained(folder)
    words = Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder)


def write_package(folder: Path, out: Path) -> None:
    """Trace, convert, quantize to 8 bits per channel, save."""
    logging.getLogger("coremltools").setLevel(logging.ERROR)
    import coremltools as ct
    import coremltools.optimize.coreml as cto
    import numpy as np

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    shapes = {
        "hidden": (1, config["hidden_size"], 1, TOKENS),
        "rope_cos": (1, 1, dim, TOKENS),
        "rope_sin": (1, 1, dim, TOKENS),
        "mask": (1, 1, TOKENS, TOKENS),
    }
    with torch.no_grad():
        traced = torch.jit.trace(Prefill(config).eval(), tuple(torch.zeros(s) + 0.1 for s in shapes.values()))
    model = ct.convert(
        traced,
        inputs=[ct.TensorType(name, shape, dtype=np.float16) for name, shape in shapes.items()],
        outputs=[ct.TensorType("k", dtype=np.float16), ct.TensorType("v", dtype=np.float16)],
        minimum_deployment_target=ct.target.iOS18,
        skip_model_load=True,
    )
    del traced
    quantizer = cto.OpLinearQuantizerConfig(mode="linear_symmetric", dtype="int8", granularity="per_channel")
    model = cto.linear_quantize_weights(model, cto.OptimizationConfig(global_config=quantizer))
    model.save(str(out))


def main() -> None:
    """Run one of the two steps."""
    parser = argparse.ArgumentParser(description="The common way, as a yardstick.")
    parser.add_argument("step", choices=("checkpoint", "package"))
    parser.add_argument("source")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    if args.step == "checkpoint":
        write_checkpoint(args.source, args.out)
    else:
        write_package(Path(args.source), args.out)


if __name__ == "__main__":
    sys.exit(main())
