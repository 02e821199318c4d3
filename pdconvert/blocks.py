"""Decoder blocks in plain torch, the form that families describe and passes rewrite.

A block starts in the layout of Hugging Face, hidden states as (B, S, H) and heads as (B, heads, S, D).
Passes replace its parts one at a time; `Layout` on the block says which form its inputs and outputs
have, so that a check can run any intermediate form on the same probe.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pdconvert.model import LayerSpec, Rope

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_pytorch_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu": nn.functional.relu,
}


@dataclass(frozen=True)
class Layout:
    """Form of a block's inputs and outputs.

    Attributes:
        channels_first: hidden is (1, H, 1, S) instead of (B, S, H).
        heads_first: k, v and past are (1, heads, D, S) and the mask (1, 1, K, S) instead of
            (B, heads, S, D) and (B, 1, S, K).
        rope_inputs: `rope_cos` and `rope_sin` are inputs instead of `positions`.
        raw_keys: the k that comes out is taken before RoPE.
        residual: factor on the residual stream, hidden in and out; a power of two.
    """

    channels_first: bool = False
    heads_first: bool = False
    rope_inputs: bool = False
    raw_keys: bool = False
    residual: float = 1.0


def rewrite(module: nn.Module, change: Callable[[nn.Module], nn.Module | None]) -> Any:
    """A new module tree in which `change(child)` replaces every module it returns a module for.

    Parameters and buffers are shared with the original, which is left as it was. Children are
    rewritten before their parents, so `change` sees the new children.
    """
    new = copy.copy(module)
    new.__dict__ = dict(module.__dict__)
    new._parameters = dict(module._parameters)
    new._buffers = dict(module._buffers)
    new._modules = {
        name: None if child is None else rewrite(child, change) for name, child in module._modules.items()
    }
    return change(new) or new


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + eps) · weight along the channels, as Zhang & Sennrich (2019) define it."""

    def __init__(self, channels: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels))
        self.eps = eps
        self.channel_axis = -1
        self.gain_is_one = False

    def with_gain(self, x: Tensor) -> Tensor:
        """x times the weight along the channel axis, or x itself once the weight has been folded away."""
        if self.gain_is_one:
            return x
        return x * (self.weight if self.channel_axis == -1 else self.weight.view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        mean_square = (x * x).mean(self.channel_axis, keepdim=True)
        return self.with_gain(x * torch.rsqrt(mean_square + self.eps))


class RotaryTable(nn.Module):
    """cos and sin of positions (B, S), each (B, 1, S, D) with both halves filled."""

    def __init__(self, rope: Rope):
        super().__init__()
        self.inv_freq = rope.inv_freq
        self.attention_factor = rope.attention_factor

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        inv_freq = torch.tensor(self.inv_freq, dtype=torch.float64)
        angles = positions[:, None, :, None].double() * inv_freq
        angles = torch.cat((angles, angles), -1)
        factor = self.attention_factor
        return (angles.cos() * factor).float(), (angles.sin() * factor).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, axis: int) -> Tensor:
    """RoPE in the half-split form of Hugging Face on the first channels of `axis`, as many as cos has."""
    dims, total = cos.shape[axis], x.shape[axis]
    turning = x if dims == total else x.narrow(axis, 0, dims)
    first, second = turning.narrow(axis, 0, dims // 2), turning.narrow(axis, dims // 2, dims // 2)
    turned = turning * cos + torch.cat((-second, first), axis) * sin
    return turned if dims == total else torch.cat((turned, x.narrow(axis, dims, total - dims)), axis)


class Attention(nn.Module):
    """Causal attention with grouped KV heads, in the (B, heads, S, D) form, K and V repeated.

    Returns the attention output, and the block's own keys and values (new tokens only).
    """

    def __init__(self, spec: LayerSpec, rope: Rope):
        super().__init__()
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q_proj = nn.Linear(spec.hidden_size, queries, bias=spec.attention_bias)
        self.k_proj = nn.Linear(spec.hidden_size, keys, bias=spec.attention_bias)
        self.v_proj = nn.Linear(spec.hidden_size, keys, bias=spec.attention_bias)
        self.o_proj = nn.Linear(queries, spec.hidden_size, bias=spec.output_bias)
        self.table = RotaryTable(rope)
        self.spec = spec
        self.scale = spec.attention_scale
        self.layout = Layout()

    def rope(self, rope: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """cos and sin, from positions or as they came in."""
        if self.layout.rope_inputs:
            cos, sin = rope
            return cos, sin
        cos, sin = self.table(rope[0])
        return (cos.transpose(2, 3), sin.transpose(2, 3)) if self.layout.heads_first else (cos, sin)

    def split(self, x: Tensor, heads: int) -> Tensor:
        """A projection's output as (B, heads, S, D)."""
        if self.layout.channels_first:
            return x.reshape(x.shape[0], heads, self.spec.head_dim, x.shape[3]).transpose(2, 3)
        return x.reshape(x.shape[0], x.shape[1], heads, self.spec.head_dim).transpose(1, 2)

    def merge(self, x: Tensor) -> Tensor:
        """(B, heads, S, D) as input for the output projection."""
        channels = self.spec.heads * self.spec.head_dim
        if self.layout.channels_first:
            return x.transpose(2, 3).reshape(x.shape[0], channels, 1, x.shape[2])
        return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], channels)

    def keys_values(self, hidden: Tensor, rope: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Raw keys, rotated keys and values of the new tokens, each (B, kv_heads, S, D)."""
        keys = self.split(self.k_proj(hidden), self.spec.kv_heads)
        values = self.split(self.v_proj(hidden), self.spec.kv_heads)
        return keys, rotate(keys, *self.rope(rope), axis=3), values

    def forward(
        self, hidden: Tensor, rope: tuple[Tensor, ...], mask: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        raw_keys, new_keys, new_values = self.keys_values(hidden, rope)
        queries = rotate(self.split(self.q_proj(hidden), self.spec.heads), *self.rope(rope), axis=3)
        keys = new_keys if past is None else torch.cat((past[0], new_keys), 2)
        values = new_values if past is None else torch.cat((past[1], new_values), 2)
        repeats = self.spec.heads // self.spec.kv_heads
        keys, values = _repeat_heads(keys, repeats), _repeat_heads(values, repeats)
        scores = queries @ keys.transpose(2, 3) * self.scale + mask
        output = self.o_proj(self.merge(torch.softmax(scores, -1) @ values))
        return output, raw_keys if self.layout.raw_keys else new_keys, new_values


def _repeat_heads(x: Tensor, repeats: int) -> Tensor:
    if repeats == 1:
        return x
    batch, heads, length, dim = x.shape
    x = x[:, :, None].expand(batch, heads, repeats, length, dim)
    return x.reshape(batch, heads * repeats, length, dim)


class GatedMLP(nn.Module):
    """down(activation(gate(x)) · up(x)); SwiGLU where the activation is silu (Shazeer 2020)."""

    def __init__(self, spec: LayerSpec):
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)
        self.activation = spec.activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ACTIVATIONS[self.activation](self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP with residuals. Returns hidden, k, v.

    Attributes:
        residual_writers: parts whose output is added to the residual stream.
        residual_readers: norms whose input is the residual stream.
        norm_consumers: the linears that alone read each norm's output.
        query_projection: the part that q comes from, up to a linear map.
    """

    residual_writers = ("self_attn.o_proj", "mlp.down_proj")
    residual_readers = ("input_layernorm", "post_attention_layernorm")
    norm_consumers = (
        ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    )
    query_projection = "self_attn.q_proj"

    def __init__(self, spec: LayerSpec, rope: Rope):
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.self_attn = Attention(spec, rope)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.mlp = GatedMLP(spec)

    def forward(
        self,
        hidden: Tensor,
        rope: tuple[Tensor, ...],
        mask: Tensor,
        past: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        attended, keys, values = self.self_attn(self.input_layernorm(hidden), rope, mask, past)
        hidden = hidden + attended
        hidden = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return hidden, keys, values


class KeysValuesLayer(nn.Module):
    """The part of a decoder layer that its keys and values need: norm, k_proj and v_proj. Returns k, v.

    The attention keeps its class, hence its form, and loses the projections that are not used.
    """

    def __init__(self, layer: DecoderLayer):
        super().__init__()
        attention = rewrite(layer.self_attn, lambda module: None)
        for unused in ("q_proj", "o_proj"):
            del attention._modules[unused]
        self.input_layernorm = layer.input_layernorm
        self.self_attn = attention

    def forward(self, hidden: Tensor, rope: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        raw_keys, keys, values = self.self_attn.keys_values(self.input_layernorm(hidden), rope)
        return (raw_keys if self.self_attn.layout.raw_keys else keys), values


class Head(nn.Module):
    """Final norm and language-model head: (B, S, H) to (B, S, V)."""

    residual_writers = ()
    residual_readers = ("norm",)
    norm_consumers = (("norm", ("lm_head",)),)

    def __init__(self, hidden_size: int, vocab_size: int, eps: float, bias: bool):
        super().__init__()
        self.norm = RMSNorm(hidden_size, eps)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))
