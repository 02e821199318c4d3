"""The Python interface: what a program gets from `import pdconvert`."""

import subprocess
import sys
from pathlib import Path

import pytest

import pdconvert
from pdconvert.recipe import load_recipe
from pdconvert.runtime.run import run_build

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "coremltools", "mlx", "numpy", "pydantic", "yaml")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("api")
        patch.setenv("PDCONVERT_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        yield pdconvert.build("tiny", overrides=["prefill.kv.rope=raw"]), folder


def test_import_is_light():
    code = f"import sys, pdconvert; print([name for name in {HEAVY!r} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"


def test_build_writes_where_the_command_does(built):
    result, folder = built
    assert (result.verdict, result.path) == ("pass", Path("build/tiny"))
    assert (folder / "build/tiny/manifest.json").is_file()
    assert "fp16" in result.summary


def test_build_refuses_what_it_would_overwrite(built, monkeypatch):
    _, folder = built
    monkeypatch.chdir(folder)
    with pytest.raises(pdconvert.InputError, match="--force"):
        pdconvert.build("tiny")


def test_a_loaded_recipe_takes_no_overrides():
    with pytest.raises(ValueError, match="load_recipe"):
        pdconvert.build(load_recipe("tiny"), "x", overrides=["prefill.kv.rope=raw"])


def test_generate_is_what_the_command_prints(built):
    _, folder = built
    pair = pdconvert.load(folder / "build/tiny", executor="mil")
    pieces: list[str] = []
    result = pair.generate("Once upon", max_tokens=6, on_text=pieces.append)
    assert result.text == "".join(pieces)
    assert result.token_ids == run_build(folder / "build/tiny", "Once upon", max_tokens=6).token_ids
    ids = pair.tokenizer.encode("Once upon")
    assert pair.generate(ids, max_tokens=6).token_ids == result.token_ids
    assert {"tokenize_s", "prefill_s", "handoff_s", "decode_s", "tokens_per_s"} == set(result.timings)


def test_sampling_follows_the_seed(built):
    _, folder = built
    pair = pdconvert.load(folder / "build/tiny", executor="mil")
    texts = [pair.generate("a b c", max_tokens=8, temperature=1.0, seed=seed).token_ids for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]
    with pytest.raises(pdconvert.InputError, match="temperature"):
        pair.generate("a", temperature=-1)


def test_prefill_gives_all_tokens_but_the_last(built):
    _, folder = built
    pair = pdconvert.load(folder / "build/tiny", executor="mil", mode="fp16")
    kv = pair.prefill([5, 6, 7, 8])
    assert (kv.tokens, kv.form, len(kv.keys), kv.keys[0].shape) == (3, "raw", 2, (1, 2, 3, 16))
    assert pair.prefill([5]) is None
    assert pair.package.calls == 1


def test_prefix_cache(built, tmp_path):
    _, folder = built
    pair = pdconvert.load(folder / "build/tiny", executor="mil", prefix_cache=tmp_path / "blocks")
    prompt = list(range(40))
    first, second = (pair.generate(prompt, max_tokens=2) for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 39)
    assert first.token_ids == second.token_ids
