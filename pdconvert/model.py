"""What a model is, independent of its family: plain values that a family file fills in."""

from __future__ import annotations

from dataclasses import dataclass


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
    """Geometry of one decoder layer; two layers with equal specs share one lowered graph."""

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


@dataclass(frozen=True)
class ModelSpec:
    """A causal LM: embedding, decoder layers, final norm and head."""

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

    @property
    def kv_heads(self) -> int:
        return self.layers[0].kv_heads

    @property
    def head_dim(self) -> int:
        return self.layers[0].head_dim
