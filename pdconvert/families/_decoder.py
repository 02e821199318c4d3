"""What decoder-only families have in common: geometry, Hugging Face's config, and mlx-lm's config."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pdconvert.errors import InputError
from pdconvert.families import _windows as windows
from pdconvert.families.config import MOST_LAYERS, flag, is_positive, positive_int
from pdconvert.model import LayerSpec, ModelSpec, Rope

GEOMETRY = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "hidden_act",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
    }
)
"""Config keys of every family that decide what the model computes."""

ROPE = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})
"""Config keys that decide the RoPE, in the old and the new form."""


@dataclass(frozen=True)
class Geometry:
    """The numbers that all families have, checked."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    activation: str
    max_positions: int
    norm_eps: float
    tied: bool

    def layer(self, **features: Any) -> LayerSpec:
        """A layer of this geometry with a family's own features; the attention scale is 1 / √D by default."""
        values = {"attention_scale": self.head_dim**-0.5, **features}
        return LayerSpec(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            norm_eps=self.norm_eps,
            activation=self.activation,
            **values,
        )

    def model(self, model_type: str, layers: tuple[LayerSpec, ...], rope: Rope, **features: Any) -> ModelSpec:
        """A model of this geometry with a family's own features."""
        return ModelSpec(
            model_type=model_type,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            layers=layers,
            rope=rope,
            norm_eps=self.norm_eps,
            tied=self.tied,
            max_positions=self.max_positions,
            **features,
        )


def read_geometry(
    config: dict[str, Any],
    defaults: Mapping[str, Any],
    family: str,
    *,
    free_head_dim: bool,
    even_width: bool = False,
    mlx: str = "",
    activation: tuple[str, str] = ("hidden_act", "silu"),
) -> Geometry:
    """The numbers that all families have.

    Args:
        defaults: Hugging Face's, for keys that are missing or null; without `num_key_value_heads` it follows
            from the heads, as it does where it is null, without `head_dim` from the width.
        free_head_dim: whether head_dim may differ from hidden_size / num_attention_heads.
        even_width: whether transformers wants hidden_size to be a multiple of the heads even with a free head_dim.
        mlx: the mlx-lm model that decodes, where it is another than the family's.
        activation: the config's key for the MLP's activation, and the one that mlx-lm computes.

    Raises:
        InputError: a value of the wrong type, or one that Hugging Face or mlx-lm cannot hold.
    """
    mlx = mlx or family
    activation_key, only = activation
    if (given := config.get(activation_key) or only) != only:
        raise InputError(
            f"config.json: {activation_key} {given!r} is not supported: mlx-lm's {mlx} computes {only} only"
        )
    hidden = positive_int(config, "hidden_size", defaults["hidden_size"])
    heads = positive_int(config, "num_attention_heads", defaults["num_attention_heads"])
    missing = heads if "num_key_value_heads" in config else defaults.get("num_key_value_heads", heads)
    kv_heads = positive_int(config, "num_key_value_heads", missing)
    if heads % kv_heads:
        raise InputError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    own_dim = config.get("head_dim") or defaults.get("head_dim")
    if hidden % heads and (even_width or own_dim is None or not free_head_dim):
        despite = f", which is refused despite head_dim {own_dim}" if config.get("head_dim") else ""
        raise InputError(
            f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}{despite}"
        )
    head_dim = positive_int(config, "head_dim", defaults.get("head_dim", hidden // heads))
    if head_dim % 2:
        raise InputError(f"config.json: head_dim {head_dim} is odd; RoPE needs pairs")
    if head_dim * heads != hidden and not free_head_dim:
        raise InputError(
            f"config.json: head_dim {head_dim} is not hidden_size {hidden} / num_attention_heads {heads}; mlx-lm's "
            f"{mlx} ignores head_dim, so decode would differ"
        )
    eps = config.get("rms_norm_eps", defaults.get("rms_norm_eps", 1e-6))
    if not isinstance(eps, int | float) or isinstance(eps, bool) or not 0 <= eps < 1:
        raise InputError(f"config.json: rms_norm_eps must be a number in [0, 1), not {eps!r}")
    return Geometry(
        vocab_size=positive_int(config, "vocab_size", defaults["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=positive_int(config, "intermediate_size", defaults["intermediate_size"]),
        layers=positive_int(config, "num_hidden_layers", defaults["num_hidden_layers"], MOST_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        activation=only,
        max_positions=positive_int(config, "max_position_embeddings", defaults["max_position_embeddings"]),
        norm_eps=float(eps),
        tied=flag(config, "tie_word_embeddings", defaults.get("tie_word_embeddings", False)),
    )


def make_hf_config(
    config_class: str, config: dict[str, Any], keys: Iterable[str], rope: Mapping[str, Any]
) -> Any:
    """The checkpoint's config as a class of transformers, attention in its eager form.

    Only keys that decide the result are handed on (and the range of random weights, for who draws them), so
    that a bookkeeping key which transformers would refuse does no harm.

    Args:
        config_class: name in transformers.
        keys: that decide the result; null values take the class's default.
        rope: from `rope_parameters`.

    Raises:
        InputError: transformers refuses a value.
    """
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    values = {key: config[key] for key in sorted({*keys, "initializer_range"}) if config.get(key) is not None}
    values["rope_parameters"] = dict(rope)
    values |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    if isinstance(values.get("rms_norm_eps"), int):
        values["rms_norm_eps"] = float(values["rms_norm_eps"])
    family_class = getattr(transformers, config_class)
    if config.get("num_key_value_heads", 1) is None:
        values["num_key_value_heads"] = values.get("num_attention_heads", family_class.num_attention_heads)
    try:
        result = family_class(**values)
    except (TypeError, ValueError, KeyError, ArithmeticError, StrictDataclassError) as error:
        family = config.get("model_type")
        reason = " ".join(str(error).split())
        raise InputError(f"config.json: transformers refuses this {family} config: {reason}") from error
    result._attn_implementation = "eager"
    return result


def require(config: dict[str, Any], values: Mapping[str, Any], family: str) -> None:
    """Raise InputError unless every key is missing, null, or has the one value that the family knows."""
    for key, value in values.items():
        if config.get(key) not in (None, value):
            raise InputError(f"config.json: {key}={config[key]!r} is not supported by the {family} family")


def number(config: dict[str, Any], key: str, default: float) -> float:
    """The positive number under `key`; a null or missing value takes the default."""
    value = default if config.get(key) is None else config[key]
    if not is_positive(value):
        raise InputError(f"config.json: {key} must be a positive number, not {value!r}")
    return float(value)


def layer_names(index: int, spec: ModelSpec, norms: tuple[str, ...]) -> dict[str, str]:
    """Names of layer `index` in the block and in the checkpoint, where the two have the same parts."""
    layer = spec.layers[index]
    names = [f"{norm}.weight" for norm in norms]
    biased = {"q_proj": layer.attention_bias, "k_proj": layer.attention_bias, "v_proj": layer.attention_bias}
    biased["o_proj"] = layer.output_bias
    for projection, bias in biased.items():
        names += [f"self_attn.{projection}.weight"] + [f"self_attn.{projection}.bias"] * bias
    if layer.qk_norm != "none":
        names += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    for projection in ("gate_proj", "up_proj", "down_proj"):
        names += [f"mlp.{projection}.weight"] + [f"mlp.{projection}.bias"] * layer.mlp_bias
    return {name: f"model.layers.{index}.{name}" for name in names}


def decode_base(
    spec: ModelSpec, class_name: str, rope: Mapping[str, Any], *, holds_windows: bool = False
) -> dict[str, Any]:
    """The mlx-lm config that most of its models read, every default written out, in the old-style keys.

    Args:
        holds_windows: whether mlx-lm's model can have window layers; the family writes their keys.

    Raises:
        InputError: mlx-lm would load the config and compute something else.
    """
    if not holds_windows:
        windows.refuse(spec, f"mlx-lm's {spec.model_type} has no windows, so decode would differ")
    layer = spec.layers[0]
    if not layer.norm_eps:
        raise InputError(
            "config.json: rms_norm_eps is 0, which mlx-lm refuses; set it to a small number, such as 1e-6"
        )
    return {
        "model_type": spec.model_type,
        "architectures": [class_name],
        "hidden_size": spec.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": layer.heads,
        "num_key_value_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": layer.activation,
        "rms_norm_eps": layer.norm_eps,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": _decode_scaling(spec, rope),
        "tie_word_embeddings": spec.tied,
    }


def _decode_scaling(spec: ModelSpec, rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """mlx-lm's `rope_scaling`; None for plain RoPE."""
    kind = rope["rope_type"]
    if kind == "default":
        return None
    by_factor = 1 + 0.1 * math.log(rope["factor"]) if rope.get("factor", 0) > 1 else 1.0
    for key in ("attention_factor", "truncate", "mscale", "mscale_all_dim"):
        stated = rope.get(key)
        if key == "attention_factor" and stated is not None and math.isclose(stated, by_factor, rel_tol=1e-6):
            continue  # what both compute from the factor
        if stated is not None:
            raise InputError(
                f"config.json: rope {key}={rope[key]!r} is not read by mlx-lm's {spec.model_type}; decode would differ"
            )
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "attention_factor")}
    if kind == "yarn":
        scaling.setdefault("original_max_position_embeddings", spec.max_positions)
    return scaling
