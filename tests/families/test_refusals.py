"""What is refused by name: fields that change the result and that a half cannot hold, and whole architectures."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from pdconvert import families
from pdconvert.errors import InputError

LONG = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
"""What phi3's tiny config holds: 12 of 16 channels rotate."""
SHORTER = "set max_position_embeddings to at most 64 to convert it for texts of that length"
NO_WINDOWS = f"has no windows, so decode would differ; {SHORTER}"
EVERY_LAYER = f"mlx-lm's llama, which decodes it, cannot have a window in every layer; {SHORTER}"

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "free head_dim of qwen2": (
        "qwen2",
        {"head_dim": 32},
        "head_dim 32 is not hidden_size 64 / num_attention_heads 4; mlx-lm's qwen2 ignores head_dim, so decode would "
        "differ",
    ),
    "free head_dim of granite": (
        "granite",
        {"head_dim": 8},
        "head_dim 8 is not hidden_size 64 / num_attention_heads 4; mlx-lm's granite ignores head_dim, so decode would "
        "differ",
    ),
    "free head_dim of phi3": (
        "phi3",
        {"head_dim": 8},
        "head_dim 8 is not hidden_size 64 / num_attention_heads 4; mlx-lm's phi3 ignores head_dim, so decode would "
        "differ",
    ),
    "window layers of qwen2": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
        f"sliding_window 64 is not supported for qwen2: mlx-lm's qwen2 {NO_WINDOWS}",
    ),
    "layer types of qwen3": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 64,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        f"sliding_window 64 is not supported for qwen3: mlx-lm's qwen3 {NO_WINDOWS}",
    ),
    "layer types against the flag": (
        "qwen3",
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types has sliding_attention, but use_sliding_window is false; make them agree",
    ),
    "layer types too few": (
        "qwen2",
        {"layer_types": ["full_attention"]},
        "layer_types must name full_attention or sliding_attention for each of the 2 layers, not ['full_attention']",
    ),
    "layer types of another kind": (
        "ministral",
        {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
        "layer_types must name full_attention or sliding_attention for each of the 3 layers, not ['full_attention', "
        "'chunked_attention', 'full_attention']",
    ),
    "windows in every layer of smollm3": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["sliding_attention"] * 3},
        f"sliding_window 64 is not supported for smollm3: {EVERY_LAYER}",
    ),
    "window of mistral": (
        "mistral",
        {"sliding_window": 64},
        f"sliding_window 64 is not supported for mistral: {EVERY_LAYER}",
    ),
    "window of phi3": (
        "phi3",
        {"sliding_window": 64},
        f"sliding_window 64 is not supported for phi3: mlx-lm's phi3 {NO_WINDOWS}",
    ),
    "window a flag": (
        "mistral",
        {"sliding_window": True},
        "sliding_window must be a positive integer or null, not True",
    ),
    "window of gemma2": (
        "gemma2",
        {"sliding_window": 64},
        f"sliding_window 64 is not supported for gemma2: mlx-lm's gemma2 {NO_WINDOWS}",
    ),
    "no window of gemma3": (
        "gemma3_text",
        {"sliding_window": None},
        "sliding_window must be a positive integer, not None",
    ),
    "no layer without a window": (
        "gemma3_text",
        {"layer_types": None, "sliding_window_pattern": 6},
        "layers [] of type full_attention are not supported: mlx-lm's gemma3_text wants every n-th layer to be one, "
        "and at least one of them",
    ),
    "layers without a window in no order": (
        "gemma3_text",
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        "layers [0, 2] of type full_attention are not supported: mlx-lm's gemma3_text wants every n-th layer to be "
        "one, and at least one of them",
    ),
    "a scaled RoPE in window layers": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
            }
        },
        "rope type 'linear' in window layers is not supported: mlx-lm's gemma3_text scales the RoPE of the other "
        "layers only",
    ),
    "capped logits of gemma3": (
        "gemma3_text",
        {"final_logit_softcapping": 30.0},
        "final_logit_softcapping=30.0 is not supported by the gemma3_text family",
    ),
    "attention to both sides": (
        "gemma3_text",
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention=True is not supported by the gemma3_text family",
    ),
    "biases of gemma3": (
        "gemma3_text",
        {"attention_bias": True},
        "attention_bias=true is not supported: mlx-lm's gemma3_text has no biases, so decode would fail",
    ),
    "scores without a cap": (
        "gemma2",
        {"attn_logit_softcapping": None},
        "attn_logit_softcapping null is not supported: mlx-lm's gemma2 always caps",
    ),
    "a head of its own": (
        "gemma2",
        {"tie_word_embeddings": False},
        "tie_word_embeddings false is not supported: mlx-lm's gemma2 has no head of its own",
    ),
    "scaled RoPE of gemma2": (
        "gemma2",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope type 'linear' is not supported for gemma2: mlx-lm's gemma2 reads rope_theta only, so decode would differ",
    ),
    "another activation of gemma2": (
        "gemma2",
        {"hidden_activation": "silu"},
        "hidden_activation 'silu' is not supported: mlx-lm's gemma2 computes gelu_pytorch_tanh only",
    ),
    "two bases of olmo3": (
        "olmo3",
        {"rope_theta": 10000},
        "rope_theta 10000 is not supported for olmo3: Hugging Face takes 500000 in window layers, mlx-lm one for all, "
        "so prefill and decode would differ",
    ),
    "one kind of layers": (
        "olmo3",
        {"layer_types": ["sliding_attention"] * 3},
        "layer_types with sliding_attention alone is not supported: mlx-lm's olmo3 needs both kinds",
    ),
    "no window of olmo3": (
        "olmo3",
        {"sliding_window": None},
        "sliding_window must be a positive integer, not None",
    ),
    "biases of qwen3": (
        "qwen3",
        {"attention_bias": True},
        "attention_bias=true is not supported: mlx-lm's qwen3 has no biases, so decode would fail",
    ),
    "mrope of qwen2": ("qwen2", {"use_mrope": True}, "use_mrope=True is not supported by the qwen2 family"),
    "longrope with a factor of its own": (
        "phi3",
        {"rope_scaling": {**LONG, "attention_factor": 1.2}},
        "rope attention_factor=1.2 is not supported for phi3: mlx-lm computes it from max_position_embeddings, so "
        "decode would differ",
    ),
    "longrope without a set": (
        "phi3",
        {"rope_scaling": {"type": "su", "long_factor": [4.0] * 6}},
        "rope type 'su' needs a list of positive numbers short_factor",
    ),
    "longrope with a set too small": (
        "phi3",
        {"rope_scaling": {**LONG, "long_factor": [4.0] * 8}},
        "rope long_factor has 8 numbers, and 6 pairs of channels rotate",
    ),
    "longrope with a key that nobody reads": (
        "phi3",
        {"rope_scaling": {**LONG, "beta_fast": 32}},
        "rope type 'default' has no parameter beta_fast; remove it",
    ),
    "longrope elsewhere": (
        "llama",
        {"rope_scaling": LONG},
        "rope type 'longrope' is not supported; supported: default, linear, llama3, yarn",
    ),
    "linear RoPE of phi3": (
        "phi3",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope type 'linear' is not supported for phi3; supported: default, longrope",
    ),
    "half a pair": (
        "phi3",
        {"partial_rotary_factor": 0.2},
        "partial_rotary_factor makes 3 of 16 channels rotate; RoPE needs pairs",
    ),
    "more than a head": (
        "phi3",
        {"partial_rotary_factor": 1.5},
        "partial_rotary_factor must be a number in (0, 1], not 1.5",
    ),
    "partial rotation elsewhere": (
        "qwen3",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "rope partial_rotary_factor is not supported: all channels of a head rotate",
    ),
    "layers without RoPE too few": (
        "smollm3",
        {"no_rope_layers": [1, 0]},
        "no_rope_layers must hold 1 (RoPE) or 0 (none) for each of 3 layers, not [1, 0]",
    ),
    "a multiplier of zero": (
        "granite",
        {"logits_scaling": 0},
        "logits_scaling must be a positive number, not 0",
    ),
    "a multiplier as text": (
        "granite",
        {"embedding_multiplier": "12"},
        "embedding_multiplier must be a positive number, not '12'",
    ),
    "another activation": (
        "olmo2",
        {"hidden_act": "gelu"},
        "hidden_act 'gelu' is not supported: mlx-lm's olmo2 computes silu only",
    ),
    "yarn's own factor": (
        "qwen2",
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 1.5}},
        "rope attention_factor=1.5 is not read by mlx-lm's qwen2; decode would differ",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_a_half_cannot_hold_is_refused(case: str) -> None:
    name, changes, message = REFUSED[case]
    family = families.get({"model_type": name})
    config = {**family.TINY, **changes}
    with pytest.raises(InputError) as error:
        family.decode_config(config, family.read_config(config))
    assert str(error.value) == f"config.json: {message}"


@pytest.mark.parametrize("name", families.names())
def test_null_kv_heads_are_as_many_as_heads(name: str) -> None:
    family = families.get({"model_type": name})
    assert family.read_config({**family.TINY, "num_key_value_heads": None}).kv_heads == 4


def test_a_null_head_dim_is_no_missing_one() -> None:
    family = families.get({"model_type": "seed_oss"})
    assert family.read_config({**family.TINY, "head_dim": None}).head_dim == 16
    missing = {key: value for key, value in family.TINY.items() if key != "head_dim"}
    assert family.read_config(missing).head_dim == 128


def test_a_window_that_hugging_face_assumes_is_refused_too() -> None:
    family = families.get({"model_type": "mistral"})
    config = {key: value for key, value in family.TINY.items() if key != "sliding_window"}
    assert family.read_config(config) == family.read_config(family.TINY)
    longer = {**config, "max_position_embeddings": 8192}
    with pytest.raises(InputError) as error:
        family.decode_config(longer, family.read_config(longer))
    assert (
        "sliding_window 4096 is not supported for mistral: it is Hugging Face's value where the key is"
        in str(error.value)
    )


HARMLESS = {
    "window off": ("qwen2", {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 0}),
    "window as long as the context": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 0},
    ),
    "window from behind the last layer": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    ),
    "layer types all full": ("qwen2", {"layer_types": ["full_attention"] * 2}),
    "head_dim as it follows": ("qwen2", {"head_dim": 16}),
    "a long window": ("mistral", {"sliding_window": 512}),
    "a long window of phi3": ("phi3", {"sliding_window": 2048}),
    "rotation in the new place": (
        "phi3",
        {
            "partial_rotary_factor": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        },
    ),
    "gemma3's layers by their pattern": (
        "gemma3_text",
        {"layer_types": None, "sliding_window_pattern": 2},
    ),
    "gemma3's RoPE in the new form": (
        "gemma3_text",
        {
            "rope_theta": None,
            "rope_local_base_freq": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 20000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "yarn's own factor where it is what the other gives": (
        "olmo3",
        {
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        },
    ),
    "more entries than layers": ("smollm3", {"no_rope_layers": [1, 0, 1, 0, 0]}),
}


@pytest.mark.parametrize("case", list(HARMLESS))
def test_what_changes_nothing_is_accepted(case: str) -> None:
    name, changes = HARMLESS[case]
    family = families.get({"model_type": name})
    config = {**family.TINY, **changes}
    spec = family.read_config(config)
    assert spec == family.read_config(family.TINY)
    assert family.decode_config(config, spec) == family.decode_config(family.TINY, spec)


@pytest.mark.parametrize("name", sorted(families.UNSUPPORTED))
def test_an_unsupported_architecture_is_named(name: str) -> None:
    with pytest.raises(InputError) as error:
        families.get({"model_type": name})
    assert str(error.value).startswith(f"model_type {name!r} is not supported: it is ")


def test_refused_architectures_exist_and_are_no_families() -> None:
    assert not set(families.UNSUPPORTED) - set(CONFIG_MAPPING_NAMES)
    assert not set(families.UNSUPPORTED) & set(families.names())


@pytest.mark.parametrize("model_type", ["mixtral", "mamba2", "qwen2_vl"])
def test_a_build_of_one_is_refused_before_anything_is_read(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    recipe = {
        "version": 1,
        "name": "refused",
        "source": {"path": str(tmp_path / "source")},
        "prefill": {"target": "iOS18", "functions": [{"tokens": 16}]},
        "passes": ["linear_to_conv2d", "rope_as_input"],
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    started = time.monotonic()
    command = [sys.executable, "-X", "importtime", "-m", "pdconvert", "build", str(tmp_path / "recipe.yaml")]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")], capture_output=True, text=True, check=False
    )
    seconds = time.monotonic() - started
    assert done.returncode == 2
    assert f"error: model_type '{model_type}' is not supported: it is" in done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "transformers", "coremltools", "mlx.core"}
    assert not (tmp_path / "out").exists()
    assert seconds < 10, "on a machine with nothing else to do it is well below 2 s"


def test_the_table_in_the_docs_has_every_family_and_every_refused_architecture() -> None:
    """Its figures are measured by scripts/families_table.py, which takes a minute."""
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| `")]
    assert [
        row.strip("`") for row in rows if "," not in row and row.strip("`") in families.names()
    ] == families.names()
    assert all(f"`{name}`" in page for name in families.UNSUPPORTED)
