"""Bad weight files through the real command line: damaged, incomplete, quantized, hostile.

In an expected message `{}` is the checkpoint's folder and … stands for anything.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from refusals import (
    UP,
    WEIGHTS,
    Change,
    Q,
    add,
    assert_cache_is_whole,
    base,
    both,
    checkpoint,
    config,
    content,
    drop,
    gone,
    link,
    listing,
    pickled,
    refusal,
    says,
    shards,
    spoil,
    surroundings,
    tensors,
)

__all__ = ["base", "checkpoint", "surroundings"]

NAN = float("nan")
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
DEEP = b"[" * 100_000
NORM = "model.norm.weight"
QUANTIZED = "{}: the checkpoint is already quantized (…); give the original checkpoint in bf16, fp16 or fp32"


class Payload:
    """Unpickled freely, it would make a folder."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("ran",)


FILES: dict[str, tuple[Change, str]] = {
    "no weights": (gone(WEIGHTS), "{}: no weights (model.safetensors or pytorch_model.bin); download …"),
    "empty": (content(WEIGHTS, b""), "{}/model.safetensors: the file is empty (0 bytes); download it again"),
    "git-lfs": (content(WEIGHTS, LFS), "{}/model.safetensors: a git-lfs pointer, …; run `git lfs pull` …"),
    "a broken link": (link(WEIGHTS), "{}/model.safetensors: no such file (a link to a file that is gone)"),
    "the last 64 bytes cut": (
        content(WEIGHTS, lambda data: data[:-64]),
        "{}/model.safetensors: truncated: … bytes, but its tensors need …; download it again",
    ),
    "the last tensor cut": (
        content(WEIGHTS, lambda data: data[: -4 * 64 * 64]),
        "{}/model.safetensors: truncated: … bytes, but its tensors need …; download it again",
    ),
    "cut in the header": (
        content(WEIGHTS, lambda data: data[:100]),
        "{}/model.safetensors: truncated: 100 bytes are less than its header needs; download it again",
    ),
    "a header of brackets": (
        content(WEIGHTS, len(DEEP).to_bytes(8, "little") + DEEP),
        "{}/model.safetensors: not a safetensors file: its header is not JSON; download it again",
    ),
    "a missing shard": (
        both(shards(), gone("model-00002-of-00002.safetensors")),
        "{}: model-00002-of-00002.safetensors is missing; model.safetensors.index.json puts 13 tensors there …",
    ),
    "a cut shard": (
        both(shards(), content("model-00002-of-00002.safetensors", lambda data: data[:-10])),
        "{}/model-00002-of-00002.safetensors: truncated: …; download it again",
    ),
    "a tensor in another shard": (
        shards(lambda where: where | {NORM: where["lm_head.weight"], "lm_head.weight": where[NORM]}),
        "{}/model-00001-of-00002.safetensors: holds lm_head.weight, but the index puts it into "
        "model-00002-of-00002.safetensors; shards and index do not belong together",
    ),
    "an index that leaves the folder": (
        shards(lambda where: where | {NORM: "../../secret"}),
        "{}/model.safetensors.index.json: model.norm.weight: '../../secret' is not the name of a file in this folder",
    ),
    "an index of brackets": (
        both(shards(), content("model.safetensors.index.json", DEEP)),
        "{}/model.safetensors.index.json: damaged: …; download it again",
    ),
    "a stale index": (
        lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b"}}'),
        "{}: holds model.safetensors and also model.safetensors.index.json, which names other files …; …remove it",
    ),
    "an index, a broken link": (
        link("model.safetensors.index.json"),
        "{}/model.safetensors.index.json: no such file (a link to a file that is gone)",
    ),
    "pickled code": (
        pickled(lambda state: {"x": Payload()}),
        "{}/pytorch_model.bin: holds pickled code besides tensors, which was not run; ask its author for …",
    ),
    "pickled code in a shard": (
        both(
            shards(pickled=True),
            lambda folder: torch.save({"x": Payload()}, folder / "pytorch_model-00001-of-00002.bin"),
        ),
        "{}/pytorch_model-00001-of-00002.bin: holds pickled code besides tensors, which was not run; …",
    ),
    "a cut pickled shard": (
        both(shards(pickled=True), content("pytorch_model-00001-of-00002.bin", lambda data: data[:-100])),
        "{}/pytorch_model-00001-of-00002.bin: truncated, or written by torch before 1.6; download it again, …",
    ),
    "pickled numbers": (
        pickled(lambda state: {"epoch": 3}),
        "{}/pytorch_model.bin: epoch is int, not a tensor; expected a plain state dict",
    ),
    "a pickled tensor without a name": (
        pickled(lambda state: state | {7: torch.ones(2)}),
        "{}/pytorch_model.bin: a tensor is named 7, not by a text; expected a plain state dict",
    ),
    "a pickled sparse tensor": (
        pickled(lambda state: state | {Q: state[Q].to_sparse()}),
        f"{{}}/pytorch_model.bin: {Q} is sparse (torch.sparse_coo); save the checkpoint with dense tensors",
    ),
    "an adapter's tensors": (
        add("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", torch.ones(4, 4)),
        "{}: holds an adapter (tensor …lora_A.weight), not a whole model; merge it into its base …",
    ),
    "an adapter beside the model": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x"),
        "{}: holds an adapter (adapter_model.safetensors) beside the model; merge the two …",
    ),
    "an adapter alone": (
        both(gone("config.json", WEIGHTS), lambda folder: (folder / "adapter_config.json").write_text("{}")),
        "{}: no config.json; it holds an adapter: merge it into its base …",
    ),
}

TENSORS: dict[str, tuple[Change, str]] = {
    "a tensor missing": (drop(Q), f"{{}}: tensor {Q} is missing, as config.json describes the model"),
    "the head missing": (drop("lm_head.weight"), "{}: tensor lm_head.weight is missing, …"),
    "a tensor left over": (
        add("model.layers.0.self_attn.q_proj.bias", torch.ones(64)),
        "{}: tensor model.layers.0.self_attn.q_proj.bias is left over; config.json does not account for it, …",
    ),
    "another prefix": (
        tensors(lambda state: {f"transformer.{name}": value for name, value in state.items()}),
        "{}: 21 tensors (…) are missing, …; transformer.lm_head.weight is there under another name",
    ),
    "transposed": (
        tensors(lambda state: state | {f"{UP}.weight": state[f"{UP}.weight"].T.contiguous()}),
        f"{{}}: {UP}.weight has shape (64, 128), config.json asks for (128, 64)",
    ),
    "a scalar": (add(Q, torch.tensor(1.0)), f"{{}}: {Q} has shape (), config.json asks for (64, 64)"),
    "NaN in the embedding": (
        spoil("model.embed_tokens.weight", NAN),
        "{}: model.embed_tokens.weight holds 1 values that are NaN or infinite; the checkpoint is damaged",
    ),
    "infinity in the last layer": (
        spoil("model.layers.1.mlp.down_proj.weight", -float("inf")),
        "{}: model.layers.1.mlp.down_proj.weight holds 1 values that are NaN or infinite; …",
    ),
    "NaN in the head": (spoil("lm_head.weight", NAN), "{}: lm_head.weight holds 1 values that are NaN …"),
    "beyond the grid of fp16": (
        add(Q, torch.full((64, 64), 1e5)),
        "layers.0.self_attn.q_proj.weight: weights up to 1e+05 do not fit …; …\n  in pass quantize_weights on …",
    ),
    "GPTQ by its config": (config(quantization_config={"quant_method": "gptq", "bits": 4}), QUANTIZED),
    "AWQ by its config": (config(quantization_config={"quant_method": "awq"}), QUANTIZED),
    "fp8 by its config": (config(quantization_config={"quant_method": "fp8"}), QUANTIZED),
    "bitsandbytes by its config": (config(quantization_config={"load_in_4bit": True}), QUANTIZED),
    "MLX by its config": (config(quantization={"bits": 4, "group_size": 64}), QUANTIZED),
    "GPTQ by its tensors": (add(f"{UP}.qweight", torch.ones(4, 4, dtype=torch.int32)), QUANTIZED),
    "fp8 by its type": (add(f"{UP}.weight", torch.ones(128, 64).to(torch.float8_e4m3fn)), QUANTIZED),
    "fp8 by its scales": (add(f"{UP}.weight_scale_inv", torch.ones(1, 1)), QUANTIZED),
    "bitsandbytes by its tensors": (add(f"{UP}.weight.absmax", torch.ones(4)), QUANTIZED),
    "MLX by its tensors": (add(f"{UP}.scales", torch.ones(128, 1)), QUANTIZED),
    "int8": (add(f"{UP}.weight", torch.ones(128, 64, dtype=torch.int8)), QUANTIZED),
}

CASES = {f"files: {name}": case for name, case in FILES.items()} | {
    f"tensors: {name}": case for name, case in TENSORS.items()
}


@pytest.mark.parametrize(("change", "expected"), CASES.values(), ids=CASES)
def test_bad_weights_are_refused(
    checkpoint: Path, tmp_path: Path, own_cache: Path, change: Change, expected: str
) -> None:
    change(checkpoint)
    said = refusal(["build", "tiny", "--source", str(checkpoint), "--out", "build/out"], tmp_path, own_cache)
    assert says(said, expected.replace("{}", str(checkpoint))), said


def test_the_same_incomplete_download_is_refused_each_time(
    checkpoint: Path, tmp_path: Path, own_cache: Path
) -> None:
    gone(WEIGHTS)(checkpoint)
    (checkpoint / "h.incomplete").touch()
    args = ["build", "tiny", "--source", str(checkpoint)]
    first = refusal(args, tmp_path, own_cache)
    assert first.endswith("it holds h.incomplete, but no index: the download is incomplete")
    assert refusal(args, tmp_path, own_cache) == first


def test_work_that_was_done_before_a_damaged_layer_is_kept_whole(
    checkpoint: Path, tmp_path: Path, own_cache: Path
) -> None:
    spoil("model.layers.1.input_layernorm.weight", NAN)(checkpoint)
    refusal(["build", "tiny", "--source", str(checkpoint), "--out", "out"], tmp_path, own_cache)
    assert len(listing(own_cache / "entries")) > 0
    assert_cache_is_whole(own_cache)
