"""Torch modules whose arithmetic is that of the graphs pdconvert emits, for `scripts/conformance.py`.

Hidden states are (1, 64, 1, 32) on channels, or (1, 32, 64) in the form of Hugging Face; 4 heads of 16 share 2
heads of keys and values. Sizes are constants: coremltools 9.0 cannot convert `int(x.shape[i])` with numpy 2.4.
"""

import torch
from torch import Tensor, nn

HIDDEN, TOKENS, PAST, HEADS, KV_HEADS, DIM = 64, 32, 64, 4, 2, 16


class RowMaxNorm(nn.Module):
    """RMSNorm of rows divided by their largest value, along an axis; axis 2 is that of heads, (1, heads, D, S)."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis
        shape = {1: (1, HIDDEN, 1, 1), 2: (1, 1, DIM, 1), -1: (HIDDEN,)}[axis]
        self.register_buffer("gain", torch.rand(shape))

    def forward(self, x: Tensor) -> Tensor:
        peak = torch.maximum(x.abs().amax(self.axis, keepdim=True), torch.tensor(2.0**-13))
        scaled = x / peak
        root_eps = 0.003 * (1.0 / peak)
        mean = (scaled * scaled).mean(self.axis, keepdim=True) + root_eps * root_eps
        return scaled * torch.rsqrt(mean) * self.gain


class PlainNorm(RowMaxNorm):
    """RMSNorm as it is usually written."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(self.axis, keepdim=True) + 1e-5) * self.gain


class LayerNormNorm(RowMaxNorm):
    """RMSNorm as the layer norm of a row beside its negative."""

    def forward(self, x: Tensor) -> Tensor:
        doubled = torch.cat((x, -x), 1).permute(0, 2, 3, 1)
        normal = torch.nn.functional.layer_norm(doubled, (2 * HIDDEN,), eps=1e-5)
        return normal.permute(0, 3, 1, 2).narrow(1, 0, HIDDEN) * self.gain


def rotate(x: Tensor, cos: Tensor, sin: Tensor, axis: int) -> Tensor:
    """RoPE on two halves of an axis."""
    half = DIM // 2
    first, second = x.narrow(axis, 0, half), x.narrow(axis, half, half)
    return x * cos + torch.cat((-second, first), axis) * sin


class GroupedAttention(nn.Module):
    """Attention on (1, heads, D, S) without transposes, keys and values broadcast to their group."""

    def __init__(self, past: bool = False) -> None:
        super().__init__()
        self.past = past
        self.q, self.o = (nn.Conv2d(HIDDEN, HIDDEN, 1, bias=False) for _ in range(2))
        self.k, self.v = (nn.Conv2d(HIDDEN, KV_HEADS * DIM, 1, bias=False) for _ in range(2))

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        q = rotate(self.q(hidden).reshape(1, HEADS, DIM, TOKENS), cos, sin, 2) * DIM**-0.5
        new_k = rotate(self.k(hidden).reshape(1, KV_HEADS, DIM, TOKENS), cos, sin, 2)
        new_v = self.v(hidden).reshape(1, KV_HEADS, DIM, TOKENS)
        k = torch.cat((past[0].narrow(1, KV_HEADS, KV_HEADS), new_k), 3) if self.past else new_k
        v = torch.cat((past[1].narrow(1, KV_HEADS, KV_HEADS), new_v), 3) if self.past else new_v
        mixed = self.attend(q, k, v, mask).reshape(1, HIDDEN, 1, TOKENS)
        return hidden + self.o(mixed), torch.cat((new_k, new_k), 1), torch.cat((new_v, new_v), 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        keys = PAST + TOKENS if self.past else TOKENS
        q = q.reshape(KV_HEADS, HEADS // KV_HEADS, DIM, TOKENS)
        k, v = k.reshape(KV_HEADS, 1, DIM, keys), v.reshape(KV_HEADS, 1, DIM, keys)
        return v @ torch.softmax(k.transpose(2, 3) @ q + mask, 2)


class SingleHeads(GroupedAttention):
    """The same, one head at a time."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        outputs = []
        for head in range(HEADS):
            key, value = k.narrow(1, head // 2, 1), v.narrow(1, head // 2, 1)
            weights = torch.softmax(key.transpose(2, 3) @ q.narrow(1, head, 1) + mask, 2)
            outputs.append(value @ weights)
        return torch.cat(outputs, 1)


class PlainAttention(nn.Module):
    """Attention on (1, S, H) as Hugging Face has it, keys and values repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(HIDDEN, KV_HEADS * DIM, bias=False) for _ in range(2))

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        states = hidden.squeeze(2).transpose(1, 2)
        cos, sin, mask = cos.transpose(2, 3), sin.transpose(2, 3), mask.transpose(2, 3)
        q = rotate(self.q(states).reshape(1, TOKENS, HEADS, DIM).transpose(1, 2), cos, sin, 3)
        k = rotate(self.k(states).reshape(1, TOKENS, KV_HEADS, DIM).transpose(1, 2), cos, sin, 3)
        v = self.v(states).reshape(1, TOKENS, KV_HEADS, DIM).transpose(1, 2)
        keys, values = (
            x[:, :, None].expand(1, KV_HEADS, 2, TOKENS, DIM).reshape(1, HEADS, TOKENS, DIM) for x in (k, v)
        )
        weights = torch.softmax(q @ keys.transpose(2, 3) * DIM**-0.5 + mask, -1)
        mixed = (weights @ values).transpose(1, 2).reshape(1, TOKENS, HIDDEN)
        states = states + self.o(mixed)
        return states.transpose(1, 2).unsqueeze(2), k.transpose(2, 3), v.transpose(2, 3)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, linear: bool = False) -> None:
        super().__init__()

        def layer(inputs: int, outputs: int) -> nn.Module:
            return nn.Linear(inputs, outputs, False) if linear else nn.Conv2d(inputs, outputs, 1, bias=False)

        self.gate, self.up, self.down = layer(HIDDEN, 128), layer(HIDDEN, 128), layer(128, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


class CappedGelu(nn.Module):
    """The activation of a GeGLU, and a softcap."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.nn.functional.gelu(x, approximate="tanh") * 0.02) * 50.0


class Embedding(nn.Module):
    """Token ids to hidden states on channels."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(320, HIDDEN)

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.table(token_ids).permute(0, 2, 1).unsqueeze(2)


class Head(nn.Module):
    """One row of the hidden states, chosen by a one-hot vector, to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(HIDDEN, 320, 1, bias=False)

    def forward(self, hidden: Tensor, row: Tensor) -> Tensor:
        chosen = (hidden.reshape(1, 1, HIDDEN, TOKENS) @ row).reshape(1, HIDDEN, 1, 1)
        return self.head(chosen)


class StateCache(nn.Module):
    """New keys (1, heads, D, S) placed into a state by one-hot rows, and what a layer held before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k_cache", torch.zeros(2, KV_HEADS * DIM, 1, PAST + TOKENS))

    def forward(self, k: Tensor, write: Tensor) -> Tensor:
        layer = self.k_cache.narrow(0, 1, 1).narrow(3, 0, PAST).reshape(1, KV_HEADS, DIM, PAST)
        past = layer * 1.0
        kept = 1 - write.sum(2, keepdim=True)
        placed = (torch.cat((k, k), 1) @ write).reshape(2, KV_HEADS * DIM, 1, PAST + TOKENS)
        self.k_cache.mul_(kept).add_(placed)
        return torch.cat((past, k), 3)


class Scaled(nn.Module):
    """A 1×1 convolution with a bias, times a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(HIDDEN, HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * 0.7


class Quotient(nn.Module):
    """A constant divided by a tensor, beside an input that is an output too."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, torch.tensor(3.0) / hidden


def attention_inputs(past: int = 0) -> dict[str, Tensor]:
    """Inputs of attention."""
    inputs = {
        "hidden": torch.rand(1, HIDDEN, 1, TOKENS),
        "cos": torch.rand(1, 1, DIM, TOKENS),
        "sin": torch.rand(1, 1, DIM, TOKENS),
        "mask": torch.zeros(1, 1, past + TOKENS, TOKENS),
    }
    if past:
        inputs |= {name: torch.rand(1, 2 * KV_HEADS, DIM, past) for name in ("past_k", "past_v")}
    return inputs


CHANNELS = {"hidden": torch.rand(1, HIDDEN, 1, TOKENS)}
ROWS = {"hidden": torch.rand(1, TOKENS, HIDDEN)}

STATES = {"state": ("k_cache",)}
"""Buffers that become states; such a module needs iOS 18."""

MODULES: dict[str, tuple[nn.Module, dict[str, Tensor]]] = {
    "row_max": (RowMaxNorm(1), CHANNELS),
    "row_max_last": (RowMaxNorm(-1), ROWS),
    "plain": (PlainNorm(1), CHANNELS),
    "plain_last": (PlainNorm(-1), ROWS),
    "row_max_heads": (RowMaxNorm(2), {"hidden": torch.rand(1, HEADS, DIM, TOKENS)}),
    "scaled": (Scaled(), CHANNELS),
    "layer_norm": (LayerNormNorm(1), CHANNELS),
    "grouped": (GroupedAttention(), attention_inputs()),
    "grouped_past": (GroupedAttention(past=True), attention_inputs(PAST)),
    "single": (SingleHeads(), attention_inputs()),
    "attention": (PlainAttention(), attention_inputs()),
    "mlp": (Mlp(), CHANNELS),
    "mlp_linear": (Mlp(linear=True), ROWS),
    "gelu": (CappedGelu(), CHANNELS),
    "embedding": (Embedding(), {"token_ids": torch.zeros(1, TOKENS, dtype=torch.int32)}),
    "quotient": (Quotient(), CHANNELS),
    "head": (Head(), CHANNELS | {"row": torch.rand(1, 1, TOKENS, 1)}),
    "state": (
        StateCache(),
        {"k": torch.rand(1, KV_HEADS, DIM, TOKENS), "write": torch.rand(1, 1, TOKENS, PAST + TOKENS)},
    ),
}
