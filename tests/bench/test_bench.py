"""`bench`: what is timed, and that a figure which this machine cannot reach is refused."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

import pdconvert
from pdconvert.bench.machine import COLUMNS, PRODUCTS, WIDTH, Machine, _write_products
from pdconvert.bench.placement import describe, placement_of
from pdconvert.bench.run import PARTS, bench
from pdconvert.bench.timing import repeat
from pdconvert.cli import main
from pdconvert.errors import CheckFailed, InputError
from pdconvert.executors.mil.package import Package
from pdconvert.executors.mil.view import view_package
from pdconvert.executors.mlx import DecodeModel
from pdconvert.inspect_cost import estimate
from pdconvert.recipe import load_recipe, recipe_from_data


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """A tiny build with raw keys and two functions."""
    folder = tmp_path_factory.mktemp("bench")
    data = load_recipe("tiny", overrides=["prefill.kv.rope=raw"]).resolved()
    data["prefill"]["functions"] = [{"tokens": 16}, {"tokens": 16, "past": 32}]
    recipe = recipe_from_data(data, where="test", folder=folder)
    return pdconvert.build(recipe, folder / "build", use_cache=False).path


@pytest.fixture(autouse=True)
def small_products(monkeypatch):
    """Products that take no second."""
    monkeypatch.setattr("pdconvert.bench.machine.WIDTH", 256)
    monkeypatch.setattr("pdconvert.bench.machine.COLUMNS", 64)


@pytest.fixture
def slow_machine(monkeypatch):
    """A machine that reads 1 GB/s: tiny weights in a tenth of a millisecond, which decoding does not reach."""
    monkeypatch.setattr(Machine, "read_rate", lambda self, size: 1e9)


def test_what_is_timed(build):
    found = bench(build, runs=2, steps=4).to_json()
    assert [line["tokens"] for line in found["prefill"]] == [16, 48]
    assert [line["calls"] for line in found["prefill"]] == [1, 3]
    assert found["prefill"][1]["flops"] > 3 * found["prefill"][0]["flops"]
    first = found["first_token"]
    assert 1 <= first["prompt_tokens"] <= 16
    parts = sum(first[part]["median_s"] for part in PARTS)
    assert parts > 0 and all(first[part]["min_s"] <= first[part]["max_s"] for part in PARTS)
    assert first["rotate_s"]["median_s"] > 0 and first["inject_s"]["median_s"] > 0
    assert first["total_s"]["min_s"] >= sum(first[part]["min_s"] for part in PARTS)
    assert found["decode"]["runs"] == 4
    assert found["where"].endswith("these times say nothing of a Neural Engine")
    assert found["placements"] == {}


def test_decode_bytes_are_what_the_plan_says(build):
    found = bench(build, lengths=[5], runs=1, steps=1)
    assert found.decode_bytes == pdconvert.plan("tiny").decode.weight_bytes
    assert found.prefill[0].tokens == 5


def test_a_length_beyond_the_functions_is_refused(build):
    with pytest.raises(InputError, match="length 49: the functions of this build prefill 1 to 48 tokens"):
        bench(build, lengths=[49])


def test_work_that_was_not_done_is_refused(build, slow_machine, monkeypatch):
    """A decoder that returns before its work is done, as an unsynchronised one does."""
    bench(build, lengths=[16], runs=1, steps=2)
    monkeypatch.setattr(DecodeModel, "logits", lambda self, ids, cache: np.zeros((1, 320), np.float32))
    with pytest.raises(CheckFailed, match="decode: in .* the measurement is wrong, so nothing is shown"):
        bench(build, lengths=[16], runs=1, steps=2)
    result = CliRunner().invoke(main, ["bench", str(build), "--length", "16", "--runs", "1"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "the measurement is wrong" in result.stderr


@pytest.mark.parametrize(
    ("seconds", "flops", "read", "message"),
    [
        (1.0, 1.2e9, 0, "compute 1.2 GFLOP/s, and the most that was measured here is 1.0"),
        (0.5, 0, 600_000_000, "read 1.2 GB/s, and the most that was measured here is 1.0"),
        (0.0, 0, 0, "in 0 ms this would compute inf"),
        (1.0, 1.05e9, 1_050_000_000, None),
    ],
)
def test_the_roofline(seconds, flops, read, message, monkeypatch):
    monkeypatch.setattr(Machine, "read_rate", lambda self, size: 1e9)
    machine = Machine("mil", {}, False, {"package": 1e9, "torch": 5e8})
    if message is None:
        machine.check("x", seconds, flops, read)
        return
    with pytest.raises(CheckFailed, match=message):
        machine.check("x", seconds, flops, read)


def test_the_machine_is_measured(monkeypatch):
    machine = Machine("mil", {"kind": "mil"}, False)
    machine.measure_products()
    assert set(machine.products) == {"package", "torch"} and min(machine.products.values()) > 1e6
    assert machine.read_rate(10) == machine.read_rate(1 << 20) > 1e7
    assert list(machine.reads) == [1 << 20]


def test_the_products_of_the_package_are_counted_right(tmp_path, monkeypatch):
    monkeypatch.undo()
    _write_products(tmp_path / "p.mlpackage", PRODUCTS["mil"])
    (function,) = view_package(Package.open(tmp_path / "p.mlpackage")).functions
    assert estimate(function).flops == 2 * PRODUCTS["mil"] * WIDTH * WIDTH * COLUMNS


def test_timing_warms_up():
    calls = []
    sample = repeat(lambda: calls.append(0), 3, warm_up=2)
    assert len(calls) == 5 and len(sample.seconds) == 3
    assert sample.least <= sample.median <= sample.most


def test_where_it_ran():
    assert "it is not known where it ran" in describe("coreml", [{}, {}])
    assert describe("coreml", [{"ne": 1.0, "gpu": 0.0, "cpu": 0.0}]) == (
        "Core ML's plan, by estimated cost: 100 % on the Neural Engine"
    )
    mixed = describe("coreml", [{"ne": 0.9, "cpu": 0.1}, {"ne": 0.7, "cpu": 0.3}])
    assert (
        mixed == "Core ML's plan, by estimated cost: 70 to 90 % on the Neural Engine, 10 to 30 % on the CPU"
    )


def test_a_model_in_parts_is_the_mean_of_its_parts():
    def part(**shares):
        return SimpleNamespace(placement=lambda: shares)

    assert placement_of(part(ne=1.0)) == {"ne": 1.0, "gpu": 0.0, "cpu": 0.0}
    chain = SimpleNamespace(sessions=[part(ne=1.0), part(cpu=1.0)])
    assert placement_of(chain) == {"ne": 0.5, "gpu": 0.0, "cpu": 0.5}
    assert placement_of(SimpleNamespace(sessions=[part(ne=1.0), part()])) == {}
    assert placement_of(object()) == {}


def test_text_and_json_say_the_same(build):
    result = CliRunner().invoke(main, ["bench", str(build), "--runs", "1", "--steps", "2"])
    assert result.exit_code == 0, result.stderr
    assert "first token after" in result.stdout and "16 tokens" in result.stdout
    content = json.loads(
        CliRunner().invoke(main, ["bench", str(build), "--runs", "1", "--steps", "2", "--json"]).stdout
    )
    assert content["executors"]["decode"]["executor"] == "mlx"
