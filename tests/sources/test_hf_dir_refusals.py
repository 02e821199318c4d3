"""Checkpoint folders that are refused: one plain message for each way in which one can be wrong."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdconvert.errors import InputError
from pdconvert.recipe import SourceSpec
from pdconvert.sources import Source, open_source

Q = "model.layers.0.self_attn.q_proj.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"


def opened(folder: Path) -> Source:
    return open_source(SourceSpec(path=str(folder)))


def message(folder: Path) -> str:
    """The error of opening a folder, which must be one line."""
    with pytest.raises(InputError) as caught:
        opened(folder)
    text = str(caught.value)
    assert "\n" not in text
    return text


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    state = load_file(folder / "model.safetensors")
    edit(state)
    save_file(state, folder / "model.safetensors")


# What is refused: the folder


def test_missing_parts_are_named(checkpoint: Path, tmp_path: Path) -> None:
    assert "no such folder" in message(tmp_path / "absent")
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "h.incomplete").touch()
    first = message(checkpoint)
    assert "no weights (model.safetensors or pytorch_model.bin)" in first
    assert "download is incomplete" in first
    assert message(checkpoint) == first
    (checkpoint / "config.json").unlink()
    assert "no config.json" in message(checkpoint)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "empty (0 bytes)"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git-lfs pointer"),
        ("{", "not JSON"),
        ("[1]", "expected a JSON object, found list"),
        ("{}", "no model_type"),
    ],
)
def test_a_bad_config_is_explained(checkpoint: Path, content: str, expected: str) -> None:
    (checkpoint / "config.json").write_text(content)
    text = message(checkpoint)
    assert "config.json" in text
    assert expected in text


def test_other_forms_of_a_model_are_pointed_out(tmp_path: Path) -> None:
    for name, hint in (
        ("model.Q4_0.gguf", "give --source"),
        ("adapter_config.json", "merge it into its base"),
        ("consolidated.00.pth", "Hugging Face form"),
    ):
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        (folder / name).write_text("x")
        assert hint in message(folder)


# What is refused: the weight files


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda data: data[:-64], "truncated"),
        (lambda data: data[: len(data) // 2], "truncated"),
        (lambda data: data[:100], "truncated"),
        (lambda data: data[:5], "truncated"),
        (lambda data: b"", "empty (0 bytes)"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs pointer"),
        (lambda data: data + bytes(3), "3 bytes follow its last tensor"),
        (lambda data: data[:8] + b"\xff" + data[9:], "header is not JSON"),
        (lambda data: b"<!DOCTYPE html><html>", "not a safetensors file"),
    ],
)
def test_damaged_safetensors_are_named(
    checkpoint: Path, damage: Callable[[bytes], bytes], expected: str
) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    text = message(checkpoint)
    assert "model.safetensors" in text
    assert expected in text


def test_a_broken_link_is_named(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    os.symlink(checkpoint / "gone", checkpoint / "model.safetensors")
    assert "a link to a file that is gone" in message(checkpoint)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda item: item.update(shape=[64, 65]), "header entry of"),
        (lambda item: item.update(dtype="F99"), "header entry of"),
        (lambda item: item.update(shape=[-64, -64]), "header entry of"),
        (lambda item: item.pop("data_offsets"), "header entry of"),
        (
            lambda item: item.update(data_offsets=[n + 4 for n in item["data_offsets"]]),
            "overlap or leave a gap",
        ),
    ],
)
def test_a_header_that_contradicts_itself(
    checkpoint: Path, edit: Callable[[dict[str, Any]], Any], expected: str
) -> None:
    path = checkpoint / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    edit(header[Q])
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + length :])
    assert expected in message(checkpoint)


def test_a_missing_shard_is_named_with_its_tensors(
    checkpoint: Path, shard: Callable[..., dict[str, str]]
) -> None:
    shard()
    (checkpoint / "model-00002-of-00002.safetensors").unlink()
    text = message(checkpoint)
    assert "model-00002-of-00002.safetensors is missing" in text
    assert "puts 13 tensors there" in text


def test_an_index_that_misplaces_a_tensor(checkpoint: Path, shard: Callable[..., dict[str, str]]) -> None:
    weight_map = shard()
    weight_map[Q], weight_map[GATE] = weight_map[GATE], weight_map[Q]
    _write_index(checkpoint, weight_map)
    text = message(checkpoint)
    assert "model-00001-of-00002.safetensors" in text
    assert Q in text


def test_an_index_that_names_an_absent_tensor(checkpoint: Path, shard: Callable[..., dict[str, str]]) -> None:
    weight_map = shard() | {"model.extra.weight": "model-00001-of-00002.safetensors"}
    _write_index(checkpoint, weight_map)
    assert "puts model.extra.weight into model-00001-of-00002.safetensors, which does not hold it" in message(
        checkpoint
    )


def test_a_stale_index_beside_a_complete_file(checkpoint: Path) -> None:
    _write_index(checkpoint, {Q: "model-00001-of-00002.safetensors"})
    text = message(checkpoint)
    assert "holds model.safetensors and also model.safetensors.index.json" in text
    assert "stale" in text


def test_an_index_may_name_the_single_file(checkpoint: Path, weights: dict[str, torch.Tensor]) -> None:
    _write_index(checkpoint, dict.fromkeys(weights, "model.safetensors"))
    assert torch.equal(opened(checkpoint).read(Q), weights[Q])


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "..", "a\\b", 3])
def test_an_index_cannot_leave_the_folder(checkpoint: Path, name: Any) -> None:
    (checkpoint / "model.safetensors").unlink()
    _write_index(checkpoint, {Q: name})
    assert "is not the name of a file in this folder" in message(checkpoint)


def test_an_index_without_a_map(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors.index.json").write_text("{}")
    assert "no weight_map" in message(checkpoint)


class _Payload:
    """Unpickling it freely would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("sharded", [False, True])
def test_code_in_a_pickle_is_not_run(
    checkpoint: Path,
    weights: dict[str, torch.Tensor],
    shard: Callable[..., dict[str, str]],
    tmp_path: Path,
    sharded: bool,
) -> None:
    flag = tmp_path / "ran"
    if sharded:
        shard("bin", torch.save)
        bad = checkpoint / "pytorch_model-00002-of-00002.bin"
    else:
        (checkpoint / "model.safetensors").unlink()
        bad = checkpoint / "pytorch_model.bin"
    torch.save(weights | {"x": _Payload(flag)}, bad)
    text = message(checkpoint)
    assert bad.name in text
    assert "was not run" in text
    assert "safetensors" in text
    assert not flag.exists()


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (
            lambda path: path.write_bytes(path.read_bytes()[:-100]),
            "truncated, or written by torch before 1.6",
        ),
        (lambda path: path.write_bytes(b""), "empty (0 bytes)"),
        (lambda path: torch.save([torch.ones(2)], path), "expected a state dict, found list"),
        (lambda path: torch.save({"epoch": 3}, path), "epoch is int, not a tensor"),
    ],
)
def test_damaged_bin_files_are_named(
    checkpoint: Path, weights: dict[str, torch.Tensor], write: Callable[[Path], Any], expected: str
) -> None:
    (checkpoint / "model.safetensors").unlink()
    path = checkpoint / "pytorch_model.bin"
    torch.save(weights, path)
    write(path)
    text = message(checkpoint)
    assert "pytorch_model.bin" in text
    assert expected in text


# What is refused: the content


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "(gptq: config.json has 'quantization_config')",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "(awq: "),
        ({"quantization_config": {"quant_method": "fp8"}}, "(fp8: "),
        ({"quantization_config": {"load_in_8bit": True}}, "(method not named: "),
        ({"compression_config": {"format": "pack"}}, "'compression_config'"),
        (
            {
                "quantization": {"bits": 4, "group_size": 64},
                "quantization_config": {"bits": 4, "group_size": 64},
            },
            "(MLX: config.json has 'quantization')",
        ),
    ],
)
def test_a_quantized_config_is_refused(checkpoint: Path, changes: dict[str, Any], expected: str) -> None:
    edit_config(checkpoint, **changes)
    text = message(checkpoint)
    assert "the checkpoint is already quantized " in text
    assert expected in text
    assert text.endswith("give the original checkpoint in bf16, fp16 or fp32")


def test_an_empty_quantization_block_is_no_quantization(checkpoint: Path) -> None:
    edit_config(checkpoint, quantization_config=None)
    opened(checkpoint)


@pytest.mark.parametrize(
    ("extra", "evidence"),
    [
        ({"model.layers.0.mlp.up_proj.qweight": torch.ones(4, 4, dtype=torch.int32)}, "qweight"),
        ({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1, 1)}, "weight_scale_inv"),
        ({"model.layers.0.mlp.up_proj.scales": torch.ones(4, 4)}, "scales"),
        ({"model.layers.0.mlp.up_proj.weight": torch.ones(128, 64).to(torch.float8_e4m3fn)}, "F8_E4M3"),
        ({"model.layers.0.mlp.up_proj.weight": torch.ones(128, 16, dtype=torch.uint8)}, "U8"),
        ({"model.layers.0.mlp.up_proj.SCB": torch.ones(4)}, "SCB"),
        ({"model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4": torch.ones(4)}, "quant_state"),
    ],
)
def test_quantized_tensors_are_refused_without_a_config_block(
    checkpoint: Path, extra: dict[str, torch.Tensor], evidence: str
) -> None:
    change_weights(checkpoint, lambda state: state.update(extra))
    text = message(checkpoint)
    assert "the checkpoint is already quantized " in text
    assert evidence in text


def test_fp8_in_a_bin_file_is_refused(checkpoint: Path, weights: dict[str, torch.Tensor]) -> None:
    (checkpoint / "model.safetensors").unlink()
    torch.save(weights | {Q: weights[Q].to(torch.float8_e5m2)}, checkpoint / "pytorch_model.bin")
    assert "already quantized (fp8: " in message(checkpoint)


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.0.self_attn.q_proj.lora_B.default.weight",
    ],
)
def test_an_adapter_is_refused(checkpoint: Path, name: str) -> None:
    change_weights(checkpoint, lambda state: state.update({name: torch.ones(4, 4)}))
    text = message(checkpoint)
    assert "adapter" in text
    assert name in text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused_when_read(checkpoint: Path, value: float) -> None:
    def spoil(state: dict[str, torch.Tensor]) -> None:
        state[Q][3, 3] = value

    change_weights(checkpoint, spoil)
    source = opened(checkpoint)
    with pytest.raises(InputError, match=f"{Q} holds 1 values that are NaN or infinite"):
        source.read(Q)
    with pytest.raises(InputError, match="NaN or infinite"):
        source.read_rows(Q, [3])
    assert source.read_rows(Q, [2]).shape == (1, 64)


def test_fp64_beyond_fp32_is_refused(checkpoint: Path, weights: dict[str, torch.Tensor]) -> None:
    (checkpoint / "model.safetensors").unlink()
    save_file(
        weights | {Q: torch.full((64, 64), 1e300, dtype=torch.float64)}, checkpoint / "model.safetensors"
    )
    with pytest.raises(InputError, match="4096 values that are NaN or infinite"):
        opened(checkpoint).read(Q)


def test_unknown_names_and_rows(checkpoint: Path) -> None:
    source = opened(checkpoint)
    with pytest.raises(InputError, match=r"the checkpoint has no tensor model\.x"):
        source.read("model.x")
    with pytest.raises(InputError, match="has 320 rows, and row 320 was asked for"):
        source.read_rows("lm_head.weight", [0, 320])
    with pytest.raises(InputError, match="expected two dimensions"):
        source.read_rows("model.norm.weight", [0])


def test_a_file_that_shrinks_while_it_is_open(checkpoint: Path) -> None:
    source = opened(checkpoint)
    path = checkpoint / "model.safetensors"
    os.truncate(path, path.stat().st_size // 4)
    with pytest.raises(InputError, match="became shorter while it was read"):
        source.read("lm_head.weight")
        source.read(GATE)


def test_what_the_system_refuses_is_told() -> None:
    with pytest.raises(InputError, match="cannot be read: File name too long"):
        open_source(SourceSpec(path="/" + "x" * 300))


def test_nothing_is_mapped(checkpoint: Path, weights: dict[str, torch.Tensor]) -> None:
    """What was read stays, whatever becomes of the files."""
    source = opened(checkpoint)
    value = source.read(Q)
    shutil.rmtree(checkpoint)
    assert torch.equal(value, weights[Q])


def _write_index(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
