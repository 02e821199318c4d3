"""What a model is, independent of its family: plain values that a family file fills in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

QkNorm = Literal["none", "head", "projection"]


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
        attention_bias, output_bias, mlp_bias: of q, k and v; of the attention's output; of the MLP's linears.
        qk_norm: RMSNorm of q and k before RoPE: of each head, or of all heads of the projection together.
        post_norms: the norms stand behind attention and MLP, before their outputs enter the residual stream.
        residual_multiplier: factor on what attention and MLP add to the residual stream.
        rotary: whether q and k rotate; without, the layer knows positions only by the causal mask.
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
    post_norms: bool = False
    residual_multiplier: float = 1.0
    rotary: bool = True


@dataclass(frozen=True)
class ModelSpec:
    """A causal LM: embedding, decoder layers, final norm and head.

    Attributes:
        embedding_scale: factor on the embedding rows.
        logits_divisor: what the logits are divided by.
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
