"""What the model description says of inputs: shapes that a package takes, and defaults."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mil_programs import ct

from pdconvert.errors import InputError
from pdconvert.executors.mil import MilSession
from pdconvert.executors.mil.interface import UNLIMITED, Feature


def converted(path: Path, *inputs: Any) -> MilSession:
    """max(x, 0), plus y where there are two inputs, by `ct.convert`."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            return torch.relu(x) if y is None else torch.relu(x) + y

    examples = tuple(torch.zeros(1, 3, 32, 32) for _ in inputs)
    model = ct.convert(
        torch.jit.trace(Model().eval(), examples),
        inputs=list(inputs),
        minimum_deployment_target=ct.target.iOS17,
        skip_model_load=True,
    )
    model.save(str(path / "p.mlpackage"))
    return MilSession(path / "p.mlpackage", mode="fp32")


LISTED = [(1, 3, 32, 32), (1, 3, 48, 64)]
HEIGHTS = (1, 3, ct.RangeDim(16, 40, default=32), 32)
TAKEN: dict[str, tuple[Any, list[tuple[int, ...]], list[tuple[int, ...]], str]] = {
    "listed": (
        ct.TensorType("x", shape=ct.EnumeratedShapes(LISTED)),
        LISTED,
        [(1, 3, 20, 20), (1, 3, 48, 32)],
        "takes [1, 3, 32, 32] or [1, 3, 48, 64]",
    ),
    "a range": (
        ct.TensorType("x", shape=HEIGHTS),
        [(1, 3, 16, 32), (1, 3, 40, 32)],
        [(1, 3, 15, 32), (1, 3, 41, 32)],
        "takes [1 to 1, 3 to 3, 16 to 40, 32 to 32]",
    ),
    "listed images": (
        ct.ImageType("x", shape=ct.EnumeratedShapes(LISTED)),
        LISTED,
        [(1, 3, 20, 20)],
        "takes [32, 32] or [48, 64]",
    ),
    "a range of images": (
        ct.ImageType("x", shape=ct.Shape(HEIGHTS)),
        [(1, 3, 16, 32)],
        [(1, 3, 41, 32)],
        "takes [16 to 40, 32 to 32]",
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_shapes_that_a_package_takes(name: str, tmp_path: Path) -> None:
    kind, taken, others, message = TAKEN[name]
    session = converted(tmp_path, kind)
    for shape in taken:
        [result] = session.run({"x": np.ones(shape, np.float32)}).values()
        assert result.shape == shape
    for shape in others:
        with pytest.raises(InputError) as error:
            session.run({"x": np.ones(shape, np.float32)})
        assert str(list(shape)) in str(error.value) and message in str(error.value)


def test_an_input_with_a_default_may_be_left_out(tmp_path: Path) -> None:
    shape = (1, 3, 32, 32)
    default = np.full(shape, 7, np.float32)
    session = converted(tmp_path, ct.TensorType("x", shape), ct.TensorType("y", shape, default_value=default))
    x = np.full(shape, 2, np.float32)
    [left_out], [given] = session.run({"x": x}).values(), session.run({"x": x, "y": x}).values()
    assert left_out.unique().tolist() == [9] and given.unique().tolist() == [4]
    with pytest.raises(InputError, match="input 'x' is missing"):
        session.run({"y": x})


def test_a_range_without_an_end() -> None:
    feature = Feature(bounds=((1, 1), (16, UNLIMITED)))
    assert feature.allows((1, 16)) and feature.allows((1, 4000)) and not feature.allows((1, 15))
    assert not feature.allows((16,)), "fewer axes than the description has"
    assert feature.flexible == "range" and feature.shapes_text == "[1 to 1, 16 to any]"
