"""Decoder blocks in plain torch, the form that families describe and passes rewrite.

A block starts in the layout of Hugging Face, hidden states as (B, S, H) and heads as (B, heads, S, D).
Passes replace its parts one at a time; `Layout` on the block says which form its inputs and outputs
have, so that a check can run any intermediate form on the same probe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pdconvert.basis import Basis
from pdconvert.model import LayerSpec, ModelSpec, Norms, Rope
from pdconvert.rewriting import rewrite

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
        basis: of the residual stream, hidden in and out; None is the checkpoint's.
    """

    channels_first: bool = False
    heads_first: bool = False
    rope_inputs: bool = False
    raw_keys: bool = False
    residual: float = 1.0
    basis: Basis | None = None


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + eps) · weight along the channels, as Zhang & Sennrich (2019) define it.

    Attributes:
        per_head: the channels are those of one head: its input is (B, heads, S, D), or (1, heads, D, S) where
            heads come first, and not a block's hidden state.
        channel_axis: of the input in its present layout.
    """

    def __init__(self, channels: int, eps: float, *, per_head: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels))
        self.eps = eps
        self.per_head = per_head
        self.channel_axis = -1
        self.gain_is_one = False

    def with_gain(self, x: Tensor) -> Tensor:
        """x times the weight along the channel axis, or x itself once the weight has been folded away."""
        if self.gain_is_one:
            return x
        if self.channel_axis == -1:
            return x * self.weight
        before = (1,) * self.channel_axis
        return x * self.weight.view(*before, -1, *(1,) * (3 - self.channel_axis))

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
        inv_freq = torch.tensor(self.inv_freq, dtype=torch.float64, device=positions.device)
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

    Attributes:
        dim_axis: axis of D where heads are split.
        q_norm, k_norm: norms of q and k before RoPE, or None.
    """

    dim_axis = 3

    def __init__(self, spec: LayerSpec, rope: Rope):
        super().__init__()
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q_proj = nn.Linear(spec.hidden_size, queries, bias=spec.attention_bias)
        self.k_proj = nn.Linear(spec.hidden_size, keys, bias=spec.attention_bias)
        self.v_proj = nn.Linear(spec.hidden_size, keys, bias=spec.attention_bias)
        self.o_proj = nn.Linear(queries, spec.hidden_size, bias=spec.output_bias)
        self.q_norm = self.k_norm = None
        if spec.qk_norm != "none":
            per_head = spec.qk_norm == "head"
            sizes = (spec.head_dim, spec.head_dim) if per_head else (queries, keys)
            self.q_norm, self.k_norm = (RMSNorm(size, spec.norm_eps, per_head=per_head) for size in sizes)
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

    def normed(self, x: Tensor, norm: RMSNorm | None, heads: int) -> Tensor:
        """A projection's output split into heads and, where the family has it, normed: before or after the split."""
        if norm is None:
            return self.split(x, heads)
        return norm(self.split(x, heads)) if norm.per_head else self.split(norm(x), heads)

    def turned(self, x: Tensor, rope: tuple[Tensor, ...]) -> Tensor:
        """Heads after RoPE; as they are in a layer without."""
        return rotate(x, *self.rope(rope), axis=self.dim_axis) if self.spec.rotary else x

    def capped(self, scores: Tensor) -> Tensor:
        """Scores below the cap, where the family has one."""
        return softcap(scores, self.spec.score_cap)

    def merge(self, x: Tensor) -> Tensor:
        """(B, heads, S, D) as input for the output projection."""
        channels = self.spec.heads * self.spec.head_dim
        if self.layout.channels_first:
            return x.transpose(2, 3).reshape(x.shape[0], channels, 1, x.shape[2])
        return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], channels)

    def keys_values(self, hidden: Tensor, rope: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Raw keys (after k_norm), rotated keys and values of the new tokens, split into kv_heads."""
        keys = self.normed(self.k_proj(hidden), self.k_norm, self.spec.kv_heads)
        values = self.split(self.v_proj(hidden), self.spec.kv_heads)
        return keys, self.turned(keys, rope), values

    def queries(self, hidden: Tensor, rope: tuple[Tensor, ...]) -> Tensor:
        """Rotated queries of the new tokens, split into heads."""
        return self.turned(self.normed(self.q_proj(hidden), self.q_norm, self.spec.heads), rope)

    def forward(
        self, hidden: Tensor, rope: tuple[Tensor, ...], mask: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        raw_keys, new_keys, new_values = self.keys_values(hidden, rope)
        queries = self.queries(hidden, rope)
        keys = new_keys if past is None else torch.cat((past[0], new_keys), 2)
        values = new_values if past is None else torch.cat((past[1], new_values), 2)
        repeats = self.spec.heads // self.spec.kv_heads
        keys, values = _repeat_heads(keys, repeats), _repeat_heads(values, repeats)
        scores = self.capped(queries @ keys.transpose(2, 3) * self.scale) + mask
        output = self.o_proj(self.merge(torch.softmax(scores, -1) @ values))
        return output, raw_keys if self.layout.raw_keys else new_keys, new_values


def softcap(x: Tensor, cap: float | None) -> Tensor:
    """cap · tanh(x / cap); x itself without a cap."""
    return x if cap is None else torch.tanh(x * (1 / cap)) * cap


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
    """Attention and MLP with residuals, each with a norm before it, behind it, or both. Returns hidden, k, v.

    The names of the norms are Hugging Face's: post_attention_layernorm stands before the MLP, or, in a layer
    with norms behind, behind the attention; pre_feedforward_layernorm is the one before the MLP there.
    """

    def __init__(self, spec: LayerSpec, rope: Rope):
        super().__init__()
        self.spec = spec
        before, behind = NORMS_BEFORE[spec.norms], NORMS_BEHIND[spec.norms]
        self._add_norms(before[:1])
        self.self_attn = Attention(spec, rope)
        self._add_norms((*behind[:1], *before[1:]))
        self.mlp = GatedMLP(spec)
        self._add_norms(behind[1:])

    def _add_norms(self, names: tuple[str, ...]) -> None:
        for name in names:
            setattr(self, name, RMSNorm(self.spec.hidden_size, self.spec.norm_eps))

    @property
    def residual_writers(self) -> tuple[str, ...]:
        """Parts whose output is added to the residual stream; that output is linear in their parameters."""
        return NORMS_BEHIND[self.spec.norms] or ("self_attn.o_proj", "mlp.down_proj")

    @property
    def residual_readers(self) -> tuple[str, ...]:
        """Norms whose input is the residual stream."""
        return NORMS_BEFORE[self.spec.norms]

    @property
    def residual_linears(self) -> tuple[str, ...]:
        """Linears whose input is the residual stream itself."""
        return () if self.residual_readers else (*INTO_ATTENTION, *INTO_MLP)

    @property
    def norm_consumers(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The linears that alone read each norm's output."""
        return tuple(zip(self.residual_readers, (INTO_ATTENTION, INTO_MLP), strict=False))

    @property
    def query_projection(self) -> str:
        """The part that q comes from, up to a linear map."""
        return "self_attn.q_proj" if self.spec.qk_norm == "none" else "self_attn.q_norm"

    def forward(
        self,
        hidden: Tensor,
        rope: tuple[Tensor, ...],
        mask: Tensor,
        past: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        attended, keys, values = self.self_attn(self.before(hidden, 0), rope, mask, past)
        hidden = self.add(hidden, self.behind(attended, 0))
        return self.add(hidden, self.behind(self.mlp(self.before(hidden, 1)), 1)), keys, values

    def before(self, hidden: Tensor, half: int) -> Tensor:
        """The input of the attention (half 0) or the MLP (half 1)."""
        norms = NORMS_BEFORE[self.spec.norms]
        return getattr(self, norms[half])(hidden) if norms else hidden

    def behind(self, change: Tensor, half: int) -> Tensor:
        """What the attention (half 0) or the MLP (half 1) gives to the residual stream."""
        norms = NORMS_BEHIND[self.spec.norms]
        return getattr(self, norms[half])(change) if norms else change

    def add(self, hidden: Tensor, change: Tensor) -> Tensor:
        """The residual stream after a change."""
        factor = self.spec.residual_multiplier
        return hidden + (change if factor == 1 else change * factor)


NORMS_BEFORE: dict[Norms, tuple[str, ...]] = {
    "before": ("input_layernorm", "post_attention_layernorm"),
    "behind": (),
    "both": ("input_layernorm", "pre_feedforward_layernorm"),
}
"""Names of the norms before attention and MLP."""

NORMS_BEHIND: dict[Norms, tuple[str, ...]] = {
    "before": (),
    "behind": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "both": ("post_attention_layernorm", "post_feedforward_layernorm"),
}
"""Names of the norms behind attention and MLP."""

INTO_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
INTO_MLP = ("mlp.gate_proj", "mlp.up_proj")


def stream_inputs(spec: LayerSpec) -> tuple[str, ...]:
    """Paths, in Hugging Face's layer too, of parts whose first input is the residual stream between its two halves."""
    return NORMS_BEFORE[spec.norms] or ("mlp",)


class KeysValuesLayer(nn.Module):
    """The part of a decoder layer that its keys and values need: norms, k_proj and v_proj. Returns k, v.

    The attention keeps its class, hence its form, and loses the projections that are not used.
    """

    def __init__(self, layer: DecoderLayer):
        super().__init__()
        attention = rewrite(layer.self_attn, lambda module: None)
        for unused in ("q_proj", "q_norm", "o_proj"):
            attention._modules.pop(unused, None)
        if layer.residual_readers:
            self.input_layernorm: Any = layer.input_layernorm
        self.self_attn = attention

    def forward(self, hidden: Tensor, rope: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        hidden = self.input_layernorm(hidden) if NORMS_BEFORE[self.self_attn.spec.norms] else hidden
        raw_keys, keys, values = self.self_attn.keys_values(hidden, rope)
        return (raw_keys if self.self_attn.layout.raw_keys else keys), values


class Head(nn.Module):
    """Final norm and language-model head: (B, S, H) to (B, S, V).

    Attributes:
        divisor: what the logits are divided by.
        cap: c, where the logits are c · tanh(logit / c).
    """

    residual_writers = ()
    residual_readers = ("norm",)
    residual_linears = ()
    norm_consumers = (("norm", ("lm_head",)),)

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        eps: float,
        bias: bool,
        divisor: float = 1.0,
        cap: float | None = None,
    ):
        super().__init__()
        self.norm = RMSNorm(hidden_size, eps)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=bias)
        self.divisor = divisor
        self.cap = cap

    @classmethod
    def of(cls, spec: ModelSpec) -> Head:
        """The head of a model."""
        return cls(
            spec.hidden_size,
            spec.vocab_size,
            spec.norm_eps,
            spec.head_bias,
            spec.logits_divisor,
            spec.logits_cap,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return self.divided(self.lm_head(self.norm(hidden)))

    def divided(self, logits: Tensor) -> Tensor:
        """Logits of a projection, divided and capped where the family does so."""
        return softcap(logits if self.divisor == 1 else logits * (1 / self.divisor), self.cap)

    def pieces(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """What the graph gives: the logits, in one piece or in parts of the vocabulary."""
        return (self(hidden),)
