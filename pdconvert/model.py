"""What a model is, independent of its family: plain values that a family file fills in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

QkNorm = Literal["none", "head", "projection"]
Norms = Literal["before", "behind", "both"]


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of one kind of layer.

    Attributes:
        inv_freq: inverse frequencies in radians per token, float64, one per rotated pair.
        attention_factor: factor multiplied into cos and sin (yarn, longrope), 1.0 otherwise.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0

    @property
    def dims(self) -> int:
        """Number of channels of a head that rotate (two per frequency)."""
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class LayerSpec:
    """Geometry of one decoder layer; two layers with equal specs share one lowered graph.

    Attributes:
        attention_scale: factor on q·k.
        score_cap: c, where scores enter the softmax as c · tanh(score / c).
        window: how many tokens a token sees, itself included; None for all before it.
        attention_bias, output_bias, mlp_bias: of q, k and v; of the attention's output; of the MLP's linears.
        qk_norm: RMSNorm of q and k before RoPE: of each head, or of all heads of the projection together.
        norms: where the norms of attention and MLP stand: before each of them, behind them, where their outputs
            enter the residual stream, or both.
        residual_multiplier: factor on what attention and MLP add to the residual stream.
        rotary: whether q and k rotate; without, the layer knows positions only by the causal mask.
        local_rope: whether they rotate by the model's second RoPE.
    """

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    attention_scale: float
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QkNorm = "none"
    norms: Norms = "before"
    residual_multiplier: float = 1.0
    rotary: bool = True
    local_rope: bool = False
    window: int | None = None
    score_cap: float | None = None


@dataclass(frozen=True)
class ModelSpec:
    """A causal LM: embedding, decoder layers, final norm and head.

    Attributes:
        embedding_scale: factor on the embedding rows.
        logits_divisor: what the logits are divided by.
        logits_cap: c, where the logits are c · tanh(logit / c).
        local_rope: the RoPE of layers with `local_rope`.
        gain_offset: what the checkpoint's norm weights lack to be gains: 1 where a family computes x · (1 + weight).
    """

    model_type: str
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    rope: Rope
    norm_eps: float
    tied: bool
    max_positions: int
    head_bias: bool = False
    embedding_scale: float = 1.0
    logits_divisor: float = 1.0
    logits_cap: float | None = None
    local_rope: Rope | None = None
    gain_offset: float = 0.0

    def __post_init__(self) -> None:
        assert len({layer.window for layer in self.layers} - {None}) <= 1, "windows of two sizes"
        assert self.local_rope or not any(layer.local_rope for layer in self.layers), "no local RoPE"

    def rope_of(self, layer: LayerSpec) -> Rope:
        """The RoPE by which a layer rotates."""
        return self.local_rope if layer.local_rope and self.local_rope else self.rope

    @property
    def kv_heads(self) -> int:
        return self.layers[0].kv_heads

    @property
    def head_dim(self) -> int:
        return self.layers[0].head_dim

    @property
    def unrotated_layers(self) -> tuple[int, ...]:
        """Layers whose keys do not rotate."""
        return tuple(index for index, layer in enumerate(self.layers) if not layer.rotary)

    @property
    def local_layers(self) -> tuple[int, ...]:
        """Layers that rotate by the second RoPE."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.local_rope)

    @property
    def window(self) -> int | None:
        """How many tokens a token sees in the layers with a window; None without such layers."""
        return next((layer.window for layer in self.layers if layer.window), None)

    @property
    def window_layers(self) -> tuple[int, ...]:
        """Layers in which a token sees only its window."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.window)


def is_gain(name: str) -> bool:
    """Whether a tensor of a block, or of a checkpoint, belongs to a norm."""
    return name.endswith("norm.weight")
