"""The config that a GGUF file implies, and metadata that is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import METADATA, opened, write_gguf

from pdconvert.errors import InputError


def config_of(tmp_path: Path, embedding: torch.Tensor | None = None, **changes: Any) -> dict[str, Any]:
    """The config of a file with changed metadata; None removes a key."""
    metadata = {k: v for k, v in (METADATA | changes).items() if v is not None}
    table = torch.zeros(320, 64) if embedding is None else embedding
    tensors = {"token_embd.weight": table, "output_norm.weight": torch.ones(table.shape[1])}
    return opened(write_gguf(tmp_path / "m.gguf", tensors, metadata)).config


def test_the_config(tmp_path: Path) -> None:
    assert config_of(tmp_path) == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "head_dim": 16,
        "vocab_size": 320,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
    }


def test_defaults_of_absent_keys(tmp_path: Path) -> None:
    absent = ("attention.head_count_kv", "rope.freq_base", "rope.dimension_count", "vocab_size")
    config = config_of(tmp_path, torch.zeros(300, 64), **{f"llama.{key}": None for key in absent})
    assert config["num_key_value_heads"] == 4
    assert config["rope_theta"] == 10000.0
    assert config["head_dim"] == 16
    assert config["vocab_size"] == 300


def test_a_head_size_of_its_own(tmp_path: Path) -> None:
    own = dict.fromkeys(
        ("llama.attention.key_length", "llama.attention.value_length", "llama.rope.dimension_count"), 32
    )
    assert config_of(tmp_path, **own)["head_dim"] == 32


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        ({"llama.rope.scaling.type": "none"}, None),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 64,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, changes: dict[str, Any], scaling: dict[str, Any] | None) -> None:
    assert config_of(tmp_path, **changes).get("rope_scaling") == scaling


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (4.0, 4096)])
def test_llama3_scaling_is_found_again_from_its_divisors(
    tmp_path: Path, factor: float, original: int
) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    config = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        head_dim=128,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_scaling=dict(scaling),
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    divisors = 500000.0 ** (-torch.arange(0, 128, 2) / 128) / scaled
    metadata = METADATA | {"llama.embedding_length": 512, "llama.rope.dimension_count": 128}
    tensors = {"token_embd.weight": torch.zeros(320, 512), "rope_freqs.weight": divisors}
    source = opened(write_gguf(tmp_path / "m.gguf", tensors, metadata))
    assert source.config["rope_scaling"] == scaling
    assert "rope_freqs.weight" not in source.tensors()


def test_unknown_divisors_are_refused(tmp_path: Path) -> None:
    tensors = {"token_embd.weight": torch.zeros(320, 64), "rope_freqs.weight": torch.linspace(1, 3, 8)}
    with pytest.raises(InputError, match=r"rope_freqs\.weight is not the llama3 scaling of any known"):
        opened(write_gguf(tmp_path / "m.gguf", tensors))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"llama.embedding_length": None}, "llama.embedding_length: absent; expected one number"),
        ({"llama.attention.head_count": [4, 2]}, "llama.attention.head_count: [4, 2]; expected one number"),
        ({"llama.block_count": 3}, "llama.block_count is 3, but the file has 2 tensors"),
        ({"llama.block_count": 1.0}, "llama.block_count: 1.0; expected one number"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count: 0; expected one number"),
        ({"general.alignment": 0}, "general.alignment is 0"),
        ({"llama.expert_count": 8}, "architecture 'llama' is not supported: it is a mixture of experts"),
        ({"llama.attention.scale": 0.5}, "llama.attention.scale (0.5) is not supported"),
        (
            {"llama.rope.dimension_count": 8, "llama.attention.key_length": 16},
            "llama.rope.dimension_count is 8",
        ),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length is 8, but the head size is 16"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported (linear, yarn)"),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.factor: absent"),
        ({"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model 'bert'"),
        (
            {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "new"},
            "tokenizer.ggml.pre 'new' is not supported",
        ),
        ({"split.count": 3}, "one part of 3; join them with `llama-gguf-split --merge`"),
    ],
)
def test_metadata_that_is_not_supported(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError) as caught:
        config_of(tmp_path, **changes)
    assert expected in str(caught.value)


def test_a_key_that_says_no_is_accepted(tmp_path: Path) -> None:
    assert config_of(tmp_path, **{"llama.expert_count": 0})["model_type"] == "llama"


def test_an_unsupported_architecture(tmp_path: Path) -> None:
    for arch, reason in (("mamba", ": it is state-space"), ("phi3", " as GGUF")):
        path = write_gguf(tmp_path / "m.gguf", {"token_embd.weight": torch.zeros(8, 8)}, {}, arch=arch)
        with pytest.raises(InputError, match=f"general.architecture '{arch}' is not supported{reason}"):
            opened(path)


def test_a_tensor_without_a_place(tmp_path: Path) -> None:
    for name in ("blk.2.attn_q.weight", "blk.0.ffn_gate_exps.weight", "token_embd.scale"):
        tensors = {"token_embd.weight": torch.zeros(320, 64), name: torch.zeros(4, 4)}
        with pytest.raises(InputError, match=f"tensor {name} is left over: llama with 1 layers"):
            opened(write_gguf(tmp_path / "m.gguf", tensors))


def test_a_file_without_embedding(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no tensor token_embd\.weight"):
        opened(write_gguf(tmp_path / "m.gguf", {"output_norm.weight": torch.zeros(64)}))
