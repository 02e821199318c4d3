"""Checkpoint folders: what loads, what is copied along."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pdconvert.errors import InputError
from pdconvert.recipe import SourceSpec
from pdconvert.sources import Source, TensorInfo, open_source

Q = "model.layers.0.self_attn.q_proj.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"


def opened(folder: Path) -> Source:
    return open_source(SourceSpec(path=str(folder)))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# What loads


def test_reads_every_tensor(
    checkpoint: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]
) -> None:
    source = opened(checkpoint)
    assert source.config == config
    assert source.tensors()[Q] == TensorInfo((64, 64), "F32")
    assert set(source.tensors()) == set(weights)
    for name, value in weights.items():
        assert torch.equal(source.read(name), value)
    assert not source.random


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.bfloat16, "BF16"), (torch.float16, "F16"), (torch.float64, "F64")]
)
def test_stored_types_become_fp32(
    checkpoint: Path, weights: dict[str, torch.Tensor], dtype: torch.dtype, name: str
) -> None:
    save_file({key: value.to(dtype) for key, value in weights.items()}, checkpoint / "model.safetensors")
    source = opened(checkpoint)
    assert source.tensors()[Q].dtype == name
    assert source.read(Q).dtype == torch.float32
    assert torch.equal(source.read(Q), weights[Q].to(dtype).float())
    rows = source.read_rows("model.embed_tokens.weight", [319, 0, 0])
    assert torch.equal(rows, weights["model.embed_tokens.weight"].to(dtype).float()[[319, 0, 0]])


@pytest.mark.parametrize("metadata", [None, {"format": "mlx"}, {"format": "pt"}])
def test_metadata_of_the_file_does_not_matter(
    checkpoint: Path, weights: dict[str, torch.Tensor], metadata: dict[str, str] | None
) -> None:
    save_file(weights, checkpoint / "model.safetensors", metadata=metadata)
    assert torch.equal(opened(checkpoint).read(Q), weights[Q])


def test_shards_equal_one_file(
    checkpoint: Path, weights: dict[str, torch.Tensor], shard: Callable[..., dict[str, str]]
) -> None:
    shard()
    source = opened(checkpoint)
    assert {name: source.read(name).tolist() for name in source.tensors()} == {
        name: value.tolist() for name, value in weights.items()
    }


@pytest.mark.parametrize("sharded", [False, True])
def test_bin_equals_safetensors(
    checkpoint: Path, weights: dict[str, torch.Tensor], shard: Callable[..., dict[str, str]], sharded: bool
) -> None:
    if sharded:
        shard("bin", torch.save)
    else:
        (checkpoint / "model.safetensors").unlink()
        torch.save(
            {name: value.bfloat16() for name, value in weights.items()}, checkpoint / "pytorch_model.bin"
        )
    source = opened(checkpoint)
    dtype = torch.float32 if sharded else torch.bfloat16
    assert source.tensors()[Q] == TensorInfo((64, 64), "F32" if sharded else "BF16")
    for name, value in weights.items():
        assert torch.equal(source.read(name), value.to(dtype).float())
    assert torch.equal(source.read_rows(Q, [5, 1]), weights[Q].to(dtype).float()[[5, 1]])


def test_reading_a_bin_tensor_gives_a_copy(checkpoint: Path, weights: dict[str, torch.Tensor]) -> None:
    (checkpoint / "model.safetensors").unlink()
    torch.save(weights, checkpoint / "pytorch_model.bin")
    source = opened(checkpoint)
    source.read(Q).zero_()
    assert torch.equal(source.read(Q), weights[Q])


def test_leftover_rotary_buffers_are_ignored(checkpoint: Path, weights: dict[str, torch.Tensor]) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(weights | buffer, checkpoint / "model.safetensors")
    assert set(opened(checkpoint).tensors()) == set(weights)


def test_names_without_the_model_prefix_are_mapped(
    checkpoint: Path, weights: dict[str, torch.Tensor]
) -> None:
    save_file(
        {name.removeprefix("model."): v for name, v in weights.items()}, checkpoint / "model.safetensors"
    )
    source = opened(checkpoint)
    assert set(source.tensors()) == set(weights)
    assert torch.equal(source.read(Q), weights[Q])


def test_the_checkpoints_own_code_is_ignored(checkpoint: Path, tmp_path: Path) -> None:
    flag = tmp_path / "ran"
    (checkpoint / "modeling.py").write_text(f"open({str(flag)!r}, 'w')")
    edit_config(
        checkpoint, auto_map={"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    )
    source = opened(checkpoint)
    source.read(Q)
    out = tmp_path / "out"
    out.mkdir()
    source.write_tokenizer(out)
    assert not flag.exists()
    assert not list(out.glob("*.py"))


def test_a_read_only_folder_is_left_as_it_is(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "tokenizer.json").chmod(0o444)
    before = {path.name: path.stat().st_mtime_ns for path in checkpoint.iterdir()}
    checkpoint.chmod(0o555)
    out = tmp_path / "out"
    out.mkdir()
    try:
        source = opened(checkpoint)
        source.read(Q)
        source.write_tokenizer(out)
    finally:
        checkpoint.chmod(0o755)
    assert {path.name: path.stat().st_mtime_ns for path in checkpoint.iterdir()} == before
    (out / "tokenizer.json").write_text("the copy can be changed")


def test_hashes_cover_what_decides_the_result(checkpoint: Path) -> None:
    hashes = opened(checkpoint).hashes()
    assert set(hashes) == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    content = (checkpoint / "model.safetensors").read_bytes()
    assert hashes["model.safetensors"] == hashlib.sha256(content).hexdigest()


# Tokenizer and licence


def test_tokenizer_files_are_copied_byte_for_byte(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "tokenizer_config.json").write_text('{"tokenizer_class":  "TokenizersBackend"}')
    (checkpoint / "chat_template.jinja").write_text("{{ messages }}")
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [257, 3]}')
    (checkpoint / "additional_chat_templates").mkdir()
    (checkpoint / "additional_chat_templates" / "tool.jinja").write_text("{{ tools }}")
    out = tmp_path / "out"
    out.mkdir()
    source = opened(checkpoint)
    source.write_tokenizer(out)
    written = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert written == {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
        "additional_chat_templates/tool.jinja",
        "LICENSE",
    }
    for name in written:
        assert (out / name).read_bytes() == (checkpoint / name).read_bytes()
    assert source.generation_config == {"eos_token_id": [257, 3]}


def test_license_comes_from_the_model_card(checkpoint: Path) -> None:
    assert opened(checkpoint).license == {"tag": "apache-2.0", "files": ["LICENSE"]}
    (checkpoint / "README.md").write_text("# no header\nlicense: mit\n")
    assert opened(checkpoint).license["tag"] is None


def test_tokenizer_size_counts_added_tokens(checkpoint: Path) -> None:
    assert opened(checkpoint).tokenizer_size() == 320
    (checkpoint / "added_tokens.json").write_text('{"<pad>": 325}')
    assert opened(checkpoint).tokenizer_size() == 326
    config = {"added_tokens_decoder": {"330": {"content": "<x>"}}}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config))
    assert opened(checkpoint).tokenizer_size() == 331


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{}", "no model.vocab"),
        ('{"model": {"vocab": {"a": "0"}}}', "id is not a whole number"),
        ("", "empty (0 bytes)"),
    ],
)
def test_a_damaged_tokenizer_is_named(checkpoint: Path, content: str, expected: str) -> None:
    (checkpoint / "tokenizer.json").write_text(content)
    with pytest.raises(InputError) as caught:
        opened(checkpoint).tokenizer_size()
    assert "tokenizer.json" in str(caught.value)
    assert expected in str(caught.value)


def test_a_unigram_vocabulary_is_a_list(checkpoint: Path) -> None:
    unigram = {"model": {"vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": [{"id": 5, "content": "<x>"}]}
    (checkpoint / "tokenizer.json").write_text(json.dumps(unigram))
    assert opened(checkpoint).tokenizer_size() == 6


def test_a_folder_without_tokenizer_says_so(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    source = opened(checkpoint)
    assert not source.has_tokenizer
    assert source.tokenizer_size() is None
    with pytest.raises(InputError, match=r"no tokenizer \(tokenizer\.json or tokenizer\.model\)"):
        source.write_tokenizer(tmp_path)
