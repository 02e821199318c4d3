"""Recipes that are refused, each with one line that says where and what; overrides by dotted path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdconvert.errors import InputError
from pdconvert.recipe import Recipe, load_recipe

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


def error_of(tmp_path: Path, text: str, **options: Any) -> str:
    """The message of a recipe that is refused, without the file's path."""
    with pytest.raises(InputError) as caught:
        load_text(tmp_path, text, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(f"{tmp_path / 'r.yaml'}").lstrip(":").lstrip()


def set_error(*overrides: str, name: str = "tiny") -> str:
    """The message of overrides that are refused."""
    with pytest.raises(InputError) as caught:
        load_recipe(name, overrides=overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Sources


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{}", "source: expected exactly one of package, hub, path, gguf, random, found none"),
        (
            "{hub: a/b, path: c}",
            "source: expected exactly one of package, hub, path, gguf, random, found hub and path",
        ),
        ("{hub: a/b, file: c}", "source.file: belongs to a 'package' source, not to 'hub'"),
        ("{path: c, revision: v1}", "source.revision: belongs to a 'hub' source, not to 'path'"),
        ("{path: ''}", "source.path: is empty"),
        ("{path: 3}", "source.path: 3: expected a string: put it in quotes"),
        ("{pth: c}", "source.pth: unknown key; did you mean 'path'?"),
        ("{random: {seed: 0}}", "source.random.config: required, but absent"),
        (
            "{random: {config: {hidden_size: 4}}}",
            "source.random.config.model_type: expected the model's type",
        ),
        (
            "{random: {seed: 1.0, config: {model_type: llama}}}",
            "source.random.seed: 1.0: expected a whole number",
        ),
        ("org/name", "source: 'org/name': expected a mapping"),
    ],
)
def test_sources_that_are_refused(tmp_path: Path, source: str, expected: str) -> None:
    assert expected in error_of(tmp_path, MINIMAL.replace("{hub: org/name}", source))


# What is refused


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("version: 1\nversion: 1\n", "2: key 'version' is given twice"),
        ("a: {b: 1, b: 2}\n", "1: key 'b' is given twice"),
        ("1: x\n", "1: key 1 is not a string"),
        ("a: [1\n", "2: "),
        ("a: !!python/object/apply:os.system ['true']\n", "1: could not determine a constructor"),
        ("a: &x [*x]\n", "1: found unconstructable recursive node"),
        ("a: 1\n---\nb: 2\n", "2: expected a single document in the stream, but found another document"),
        ("", "expected a mapping with version, name, source and passes"),
        ("- a\n", "expected a mapping with version, name, source and passes"),
        ("\x07", "not YAML"),
        (f"version: {'1' * 5000}\n", "1: a number of 5000 digits"),
    ],
)
def test_what_is_not_yaml(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in error_of(tmp_path, text)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("prefil: {}", "prefil: unknown key; did you mean 'prefill'?"),
        (
            "xyzzy: 1",
            "xyzzy: unknown key; known: calibration, decode, gates, name, passes, prefill, probe, source, version",
        ),
        ("prefill: {kv: {rop: raw}}", "prefill.kv.rop: unknown key; did you mean 'rope'?"),
        (
            "prefill: {kv: {rope: rawe}}",
            "prefill.kv.rope: 'rawe': expected one of rotated, raw; did you mean 'raw'?",
        ),
        ("prefill: {target: iOS15}", "prefill.target: 'iOS15': expected one of iOS16, iOS17, iOS18"),
        ("prefill: {target: 18}", "prefill.target: 18: expected one of"),
        ("prefill: null", "prefill: None: expected a mapping"),
        ("prefill: {functions: []}", "prefill.functions: expected at least one function"),
        ("prefill: {functions: {tokens: 4}}", "prefill.functions: {'tokens': 4}: expected a list"),
        ("prefill: {functions: [128]}", "prefill.functions.0: 128: expected a mapping"),
        (
            "prefill: {functions: [{tokens: 0}]}",
            "prefill.functions.0.tokens: 0: expected greater than or equal to 1",
        ),
        (
            "prefill: {functions: [{tokens: true}]}",
            "prefill.functions.0.tokens: True: expected a whole number",
        ),
        (
            "prefill: {functions: [{tokens: 128.0}]}",
            "prefill.functions.0.tokens: 128.0: expected a whole number",
        ),
        (
            "prefill: {functions: [{tokens: '128'}]}",
            "prefill.functions.0.tokens: '128': expected a whole number, not a string: leave out the quotes",
        ),
        (
            "prefill: {functions: [{tokens: 8}, {tokens: 8, past: 0}]}",
            "prefill.functions.1: prefill_8 is listed twice",
        ),
        (
            "prefill: {functions: [{tokens: 1, past: 64}]}",
            "prefill.functions.0: decode_1_ctx64 decodes, which needs prefill.outputs: logits",
        ),
        (
            "prefill: {target: iOS17, functions: [{tokens: 8}, {tokens: 8, past: 8}]}",
            "prefill.functions: more than one function needs prefill.target iOS18 or later, not iOS17",
        ),
        (
            "prefill: {target: iOS16, kv: {storage: state}}",
            "prefill.kv.storage: state needs prefill.target iOS18 or later, not iOS16",
        ),
        (
            "prefill: {kv: {storage: state, rope: raw}}",
            "prefill.kv.storage: state holds rotated keys, which raw keys are not; use io",
        ),
        (
            "prefill: {kv: {storage: state}, split_model: {parts: 2}}",
            "prefill.kv.storage: state is of one package, which split_model cuts; use io",
        ),
        ("decode: {head_bits: 4}", "decode.head_bits: 4: expected one of 8, 16"),
        ("decode: {head_bits: 8.0}", "decode.head_bits: 8.0: expected one of 8, 16"),
        ("decode: {head_bits: '8'}", "decode.head_bits: '8': expected one of 8, 16"),
        ("decode: {grid: theirs}", "decode.grid: 'theirs': expected one of shared, own, source"),
        (
            "decode: {grid: source, bits: 4}",
            "decode.bits: has no meaning with decode.grid source; set decode.grid to own",
        ),
        ("gates: {kv_db: '30'}", "gates.kv_db: '30': expected a number, not a string: leave out the quotes"),
        ("gates: {kv_db: true}", "gates.kv_db: True: expected a number"),
        ("gates: {kv_db: .nan}", "gates.kv_db: nan: expected a finite number"),
        ("gates: {top1: 1.5}", "gates.top1: 1.5: expected less than or equal to 1"),
        ("gates: {kv_db: 20}", "gates.kv_db: 20.0: weaker than the default 28, which needs a gates.reason"),
        ("gates: {kv_db: 20, reason: ' '}", "gates.kv_db: 20.0: weaker than the default 28"),
        ("gates: {kld: 0.02}", "gates.kld: 0.02: weaker than the default 0.01, which needs a gates.reason"),
        ("gates: {top1: 0.9}", "gates.top1: 0.9: weaker than the default 0.93"),
        ("gates: {reason: just so}", "gates.reason: given, but no gate is weaker than its default"),
        ("gates: {kvdb: 30}", "gates.kvdb: unknown key; did you mean 'kv_db'?"),
        ("probe: {eval_windows: 0}", "probe.eval_windows: 0: expected greater than or equal to 1"),
        ("probe: {text: 1}", "probe.text: 1: expected a string"),
    ],
)
def test_sections_that_are_refused(tmp_path: Path, line: str, expected: str) -> None:
    assert error_of(tmp_path, MINIMAL + line + "\n").startswith(expected)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("version: 2", "version: 2: expected 1"),
        ("version: true", "version: True: expected 1"),
        ("version: 1.0", "version: 1.0: expected 1"),
        ("name: a/b", "name: 'a/b': "),
        ("name: ../x", "name: '../x': expected letters, digits, dots, dashes and underscores"),
        ("name: 7", "name: 7: expected a string: put it in quotes"),
        ("passes: linear_to_conv2d", "passes: 'linear_to_conv2d': expected a list of passes"),
        (
            "passes: [linear_to_conv]",
            "passes.0: 'linear_to_conv': unknown pass; did you mean 'linear_to_conv2d'?",
        ),
        ("passes: [3]", "passes.0: 3: expected a pass name or {name: {option: value}}"),
        ("passes: [{a: {}, b: {}}]", "passes.0: {'a': {}, 'b': {}}: expected a pass name or"),
        (
            "passes: [linear_to_conv2d, linear_to_conv2d]",
            "passes.linear_to_conv2d: this pass is listed twice",
        ),
        ("passes: [{linear_to_conv2d: {x: 1}}]", "passes.linear_to_conv2d.x: unknown key"),
        (
            "passes: [{linear_to_conv2d: 8}]",
            "passes.linear_to_conv2d: 8: expected options as {option: value}",
        ),
        (
            "passes: [{quantize_weights: {schem: none}}]",
            "passes.quantize_weights.schem: unknown key; did you mean 'scheme'?",
        ),
        (
            "passes: [{quantize_weights: {scheme: w8a17}}]",
            "passes.quantize_weights.scheme: 'w8a17': expected one of none, w8a16, w6a16, w4a16; did you mean 'w8a16'?",
        ),
        ("passes: [{quantize_weights: {scheme: 8}}]", "passes.quantize_weights.scheme: 8: expected one of"),
        ("passes: [{quantize_weights: {scheme: null}}]", "passes.quantize_weights.scheme: None: expected"),
    ],
)
def test_lines_that_are_refused(tmp_path: Path, line: str, expected: str) -> None:
    key = line.partition(":")[0]
    lines = [line if given.startswith(f"{key}:") else given for given in MINIMAL.splitlines()]
    assert error_of(tmp_path, "\n".join(lines)).startswith(expected)


def test_absent_keys_and_the_number_of_errors(tmp_path: Path) -> None:
    assert error_of(tmp_path, "version: 1\n") == "name: required, but absent (and 2 more)"


def test_a_weaker_gate_with_a_reason(tmp_path: Path) -> None:
    gates = load_text(tmp_path, MINIMAL + "gates: {kv_db: 20, kld: 0.005, reason: a toy model}\n").gates
    assert gates.weakened() == ("kv_db",)
    assert gates.kv_db == 20.0
    assert gates.reason == "a toy model"


def test_names_that_are_no_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, expected in (
        ("tinylama", "tinylama: no such recipe; did you mean 'tinyllama'?"),
        ("absent.yaml", "absent.yaml: no such recipe file; check the path"),
        ("../tiny", "../tiny: no such recipe file; check the path"),
        (".", ".: is a folder; give a recipe file or one of gemma3-270m, "),
    ):
        with pytest.raises(InputError) as caught:
            load_recipe(name)
        assert str(caught.value).startswith(expected)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="cannot be read: File name too long"):
        load_recipe("x" * 300)
    with pytest.raises(InputError, match=r"binary\.yaml: not a text file in UTF-8 \(byte 0\)"):
        load_recipe("binary.yaml")


def test_a_recipe_in_a_folder_of_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "a b" / "ñ 模型" / "~x"
    folder.mkdir(parents=True)
    assert load_text(folder, MINIMAL.replace("hub: org/name", "path: m")).source.path == str(folder / "m")


# Overrides


def test_overrides_reach_every_part() -> None:
    recipe = load_recipe(
        "tiny",
        overrides=[
            "name=other",
            "prefill.kv.rope=raw",
            "prefill.functions.0.tokens=64",
            "passes.quantize_weights.scheme=none",
            "passes.safe_rms_norm.method=layer_norm",
            "source.random.seed=5",
            "source.random.config.num_hidden_layers=3",
            "source.random.config.attention_bias=true",
            "decode.head_bits=16",
            "gates.kld=1e-3",
            "probe.eval_windows=2",
        ],
    )
    assert recipe.name == "other"
    assert recipe.prefill.kv.rope == "raw"
    assert recipe.prefill.functions[0].name == "prefill_64"
    assert {item.name: item for item in recipe.passes}["quantize_weights"].scheme == "none"
    assert {item.name: item for item in recipe.passes}["safe_rms_norm"].method == "layer_norm"
    assert recipe.source.random is not None
    assert recipe.source.random.seed == 5
    assert recipe.source.random.config["num_hidden_layers"] == 3
    assert recipe.source.random.config["attention_bias"] is True
    assert (recipe.decode.embedding_bits, recipe.decode.head_bits) == (16, 16)
    assert recipe.gates.kld == 1e-3
    assert recipe.probe.eval_windows == 2


def test_overrides_fill_in_what_the_recipe_leaves_out(recipe_file: Path) -> None:
    overrides = [
        "prefill.functions.0.past=64",
        "decode.head_bits=8",
        "gates.kv_db=20",
        "gates.reason=a trial",
    ]
    recipe = load_recipe(str(recipe_file), overrides=overrides)
    assert recipe.prefill.functions[0].name == "extend_128_ctx64"
    assert recipe.decode.head_bits == 8
    assert recipe.gates.weakened() == ("kv_db",)


def test_a_later_override_wins() -> None:
    assert load_recipe("tiny", overrides=["name=a", "name=b"]).name == "b"


def test_overrides_do_not_leak_into_the_next_load() -> None:
    load_recipe("tiny", overrides=["prefill.kv.rope=raw"])
    assert load_recipe("tiny").prefill.kv.rope == "rotated"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("x", "--set x: expected a.b=value"),
        ("=x", "--set =x: expected a.b=value"),
        ('name="x', '--set name="x: while scanning a quoted scalar, found unexpected end of stream'),
        ("prefil.kv=1", "--set prefil.kv=1: unknown key 'prefil'; did you mean 'prefill'?"),
        ("prefill.kv.rop=raw", "--set prefill.kv.rop=raw: unknown key 'rop'; did you mean 'rope'?"),
        ("prefill.kv=raw", "--set prefill.kv=raw: 'kv' is a group; set one of rope, storage in it"),
        ("prefill.kv.rope.x=1", "--set prefill.kv.rope.x=1: 'rope' is a single value and has no 'x'"),
        ("prefill..rope=raw", "--set prefill..rope=raw: unknown key ''"),
        ("prefill.functions=1", "--set prefill.functions=1: expected functions.N.tokens or functions.N.past"),
        ("prefill.functions.1.past=2", "--set prefill.functions.1.past=2: expected functions.N.tokens"),
        (
            "prefill.functions.0.tokns=2",
            "--set prefill.functions.0.tokns=2: unknown key 'tokns'; did you mean 'tokens'?",
        ),
        ("passes=x", "--set passes=x: expected passes.NAME.OPTION=value; passes here: linear_to_conv2d, "),
        ("passes.quantize_weights=x", "--set passes.quantize_weights=x: expected passes.NAME.OPTION=value"),
        (
            "passes.quantize_weight.scheme=none",
            "--set passes.quantize_weight.scheme=none: the recipe lists no pass 'quantize_weight'; did you mean",
        ),
        (
            "passes.truncate_last_layer.x=1",
            "--set passes.truncate_last_layer.x=1: the recipe lists no pass 'truncate_last_layer'; add it to",
        ),
        (
            "passes.quantize_weights.schem=none",
            "--set passes.quantize_weights.schem=none: quantize_weights has no option 'schem'; did you mean 'scheme'?",
        ),
        (
            "passes.linear_to_conv2d.x=1",
            "--set passes.linear_to_conv2d.x=1: linear_to_conv2d has no option 'x'",
        ),
        ("name=[1, 2]", "--set name=[1, 2]: '[1, 2]' is not a scalar"),
        ("name={a: 1}", "--set name={a: 1}: '{a: 1}' is not a scalar"),
        ("source.random.config=3", "--set source.random.config=3: expected config.NAME=value"),
        (
            "prefill.kv.rope=rw",
            "recipe tiny: prefill.kv.rope: 'rw': expected one of rotated, raw; did you mean 'raw'?",
        ),
        ("decode.head_bits=true", "recipe tiny: decode.head_bits: True: expected one of 8, 16"),
        (
            "source.path=x",
            "recipe tiny: source: expected exactly one of package, hub, path, gguf, random, found path",
        ),
    ],
)
def test_overrides_that_are_refused(override: str, expected: str) -> None:
    assert set_error(override).startswith(expected)
