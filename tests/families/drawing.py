"""Small random configs of any family, and what its blocks reach on them; for tests and for the table in docs/."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from checkpoints import (
    expected_outputs,
    head_block,
    layer_block,
    mlx_logits,
    probe_of,
    random_source,
    reference_of,
)

import passes
from pdconvert import families
from pdconvert.errors import InputError
from pdconvert.program import check_family, run_passes, worst_db

Choose = Callable[[Sequence[Any]], Any]
"""Picks one of some values: hypothesis in tests, a seeded generator in the script."""

ROPES: tuple[dict[str, Any], ...] = (
    {},
    {"rope_theta": 5e5},
    {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}},
    {
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
)

FLAGS = (False, True)
VALUES: dict[str, Sequence[Any]] = {
    "tie_word_embeddings": FLAGS,
    "attention_bias": FLAGS,
    "attention_out_bias": FLAGS,
    "mlp_bias": FLAGS,
    "rms_norm_eps": (1e-6, 1e-5, 1e-3),
    "vocab_size": (260, 289, 320),
    "intermediate_size": (1, 24, 40),
    "partial_rotary_factor": (0.5, 0.75, 1.0),
    "embedding_multiplier": (1.0, 12.0),
    "attention_multiplier": (0.015625, 0.3, 1.0),
    "residual_multiplier": (1.0, 0.22),
    "logits_scaling": (1.0, 8.0, 0.7),
    "no_rope_layers": ([1, 0], [0, 1], [1, 1], None),
    "no_rope_layer_interval": (2, 4),
    "use_sliding_window": FLAGS,
    "sliding_window": (None, 3, 5, 9, 600),
    "layer_types": (
        None,
        ["sliding_attention", "full_attention"],
        ["full_attention", "sliding_attention"],
        ["full_attention", "full_attention"],
    ),
    "max_window_layers": (0, 1, 4),
    "query_pre_attn_scalar": (8, 24, 256),
    "attn_logit_softcapping": (2.0, 50.0),
    "final_logit_softcapping": (None, 3.0, 30.0),
    "rope_local_base_freq": (100.0, 1e4),
    "sliding_window_pattern": (2, 6),
    "_sliding_window_pattern": (None,),
}
"""What is drawn for a key that a family knows."""

STRUCTURE = frozenset(
    {"hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"}
)
FIXED = frozenset(
    {"hidden_act", "hidden_activation", "max_position_embeddings", "original_max_position_embeddings"}
)
"""Keys that `draw_config` sets together, and keys that it leaves alone."""


def draw_config(family: ModuleType, choose: Choose) -> dict[str, Any]:
    """A config of a family in which everything that it knows may vary; some are to be refused.

    What its TINY config says is kept half of the time, so that not all are refused where little may vary.
    """
    kv_heads = choose((1, 2, 3))
    heads = kv_heads * choose((1, 2, 4))
    head_dim = choose((2, 8, 12, 16))
    config = {
        **family.TINY,
        "hidden_size": heads * head_dim,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    freedom = choose(("absent", "same", "other"))
    if freedom == "other":
        config["hidden_size"] = heads * choose((4, 6, 20))
    if freedom == "absent" or "head_dim" not in family.KNOWN:
        config.pop("head_dim")
    for key in sorted(VALUES.keys() & family.KNOWN - set(getattr(family, "FIXED", ()))):
        if key not in family.TINY or choose(FLAGS):
            config[key] = choose(VALUES[key])
    return {**config, **choose(ROPES)} if choose(FLAGS) else config


def adapting(config: dict[str, Any], tokens: int, choose: Choose) -> tuple[Any, ...]:
    """All passes that change no weight's grid, in a random choice of their options."""
    scale = families.get(config).read_config(config).layers[0].attention_scale
    return (
        passes.LinearToConv2d(),
        passes.EagerGqaAttention(heads=choose(("grouped", "single"))),
        passes.SafeRmsNorm(method=choose(("row_max", "layer_norm"))),
        passes.RopeAsInput(),
        passes.FoldNormGain(),
        *((passes.FoldAttentionScale(),) if scale != 1 else ()),
        passes.ScaleResidual(factor=choose((0.5, 0.125))),
        *((passes.TruncateLastLayer(),) if choose(FLAGS) else ()),
        passes.FixShapes(tokens=max(1, tokens - choose((0, 3)))),
    )


@dataclass(frozen=True)
class Measured:
    """Worst SQNR in dB over the blocks of a case: plain and adapted against Hugging Face, and of MLX's logits."""

    plain_db: float
    adapted_db: float
    mlx_db: float

    def worst(self, other: Measured) -> Measured:
        """The lower figures of two cases; NaN stays."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Measured(*(math.nan if math.isnan(a + b) else min(a, b) for a, b in pairs))


def refusal(family: ModuleType, config: dict[str, Any]) -> str | None:
    """Why the config is refused, or None."""
    try:
        family.decode_config(config, family.read_config(config))
    except InputError as error:
        return str(error)
    return None


def measure(config: dict[str, Any], choose: Choose) -> Measured:
    """Run both layers, the head and the whole MLX model of a config that is not refused."""
    seed, tokens = choose(range(20)), choose((1, 5, 12, 23, 300))
    source = random_source(config, seed)
    reference = reference_of(source)
    tokens = min(tokens, reference.spec.max_positions - 4)  # beyond them longrope has other factors
    plain = adapted = math.inf
    raw_keys = choose(FLAGS)
    for block in (
        *(layer_block(reference, index, raw_keys=raw_keys) for index in range(2)),
        head_block(reference),
    ):
        probe = probe_of(reference, tokens, seed, int(block.name == "layers.1"))
        expected = expected_outputs(reference, block, probe)
        outputs, first = check_family(block, probe, expected)
        chosen = adapting(config, tokens, choose)
        if block.name == "head":
            names = ("linear_to_conv2d", "safe_rms_norm", "fold_norm_gain", "scale_residual")
            chosen = tuple(item for item in chosen if item.name in names)
        _, outputs, steps = run_passes(block, chosen, probe, expected, outputs)
        assert all(step.passed for step in steps), steps
        plain, adapted = min(plain, first.previous_db), min(adapted, worst_db(expected, outputs))
    ids = (torch.arange(tokens + 4) * 7 % 256).tolist()
    hidden = reference.embed(ids)[None]
    for index in range(2):
        hidden, _ = reference.run(reference.layer(index), hidden)
    wanted = reference.logits(hidden[0], reference.head_tensors())
    family = families.get(config)
    got = mlx_logits(family.decode_config(config, reference.spec), source.values, ids)
    return Measured(plain, adapted, worst_db({"logits": wanted}, {"logits": got}))
