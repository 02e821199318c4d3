from copy import deepcopy
from typing import Any

import pytest
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
from hypothesis import given, settings
from hypothesis import strategies as st

import passes
from pdconvert.errors import InputError
from pdconvert.families import llama
from pdconvert.program import FAMILY_FLOOR_DB, check_family, run_passes, worst_db

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "theta": {"rope_theta": 5e5},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}},
    "yarn without a length": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    "yarn with betas": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2}
    },
}
ADAPTED = (
    passes.LinearToConv2d(),
    passes.EagerGqaAttention(),
    passes.SafeRmsNorm(),
    passes.RopeAsInput(),
    passes.FixShapes(tokens=12),
)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Small llamas of every geometry and RoPE kind that a checkpoint may have."""
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 4))
    head_dim = 2 * draw(st.integers(1, 6))
    hidden = heads * head_dim
    explicit = draw(st.sampled_from([None, "same", "other"]))
    if explicit == "other":
        hidden = heads * draw(st.integers(1, 6))
    config = {
        **llama.TINY,
        "vocab_size": draw(st.integers(260, 300)),
        "hidden_size": hidden,
        "intermediate_size": draw(st.integers(1, 40)),
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 1e-3])),
        **deepcopy(ROPES[draw(st.sampled_from(list(ROPES)))]),
    }
    if kv_heads == heads and draw(st.booleans()):
        del config["num_key_value_heads"]
    return config if explicit is None else {**config, "head_dim": head_dim}


@settings(deadline=None, max_examples=100, derandomize=True)
@given(config=configs(), seed=st.integers(0, 100), raw_keys=st.booleans(), tokens=st.integers(1, 12))
def test_blocks_of_any_llama_equal_hugging_face(
    config: dict[str, Any], seed: int, raw_keys: bool, tokens: int
) -> None:
    reference = reference_of(random_source(config, seed))
    probe = probe_of(reference, tokens, seed)
    for block in (layer_block(reference, raw_keys=raw_keys), head_block(reference)):
        expected = expected_outputs(reference, block, probe)
        outputs, first = check_family(block, probe, expected)
        assert first.previous_db >= FAMILY_FLOOR_DB
        _, outputs, steps = run_passes(block, ADAPTED, probe, expected, outputs)
        assert worst_db(expected, outputs) >= 60
        assert all(step.passed for step in steps), steps


@pytest.mark.parametrize("rope", list(ROPES))
def test_mlx_turns_keys_as_hugging_face_does(rope: str) -> None:
    """With biases everywhere, over more positions than the RoPE's original length."""
    extra = {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "tie_word_embeddings": True}
    config = {**llama.TINY, **extra, **deepcopy(ROPES[rope])}
    source = random_source(config)
    reference = reference_of(source)
    ids = (torch.arange(100) * 7 % 320).tolist()
    hidden = reference.embed(ids)[None]
    for index in range(2):
        hidden, _ = reference.run(reference.layer(index), hidden)
    expected = reference.logits(hidden[0], reference.head_tensors())
    logits = mlx_logits(llama.decode_config(config, reference.spec), source.values, ids)
    assert worst_db({"logits": expected}, {"logits": logits}) > 100


@pytest.mark.parametrize("rope", list(ROPES))
def test_the_frequencies_are_hugging_faces_own(rope: str) -> None:
    config = {**llama.TINY, **deepcopy(ROPES[rope])}
    spec = llama.read_config(config)
    reference = reference_of(random_source(config))
    assert spec.rope.inv_freq == tuple(reference.rotary.inv_freq.double().tolist())
    assert spec.rope.attention_factor == reference.rotary.attention_scaling
    assert spec.rope.dims == spec.head_dim == 16


RANGE = "is refused: its frequencies change with the prompt's length, so a cache filled in chunks would be wrong; "
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": (
        {"logit_scale": 0.5},
        "the llama family does not know logit_scale=0.5; it may change the result, so remove it if it does not, "
        "or add it to the family file",
    ),
    "dynamic": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        f"rope type 'dynamic' {RANGE}set rope type 'yarn' or 'linear' if the model allows it",
    ),
    "unknown rope": (
        {"rope_scaling": {"rope_type": "foo", "factor": 2.0}},
        "rope type 'foo' is not supported; supported: default, linear, llama3, yarn",
    ),
    "rope type no text": (
        {"rope_scaling": {"rope_type": ["linear"]}},
        "rope type ['linear'] is not supported; supported: default, linear, llama3, yarn",
    ),
    "rope no object": ({"rope_scaling": "linear"}, "rope_scaling must be an object, not 'linear'"),
    "missing factor": (
        {"rope_scaling": {"rope_type": "linear"}},
        "rope type 'linear' needs a positive number factor, found None",
    ),
    "factor a flag": (
        {"rope_scaling": {"rope_type": "yarn", "factor": True}},
        "rope type 'yarn' needs a positive number factor, found True",
    ),
    "factor zero": (
        {"rope_scaling": {"rope_type": "linear", "factor": 0}},
        "rope type 'linear' needs a positive number factor, found 0",
    ),
    "factor NaN": (
        {"rope_scaling": {"rope_type": "linear", "factor": float("nan")}},
        "rope type 'linear' needs a positive number factor, found nan",
    ),
    "llama3 incomplete": (
        {"rope_scaling": {key: value for key, value in LLAMA3.items() if key != "high_freq_factor"}},
        "rope type 'llama3' needs a positive number high_freq_factor, found None",
    ),
    "llama3 reversed": (
        {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}},
        "rope low_freq_factor must be below high_freq_factor",
    ),
    "yarn length": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": -1}},
        "rope original_max_position_embeddings must be a positive number, not -1",
    ),
    "yarn beta": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "32"}},
        "rope beta_fast must be a positive number, not '32'",
    ),
    "unknown rope key": (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "short_factor": 1}},
        "rope type 'linear' has no parameter short_factor; remove it",
    ),
    "rope by layer type": (
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
        "rope type 'default' has no parameter full_attention; remove it",
    ),
    "partial rotation": (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "rope partial_rotary_factor is not supported: all channels of a head rotate",
    ),
    "two ropes": (
        {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "rope_parameters and rope_scaling are both there and differ; keep one",
    ),
    "theta a text": ({"rope_theta": "1e4"}, "rope_theta must be a positive number, not '1e4'"),
    "theta zero": ({"rope_theta": 0}, "rope_theta must be a positive number, not 0"),
    "theta infinite": ({"rope_theta": float("inf")}, "rope_theta must be a positive number, not inf"),
    "heads": (
        {"num_key_value_heads": 3},
        "num_attention_heads 4 is not a multiple of num_key_value_heads 3",
    ),
    "width": (
        {"hidden_size": 66, "head_dim": 16},
        "hidden_size 66 is not a multiple of num_attention_heads 4, which is refused despite head_dim 16",
    ),
    "odd head": ({"head_dim": 15}, "head_dim 15 is odd; RoPE needs pairs"),
    "head of zero": ({"head_dim": 0}, "head_dim must be a positive integer, not 0"),
    "head a float": ({"head_dim": 16.0}, "head_dim must be a positive integer, not 16.0"),
    "layers a flag": ({"num_hidden_layers": True}, "num_hidden_layers must be a positive integer, not True"),
    "size a flag": ({"hidden_size": False}, "hidden_size must be a positive integer, not False"),
    "size a text": ({"vocab_size": "320"}, "vocab_size must be a positive integer, not '320'"),
    "bias a number": ({"attention_bias": 1}, "attention_bias must be true or false, not 1"),
    "tied a text": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false, not 'yes'"),
    "activation": (
        {"hidden_act": "gelu"},
        "hidden_act 'gelu' is not supported: mlx-lm's llama computes silu only",
    ),
    "eps a text": ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number in [0, 1), not '1e-5'"),
    "eps NaN": ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number in [0, 1), not nan"),
    "interleaved": (
        {"rope_interleaved": True},
        "rope_interleaved=true is not supported; only the half-split RoPE is",
    ),
    "window": (
        {"sliding_window": 512},
        "sliding_window is not a llama key with an effect; remove it or set it to null",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_a_config_that_cannot_be_held_is_refused(case: str) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(InputError) as error:
        llama.read_config({**llama.TINY, **changes})
    assert str(error.value) == f"config.json: {message}"


@pytest.mark.parametrize("key", ["attention_factor", "mscale", "mscale_all_dim"])
def test_what_mlx_would_not_read_is_refused_for_decode(key: str) -> None:
    config = {**llama.TINY, "rope_scaling": {"rope_type": "yarn", "factor": 2.0, key: 1.5}}
    with pytest.raises(InputError) as error:
        llama.decode_config(config, llama.read_config(config))
    assert (
        str(error.value) == f"config.json: rope {key}=1.5 is not read by mlx-lm's llama; decode would differ"
    )


SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}


def test_the_config_of_smollm2_is_read_as_it_is() -> None:
    spec = llama.read_config(SMOLLM2)
    layer = spec.layers[0]
    assert (len(spec.layers), layer.heads, layer.kv_heads, layer.head_dim) == (30, 9, 3, 64)
    assert spec.tied and spec.max_positions == 8192 and spec.vocab_size == 49152
    assert spec.rope.inv_freq[1] == pytest.approx(100000 ** (-2 / 64))


def test_a_null_head_dim_follows_from_the_width() -> None:
    assert llama.read_config({**llama.TINY, "head_dim": None}) == llama.read_config(llama.TINY)


def test_missing_values_take_hugging_faces_defaults() -> None:
    from transformers import LlamaConfig

    spec, default = llama.read_config({"model_type": "llama"}), LlamaConfig()
    assert spec.hidden_size == default.hidden_size and spec.vocab_size == default.vocab_size
    assert len(spec.layers) == default.num_hidden_layers and spec.norm_eps == default.rms_norm_eps
    assert spec.layers[0].intermediate_size == default.intermediate_size
    assert (
        spec.kv_heads == default.num_key_value_heads and spec.max_positions == default.max_position_embeddings
    )
    assert spec.tied == default.tie_word_embeddings


SAME_ROPE = {
    "new form, default": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 5e5},
    ),
    "new form, linear": (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "new form without theta": ({"rope_parameters": {"rope_type": "default"}}, {}),
    "old key `type`": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "both forms agree": (
        {"rope_parameters": deepcopy(LLAMA3), "rope_scaling": deepcopy(LLAMA3)},
        {"rope_scaling": LLAMA3},
    ),
    "nulls": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": None, "mscale": None}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    ),
    "empty": ({"rope_scaling": {}, "rope_parameters": None}, {}),
    "whole rotation": ({"rope_parameters": {"partial_rotary_factor": 1.0}}, {}),
}


@pytest.mark.parametrize("case", list(SAME_ROPE))
def test_two_ways_to_write_a_rope_are_one(case: str) -> None:
    one, other = ({**llama.TINY, **deepcopy(changes)} for changes in SAME_ROPE[case])
    spec = llama.read_config(one)
    assert spec == llama.read_config(other)
    assert llama.decode_config(one, spec) == llama.decode_config(other, spec)


def test_bookkeeping_changes_nothing_whatever_it_holds() -> None:
    odd = {"use_cache": "x", "torch_dtype": "float8", "bos_token_id": [1], "id2label": 3, "pad_token_id": -1}
    assert llama.read_config({**llama.TINY, **odd}) == llama.read_config(llama.TINY)


def test_the_decode_config_writes_every_default_in_the_old_keys() -> None:
    config = {**llama.TINY, "rope_parameters": {"rope_type": "yarn", "factor": 2, "rope_theta": 5e5}}
    assert llama.decode_config(config, llama.read_config(config)) == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": 320,
        "max_position_embeddings": 512,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 512},
        "rope_traditional": False,
        "tie_word_embeddings": False,
    }
