"""`pdconvert exec` on packages made by hand."""

import json
import re

import numpy as np
import pytest
from click.testing import CliRunner

from pdconvert.cli import main
from pdconvert.quiet import quiet_coremltools


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """`square`: y = mean(x · x) in fp16; `counter`: a state that x is added to, read back."""
    ct = quiet_coremltools()
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    folder = tmp_path_factory.mktemp("packages")

    @mb.program(input_specs=[mb.TensorSpec((1, 8), types.fp16)], opset_version=ct.target.iOS18)
    def square(x):
        return mb.reduce_mean(x=mb.mul(x=x, y=x, name="squares"), axes=[1], keep_dims=True, name="y")

    @mb.program(
        input_specs=[mb.TensorSpec((1, 4), types.fp16), mb.StateTensorSpec((1, 4), types.fp16)],
        opset_version=ct.target.iOS18,
    )
    def counter(x, total):
        new = mb.add(x=x, y=mb.read_state(input=total), name="new")
        return mb.identity(x=mb.coreml_update_state(state=total, value=new), name="y")

    @mb.program(
        input_specs=[mb.TensorSpec((1, 2), types.fp16), mb.TensorSpec((3,), types.int32)],
        opset_version=ct.target.iOS18,
    )
    def named(x, i):
        return mb.mul(x=x, y=x, name="file"), mb.add(x=i, y=1, name="allow_pickle")

    for name, program in (("square", square), ("counter", counter), ("named", named)):
        model = ct.convert(
            program, convert_to="mlprogram", minimum_deployment_target=ct.target.iOS18, skip_model_load=True
        )
        model.save(str(folder / f"{name}.mlpackage"))
    return folder


def run(*arguments):
    return CliRunner().invoke(main, [str(item) for item in arguments])


def arrays(path, **values):
    np.savez(path, **values)
    return path


def test_outputs_are_written_and_differ_by_mode(packages, tmp_path):
    inputs = arrays(tmp_path / "in.npz", x=np.full((1, 8), 300, np.float16))
    for mode, expected in (("fp32", 90000.0), ("fp16", np.inf)):
        out = tmp_path / f"{mode}.npz"
        result = run("exec", packages / "square.mlpackage", "--inputs", inputs, "--out", out, "--mode", mode)
        assert result.exit_code == 0, result.output
        assert np.load(out)["y"].item() == expected


def test_the_trace_names_the_square_that_overflows(packages, tmp_path):
    inputs = arrays(tmp_path / "in.npz", x=np.full((1, 8), 300, np.float16))
    result = run("exec", packages / "square.mlpackage", "--inputs", inputs, "--trace", "--json")
    content = json.loads(result.stdout)
    assert content["fault"]["name"] == "squares" and content["fault"]["kind"] == "overflow"
    assert content["fault"]["nonfinite"] == 8
    assert [line["output"] for line in content["trace"]] == ["squares", "y"]
    text = run("exec", packages / "square.mlpackage", "--inputs", inputs, "--trace").output
    assert "fault: mul squares overflows fp16 (8 values; its range is 9e+04 … 9e+04)" in text


def test_states_live_through_the_steps(packages, tmp_path):
    steps = np.arange(12, dtype=np.float16).reshape(3, 1, 4)
    inputs, out = arrays(tmp_path / "in.npz", x=steps), tmp_path / "out.npz"
    result = run("exec", packages / "counter.mlpackage", "--inputs", inputs, "--out", out, "--steps", 3)
    assert result.exit_code == 0, result.output
    assert np.array_equal(np.load(out)["y"], steps.cumsum(0))


def test_the_step_at_fault_is_the_one_that_is_shown(packages, tmp_path):
    steps = np.stack([np.full((1, 8), size, np.float16) for size in (1, 300, 2)])
    inputs = arrays(tmp_path / "in.npz", x=steps)
    options = ("exec", packages / "square.mlpackage", "--inputs", inputs, "--steps", 3, "--trace")
    content = json.loads(run(*options, "--json").stdout)
    assert content["fault"]["step"] == 1 and content["fault"]["name"] == "squares"
    assert [line["sqnr_db"] for line in content["trace"]] == ["-inf", "-inf"]
    assert "fault in step 1, traced above: mul squares overflows" in run(*options).output
    good = run(
        *options[:3], arrays(tmp_path / "good.npz", x=np.full((1, 8), 1.1, np.float16)), "--trace"
    ).output
    assert re.search(
        r"no op by itself overflows or loses 20 dB in fp16; the outputs keep [67]\d\.\d dB", good
    ), good
    exact = json.loads(
        run(*options[:3], arrays(tmp_path / "one.npz", x=steps[0]), "--trace", "--json").stdout
    )
    assert [line["sqnr_db"] for line in exact["trace"]] == ["inf", "inf"] and exact["fault"] is None


def test_outputs_go_to_the_named_file_alone(packages, tmp_path):
    inputs = arrays(tmp_path / "in.npz", x=np.ones((1, 2), np.float16), i=np.arange(3))
    beside = tmp_path / "out.npz"
    beside.write_text("precious")
    command = ("exec", packages / "named.mlpackage", "--inputs", inputs, "--out")
    result = run(*command, tmp_path / "out")
    assert result.exit_code == 0, result.output
    with np.load(tmp_path / "out") as content:
        assert {name: content[name].tolist() for name in content.files} == {
            "file": [[1.0, 1.0]],
            "allow_pickle": [1, 2, 3],
        }
    assert beside.read_text() == "precious"
    (tmp_path / "folder").mkdir()
    for place, message in (
        (tmp_path / "folder", "not a regular file"),
        (tmp_path / "no" / "out", "cannot be written"),
    ):
        result = run(*command, place)
        assert result.exit_code == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "in.npz", "out", "out.npz"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"i": np.array([2**32, 0, 1])}, "input 'i' holds 0 to 4294967296, more than int32 does"),
        ({"i": np.array([2**63, 0, 1], np.uint64)}, "more than int32 does"),
        ({"i": np.array([0.5, 0, 1])}, "input 'i' has type torch.float64, expected int32"),
        ({"x": np.ones((1, 2), np.complex64)}, "'x' is of type complex64"),
        ({"x": np.array([["a", "b"]])}, "'x' is of type <U1"),
    ],
)
def test_values_that_an_input_cannot_hold(packages, tmp_path, values, message):
    given = {"x": np.ones((1, 2), np.float16), "i": np.zeros(3, np.int32), **values}
    result = run("exec", packages / "named.mlpackage", "--inputs", arrays(tmp_path / "in.npz", **given))
    assert result.exit_code == 2 and message in result.stderr, result.output


def test_numbers_in_the_other_byte_order(packages, tmp_path):
    inputs = arrays(tmp_path / "in.npz", x=np.full((1, 8), 3, ">f4"))
    out = tmp_path / "out.npz"
    assert run("exec", packages / "square.mlpackage", "--inputs", inputs, "--out", out).exit_code == 0
    assert np.load(out)["y"].item() == 9


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"PK\x03\x04 and no more"])
def test_files_that_are_no_archive(packages, tmp_path, content):
    (tmp_path / "in.npz").write_bytes(content)
    result = run("exec", packages / "square.mlpackage", "--inputs", tmp_path / "in.npz")
    assert result.exit_code == 2 and "not an .npz file of plain arrays" in result.stderr


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ({"z": np.zeros((1, 8), np.float16)}, (), "input 'x' is missing"),
        ({"x": np.zeros((1, 9), np.float16)}, (), "has shape [1, 9], expected [1, 8]"),
        ({"x": np.zeros((2, 1, 8), np.float16)}, ("--steps", 3), "has 2 steps, and --steps is 3"),
        ({"x": np.zeros((1, 8), np.float16)}, ("--function", "other"), "other"),
    ],
)
def test_wrong_inputs_are_refused_by_name(packages, tmp_path, values, options, message):
    inputs = arrays(tmp_path / "in.npz", **values)
    result = run("exec", packages / "square.mlpackage", "--inputs", inputs, *options)
    assert result.exit_code == 2 and message in result.stderr


def test_a_pickle_is_not_loaded(packages, tmp_path):
    np.savez(tmp_path / "in.npz", x=np.array([object()], dtype=object))
    result = run("exec", packages / "square.mlpackage", "--inputs", tmp_path / "in.npz")
    assert result.exit_code == 2 and "not an .npz file of plain arrays" in result.stderr
