"""K and V in Core ML states: the same bits as with K and V as inputs, through every part of the runtime."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tiny_build import assert_same_bits, prompt_text, tiny_build, tiny_prefill, token_ids

from pdconvert.cli import main
from pdconvert.emit.vectors import read_vectors
from pdconvert.errors import InputError
from pdconvert.executors.mil import MilSession, Package
from pdconvert.families import llama
from pdconvert.lint.report import lint_path
from pdconvert.lint.rule import FAILING
from pdconvert.lowering.contract import FunctionShape, state_columns
from pdconvert.prepare import make_plan
from pdconvert.recipe import load_recipe, recipe_from_data
from pdconvert.runtime.package_decode import PackageDecoder, decode_functions
from pdconvert.runtime.past import StatePast
from pdconvert.runtime.prefix_cache import MemoryStore
from pdconvert.runtime.run import PackageOptions, Pair, run_build
from pdconvert.runtime.split_run import decode_build, prefill_build
from pdconvert.sources import open_source
from pdconvert.verify import verify_build

COLUMNS = 288
"""256 past tokens and 32 new ones."""


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    """The same model with K and V as inputs, and in states."""
    return tuple(tiny_build(tmp_path_factory, storage=storage) for storage in ("io", "state"))


@pytest.fixture(scope="module")
def state(builds):
    return builds[1]


def decoder(folder: Path, mode: str = "fp32") -> PackageDecoder:
    manifest, prefill = tiny_prefill(folder, mode)
    return PackageDecoder(prefill, decode_functions(manifest.functions.values()), {})


def test_every_function_has_the_same_two_states(state):
    package = Package.open(state / "prefill.mlpackage")
    for name in package.function_names:
        function = package.function(name)
        shapes = {key: (info.shape, info.dtype) for key, info in function.states.items()}
        assert shapes == dict.fromkeys(("k_cache", "v_cache"), ((2, 32, 1, COLUMNS), "fp16"))
        assert {"past_k", "past_v"}.isdisjoint(function.inputs)
        assert function.inputs["write"].shape[2:] == (int(name.split("_")[1]), COLUMNS)


def test_the_manifest_lists_them(state):
    functions = json.loads((state / "manifest.json").read_text())["prefill"]["functions"]
    for function in functions.values():
        assert [(port["name"], port["shape"]) for port in function["states"]] == [
            ("k_cache", [2, 32, 1, COLUMNS]),
            ("v_cache", [2, 32, 1, COLUMNS]),
        ]
        assert function["states"][0]["axes"] == ["layer", "kv_head*head_dim", "1", "column"]


def test_the_manifest_says_what_the_functions_share(builds):
    for folder in builds:
        found = json.loads((folder / "manifest.json").read_text())["prefill"]["weights"]
        report = json.loads(CliRunner().invoke(main, ["inspect", str(folder), "--json"]).stdout)
        sharing = report["prefill"]["sharing"]
        assert found == {key: value for key, value in sharing.items() if key != "records"}
        assert found["shared_bytes"] == found["stored_bytes"] > 0
        assert found["named_bytes"] == len(found["alone_bytes"]) * found["stored_bytes"]
        assert set(found["alone_bytes"].values()) == {0}


def test_lint_has_nothing_against_it(state):
    findings = lint_path(state).findings
    assert [item for item in findings if item.severity in FAILING] == []


@pytest.mark.parametrize("mode", ["fp32", "fp16"])
def test_prefill_gives_the_bits_of_inputs_and_outputs(builds, mode):
    io, state = (tiny_prefill(folder, mode)[1] for folder in builds)
    for length in (1, 31, 32, 33, 64, 96, 97, 200, 287):
        assert_same_bits(io.extend(None, token_ids(length)), state.extend(None, token_ids(length)))


@pytest.mark.parametrize("mode", ["fp32", "fp16"])
def test_decoding_gives_the_bits_of_inputs_and_outputs(builds, mode):
    rows = []
    for folder in builds:
        one = decoder(folder, mode)
        ids = token_ids(70)
        rows.append(one.logits([ids[-1], *token_ids(10, seed=1)], one.new_cache(one.prefill.run(ids))))
    np.testing.assert_array_equal(*rows)


def test_text_of_both_decoders(builds):
    for length in (1, 40, 100):
        texts = [
            run_build(folder, prompt_text(length), max_tokens=12, decode=decode).token_ids
            for folder in builds
            for decode in ("mlx", "package")
        ]
        assert texts[1:] == texts[:1] * 3


def test_extend_goes_on_from_a_hand_off_and_leaves_it_alone(state):
    _, prefill = tiny_prefill(state)
    ids = token_ids(80)
    first = prefill.extend(None, ids[:33])
    before = [array.copy() for array in (*first.keys, *first.values)]
    assert_same_bits(prefill.extend(first, ids[33:]), prefill.extend(first, ids[33:]))
    for old, now in zip(before, (*first.keys, *first.values), strict=True):
        np.testing.assert_array_equal(old, now)


def test_a_column_can_be_written_again(state):
    """As after a draft that was refused: what was there does not shine through."""
    one = decoder(state)
    cache = one.new_cache(one.prefill.run(token_ids(20)))
    expected = one.logits([1, 2, 3], cache)
    cache.length -= 3
    one.logits([7, 8, 9], cache)
    cache.length -= 3
    np.testing.assert_array_equal(one.logits([1, 2, 3], cache), expected)


def test_the_prefix_cache_gives_the_bits_of_a_cold_run(state):
    ids = token_ids(150)
    cold = tiny_prefill(state)[1].run(ids)
    pair = Pair.open(state, PackageOptions("mil"), stores=(MemoryStore(10**8),))
    pair.package.run(ids[:70])
    calls = pair.package.calls
    assert_same_bits(pair.package.run(ids), cold)
    assert pair.package.cached_tokens > 0
    calls = pair.package.calls
    assert_same_bits(pair.package.run(ids), cold)
    assert pair.package.calls == calls


def test_hand_off_through_a_file(state, tmp_path):
    prompt = prompt_text(130)
    prefill_build(state, prompt, tmp_path / "kv.pdkv")
    read = decode_build(state, tmp_path / "kv.pdkv", max_tokens=8)
    assert read.token_ids == run_build(state, prompt, max_tokens=8).token_ids


def test_vectors_replay_and_show_a_wrong_state(state, monkeypatch):
    result = verify_build(state, "mil")
    names = {check["name"] for check in result["checks"]}
    assert result["verdict"] == "pass"
    assert {"decode_1_ctx64, mil fp16: k_cache", "extend_32_ctx256, mil fp32: v_cache"} <= names
    read = MilSession.read_state
    monkeypatch.setattr(MilSession, "read_state", lambda *args: np.roll(read(*args), 1, axis=3))
    failed = {check["name"] for check in verify_build(state, "mil")["checks"] if not check["passed"]}
    assert {"decode_1_ctx64, mil fp16: k_cache", "extend_32_ctx256, mil fp32: v_cache"} <= failed


def test_the_states_of_a_vector_are_its_past(state):
    cases = {case.name: case for case in read_vectors(state / "test_vectors")[0]}
    past = cases["extend_32_ctx256"]
    start = int(past.inputs["write"][0, 0, 0].argmax())
    assert start > 0
    assert past.states["k_cache"].shape == (2, 32, 1, COLUMNS)
    assert past.states["k_cache"][..., :start].any(axis=(0, 1, 2)).all()
    assert not past.states["k_cache"][..., start:].any()
    assert not cases["prefill_32"].states["v_cache"].any()


def test_the_executor_writes_into_the_buffers_that_are_there(state):
    session = MilSession(state / "prefill.mlpackage", "decode_1_ctx256")
    case = next(c for c in read_vectors(state / "test_vectors")[0] if c.name == "decode_1_ctx256")
    held = session.make_state()
    places = {name: value.data_ptr() for name, value in held.items()}
    session.run(case.inputs, held)
    assert {name: value.data_ptr() for name, value in held.items()} == places
    assert all(value.any() for value in held.values())


def test_full_states_are_refused_rather_than_wrapped_round(state):
    manifest, prefill = tiny_prefill(state)
    cache = prefill.new_past(prefill.extend(None, token_ids(280)))
    assert isinstance(cache, StatePast)
    function = manifest.functions["extend_32_ctx256"]
    with pytest.raises(InputError, match=r"^the states hold 288 tokens, and 300 are needed$"):
        prefill.call(function, token_ids(20), cache)


def test_columns_are_a_multiple_of_what_the_neural_engine_takes():
    shapes = [FunctionShape(128), FunctionShape(128, 512), FunctionShape(1, 513)]
    assert state_columns(shapes) == 640
    assert state_columns([*shapes, FunctionShape(1, 640)]) == 672


def test_channels_that_no_state_takes_are_refused():
    config = dict(llama.TINY, num_attention_heads=4, num_key_value_heads=2, head_dim=20)
    data = load_recipe("tiny", overrides=["prefill.kv.storage=state"]).resolved()
    data["source"] = {"random": {"seed": 0, "config": config}}
    recipe = recipe_from_data(data, where="test", folder=Path())
    with pytest.raises(InputError, match=r"state: the model has 40 channels of keys .*; use io$"):
        make_plan(recipe, open_source(recipe.source))


def test_inspect_shows_them(state):
    result = CliRunner().invoke(main, ["inspect", str(state)])
    assert result.exit_code == 0
    assert "k_cache" in result.stdout
