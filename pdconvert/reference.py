"""The reference: Hugging Face's own modules in fp32, one decoder layer at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pdconvert.blocks import softcap
from pdconvert.families.config import reference_class
from pdconvert.layer_tensors import read_layer, reference_state
from pdconvert.model import ModelSpec
from pdconvert.program import Probe
from pdconvert.sources.base import Source

KEEP_BYTES = 1 << 30
"""Layers stay in memory between uses if all of them together take no more than this in fp32."""


class Capture:
    """A stand-in for transformers' cache of one layer: keeps what the layer gives it, after an optional past."""

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None):
        self._keys, self._values = keys, values

    @property
    def keys(self) -> Tensor:
        """(B, kv_heads, S, D), rotated, as the layer gave them."""
        assert self._keys is not None, "the layer has not run"
        return self._keys

    @property
    def values(self) -> Tensor:
        """(B, kv_heads, S, D)."""
        assert self._values is not None, "the layer has not run"
        return self._values

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new keys and values, (B, kv_heads, S, D), and return all of them."""
        self._keys = keys if self._keys is None else torch.cat((self._keys, keys), 2)
        self._values = values if self._values is None else torch.cat((self._values, values), 2)
        return self._keys, self._values


@dataclass
class Reference:
    """Runs a checkpoint's layers as Hugging Face defines them.

    Attributes:
        source: where tensors are read from, one at a time.
        family: the family module.
        spec: the model's geometry.
        attention: transformers' name of the function that computes attention.
    """

    source: Source
    family: ModuleType
    spec: ModelSpec
    attention: str = "eager"
    _kept: dict[int, nn.Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config = self.family.hf_config(self.source.config)
        self.config._attn_implementation = self.attention
        self.rotary = reference_class(self.family.ROTARY)(self.config)
        sizes = [info.shape for name, info in self.source.tensors().items() if ".layers." in name]
        self.keeps_layers = sum(4 * _product(shape) for shape in sizes) <= KEEP_BYTES

    def read_layer(self, index: int) -> dict[str, Tensor]:
        """The fp32 tensors of a layer by their names in the block."""
        return read_layer(self.source.read, self.family, index, self.spec)

    def module(self, index: int, tensors: Mapping[str, Tensor]) -> nn.Module:
        """Hugging Face's layer `index` holding `tensors`, given by block name; it shares what it does not fuse."""
        with torch.device("meta"):
            layer = reference_class(self.family.LAYER)(self.config, index)
        state = reference_state(tensors, self.family, index, self.spec)
        layer.load_state_dict(state, strict=True, assign=True)
        return layer.eval().requires_grad_(False)

    def layer(self, index: int) -> nn.Module:
        """Hugging Face's layer `index` with the checkpoint's weights, kept if the model is small."""
        if index in self._kept:
            return self._kept[index]
        layer = self.module(index, self.read_layer(index))
        if self.keeps_layers:
            self._kept[index] = layer
        return layer

    def keep(self, index: int, layer: nn.Module) -> None:
        """Keep a layer that was made elsewhere with the checkpoint's own weights."""
        self._kept[index] = layer

    def release(self) -> None:
        """Drop the layers that were kept."""
        self._kept.clear()

    def rope(self, positions: Tensor, index: int = 0) -> tuple[Tensor, Tensor]:
        """cos and sin, each (1, S, D), of positions (S,), as Hugging Face computes them for layer `index`."""
        if self.spec.local_rope is None:
            return self.rotary(torch.zeros(1), positions[None])
        kind = "sliding_attention" if self.spec.layers[index].local_rope else "full_attention"
        return self.rotary(torch.zeros(1), positions[None], kind)

    def probe(self, index: int, hidden: Tensor) -> Probe:
        """What layer `index` is run on: (B, S, H) at positions 0 … S − 1."""
        positions = torch.arange(hidden.shape[1])
        cos, sin = self.rope(positions, index)
        return Probe(hidden, positions, cos[0], sin[0])

    def run(
        self,
        layer: nn.Module,
        hidden: Tensor,
        start: int = 0,
        cache: Capture | None = None,
        state: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, Capture]:
        """Run a layer causally, within its window, on (B, S, H) at positions start, start + 1, …

        Args:
            state: parameters by name to use instead of the layer's own; gradients flow to them.

        Returns:
            The new hidden states and the cache with all keys (rotated) and values.
        """
        cache = cache or Capture()
        attention: Any = layer.self_attn
        length, index = hidden.shape[1], attention.layer_idx
        window = self.spec.layers[index].window
        hides = torch.full((length, start + length), torch.finfo(torch.float32).min)
        mask = (hides.triu(start + 1) + (hides.tril(start - window) if window else 0))[None, None]
        positions = torch.arange(start, start + length)
        rope = tuple(table.to(hidden.device) for table in self.rope(positions, index))
        options = {"attention_mask": mask.to(hidden.device), "position_embeddings": rope, "cache": cache}
        output = functional_call(layer, state, (hidden,), options) if state else layer(hidden, **options)
        return output, cache

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """(S,) token ids to (S, H), scaled where the family scales them."""
        rows = self.source.read_rows("model.embed_tokens.weight", list(token_ids))
        return rows * self.spec.embedding_scale

    def head_tensors(self) -> dict[str, Tensor]:
        """The final norm's and the head's tensors by their names in the head block."""
        head = "model.embed_tokens.weight" if self.spec.tied else "lm_head.weight"
        tensors = {
            "norm.weight": self.source.read("model.norm.weight") + self.spec.gain_offset,
            "lm_head.weight": self.source.read(head),
        }
        if self.spec.head_bias:
            tensors["lm_head.bias"] = self.source.read("lm_head.bias")
        return tensors

    def logits(self, hidden: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Final norm and head on (…, H): (…, V), divided and capped where the family does so."""
        norm = reference_class(self.family.NORM)(self.spec.hidden_size, self.spec.norm_eps)
        gain = tensors["norm.weight"] - self.spec.gain_offset
        norm.weight = nn.Parameter(gain, requires_grad=False)
        logits = nn.functional.linear(norm(hidden), tensors["lm_head.weight"], tensors.get("lm_head.bias"))
        return softcap(logits / self.spec.logits_divisor, self.spec.logits_cap)

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Continuation]:
        """Greedy continuations, all prompts together, so that each layer is read once per step."""
        head = self.head_tensors()
        results = [Continuation([], []) for _ in prompts]
        caches: list[list[Capture]] = [[Capture() for _ in self.spec.layers] for _ in prompts]
        pending, starts = [list(prompt) for prompt in prompts], [0] * len(prompts)
        for _ in range(tokens):
            states = [self.embed(ids)[None] for ids in pending]
            for index in range(len(self.spec.layers)):
                layer = self.layer(index)
                for which, cache in enumerate(caches):
                    states[which], _ = self.run(layer, states[which], starts[which], cache[index])
            for which, state in enumerate(states):
                best = self.logits(state[0, -1], head).topk(2)
                results[which].token_ids.append(int(best.indices[0]))
                results[which].margins.append(float(best.values[0] - best.values[1]))
                starts[which] += len(pending[which])
                pending[which] = [results[which].token_ids[-1]]
        return results


@dataclass(frozen=True)
class Continuation:
    """Greedy tokens and, for each, how far its logit is above the second best."""

    token_ids: list[int]
    margins: list[float]


def _product(shape: Sequence[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
