"""Hub ids: the cache, and what is said when it is not enough and there is no network."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pdconvert.errors import InputError
from pdconvert.recipe import SourceSpec
from pdconvert.sources import open_source

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, with the network switched off."""
    from huggingface_hub import constants

    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


@pytest.fixture
def snapshot(cache: Path, checkpoint: Path) -> Path:
    """The checkpoint in the cache, its files links to blobs as the hub client makes them."""
    repo = cache / "models--org--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    place = repo / "snapshots" / COMMIT
    place.mkdir(parents=True)
    shutil.copytree(checkpoint, repo / "blobs")
    for blob in (repo / "blobs").iterdir():
        os.symlink(blob, place / blob.name)
    return place


def message(name: str = "org/tiny", revision: str | None = None) -> str:
    with pytest.raises(InputError) as caught:
        open_source(SourceSpec(hub=name, revision=revision))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_cached_model_needs_no_network(snapshot: Path, weights: dict[str, torch.Tensor]) -> None:
    source = open_source(SourceSpec(hub="org/tiny"))
    assert source.label == "hub:org/tiny@0123456789ab"
    assert torch.equal(source.read("lm_head.weight"), weights["lm_head.weight"])
    assert open_source(SourceSpec(hub="org/tiny", revision=COMMIT)).label == source.label


def test_offline_without_a_copy_says_what_to_do(cache: Path) -> None:
    text = message()
    assert "hub:org/tiny: it is not in the cache, and the download failed" in text
    assert "Run `hf download org/tiny` where there is a network" in text
    assert str(cache) in text
    assert "--source DIR" in text


def test_an_incomplete_copy_gives_the_same_error_each_time(snapshot: Path) -> None:
    (snapshot / "model.safetensors").unlink()
    (snapshot.parent.parent / "blobs" / "h.incomplete").touch()
    first = message()
    assert "its copy is incomplete" in first
    assert "Run `hf download org/tiny`" in first
    assert message() == first


def test_a_broken_link_is_an_incomplete_copy(snapshot: Path) -> None:
    (snapshot.parent.parent / "blobs" / "model.safetensors").unlink()
    assert "its copy is incomplete" in message()


def test_a_quantized_copy_is_refused_and_not_downloaded_again(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pdconvert.sources import hub

    def never(*args: Any) -> Path:
        raise AssertionError("downloaded")

    monkeypatch.setattr(hub, "_downloaded", never)
    config = (snapshot / "config.json").read_text()
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").write_text(config[:-1] + ', "quantization_config": {"quant_method": "gptq"}}')
    assert "hub:org/tiny@0123456789ab: the checkpoint is already quantized (gptq" in message()


def test_an_incomplete_copy_is_completed(
    snapshot: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pdconvert.sources import hub

    (snapshot / "model.safetensors").unlink()
    asked = []

    def download(name: str, revision: str | None, weights: str, problem: str) -> Path:
        asked.append(weights)
        if weights == "*.safetensors":
            shutil.copy(checkpoint / "model.safetensors", snapshot)
        return snapshot

    monkeypatch.setattr(hub, "_downloaded", download)
    assert open_source(SourceSpec(hub="org/tiny")).read("model.norm.weight").shape == (64,)
    assert asked == ["*.safetensors"]


def test_bin_is_downloaded_only_without_safetensors(
    snapshot: Path, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pdconvert.sources import hub

    (snapshot / "model.safetensors").unlink()

    def download(name: str, revision: str | None, pattern: str, problem: str) -> Path:
        if pattern == "*.bin":
            torch.save(weights, snapshot / "pytorch_model.bin")
        return snapshot

    monkeypatch.setattr(hub, "_downloaded", download)
    source = open_source(SourceSpec(hub="org/tiny"))
    assert torch.equal(source.read("model.norm.weight"), weights["model.norm.weight"])


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("GatedRepoError", "access must be granted on its page first; then run `hf auth login`"),
        ("RepositoryNotFoundError", "no such model, or it is private"),
        ("RevisionNotFoundError", "no revision 'v9'"),
        ("LocalEntryNotFoundError", "the download failed"),
    ],
)
def test_the_hubs_errors_are_translated(
    cache: Path, monkeypatch: pytest.MonkeyPatch, error: str, expected: str
) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    kind = getattr(errors, error)

    def snapshot_download(name: str, local_files_only: bool = False, **options: Any) -> str:
        raise errors.LocalEntryNotFoundError("none") if local_files_only else kind.__new__(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert expected in message(revision="v9")


def test_what_is_not_an_id(cache: Path) -> None:
    assert "not a hub id (org/name)" in message("a/b/c")
