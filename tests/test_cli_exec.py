"""`pdconvert exec` on packages made by hand."""

import json

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

    for name, program in (("square", square), ("counter", counter)):
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
