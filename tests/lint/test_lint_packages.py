"""Rules that look at whole packages or at flexible shapes, and packages that pdconvert itself builds."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from lint_programs import Example, conv, ct, half, lint, mb, of, save

from pdconvert.executors.mil import Package
from pdconvert.executors.mil.view import view_package
from pdconvert.lint.report import find, lint_path
from pdconvert.lint.targets import CHIP_NAMES, Targets
from pdconvert.pipeline import build
from pdconvert.recipe import load_recipe

ALL = Targets(CHIP_NAMES, ("iOS18",))


def convert(path: Path, module: torch.nn.Module, example: torch.Tensor, **how) -> Path:
    """A package that `ct.convert` wrote."""
    model = ct.convert(
        torch.jit.trace(module.eval(), example),
        minimum_deployment_target=ct.target.iOS17,
        skip_model_load=True,
        **how,
    )
    model.save(str(path))
    return path


def converted(path: Path, shape, precision=ct.precision.FLOAT16) -> Path:
    """A convolution for a flexible or fixed input shape."""
    module = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 1), torch.nn.ReLU())
    inputs = [ct.TensorType("x", shape)]
    return convert(path, module, torch.zeros(1, 8, 1, 32), inputs=inputs, compute_precision=precision)


@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        ((1, 8, 1, ct.RangeDim(1, 64, default=32)), "run-time-shape"),
        (ct.EnumeratedShapes([[1, 8, 1, 32], [1, 8, 1, 64]]), "enumerated-shapes"),
        ((1, 8, 1, 32), None),
    ],
    ids=["range", "enumerated", "fixed"],
)
def test_flexible_shapes(tmp_path: Path, shape, rule) -> None:
    report = lint_path(converted(tmp_path / "x.mlpackage", shape))
    found = [f for f in report.findings if f.rule in ("run-time-shape", "enumerated-shapes")]
    assert [f.rule for f in found] == ([rule] if rule else [])
    assert report.passed == (rule != "run-time-shape")


@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        (ct.EnumeratedShapes([(1, 3, 32, 32), (1, 3, 48, 64)]), "enumerated-shapes"),
        (ct.Shape((1, 3, 32, ct.RangeDim(16, 64, default=32))), "run-time-shape"),
        ((1, 3, 32, 32), None),
    ],
    ids=["enumerated", "range", "fixed"],
)
def test_flexible_images(tmp_path: Path, shape, rule) -> None:
    inputs = [ct.ImageType("x", shape=shape)]
    path = convert(
        tmp_path / "x.mlpackage", torch.nn.Conv2d(3, 4, 1), torch.zeros(1, 3, 32, 32), inputs=inputs
    )
    found = [f.rule for f in lint_path(path).findings]
    assert [name for name in found if name in ("run-time-shape", "enumerated-shapes")] == (
        [rule] if rule else []
    )


def test_a_classifier_is_no_fp32_op_inside(tmp_path: Path) -> None:
    path = convert(
        tmp_path / "x.mlpackage",
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(8, 3), torch.nn.Softmax(-1)),
        torch.zeros(1, 8, 1, 1),
        inputs=[ct.TensorType("x", (1, 8, 1, 1))],
        classifier_config=ct.ClassifierConfig(["a", "b", "c"]),
    )
    findings = [f.rule for f in lint_path(path).findings]
    assert findings and "fp32-inside" not in findings


def test_sizes_of_a_flexible_shape_are_no_table(tmp_path: Path) -> None:
    class Flat(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(2, 3) * x.shape[3]

    path = convert(
        tmp_path / "x.mlpackage",
        Flat(),
        torch.zeros(1, 8, 4, 4),
        inputs=[ct.TensorType("x", (1, 8, ct.RangeDim(2, 8, default=4), ct.RangeDim(2, 8, default=4)))],
    )
    [function] = view_package(Package.open(path)).functions
    findings = [f.rule for f in lint_path(path).findings]
    assert list(function.of_type("shape")) and not {"gather", "slice-saturation"} & {*findings}


def test_a_package_in_fp32_fails(tmp_path: Path) -> None:
    report = lint_path(converted(tmp_path / "x.mlpackage", (1, 8, 1, 32), ct.precision.FLOAT32))
    assert {(f.found, f.count) for f in of(report, "fp32-inside")} == {
        ("conv in fp32", 1),
        ("relu in fp32", 1),
    }
    assert not report.passed


def shared(name: str):
    def body(inputs):
        weight = mb.const(val=half(64, 64, 1, 1), name="weight")
        if name:
            weight.op.weight_id = name
        return mb.conv(x=inputs["x"], weight=weight)

    return Example(body)


@pytest.mark.parametrize(("name", "copies"), [("weight", 1), ("", 2)], ids=["shared", "apart"])
def test_unshared_weights(tmp_path: Path, name: str, copies: int) -> None:
    path = save(tmp_path / "x.mlpackage", {"a": shared(name), "b": shared(name)})
    found = of(lint_path(path), "unshared-weights")
    assert [f.found for f in found] == (["weight stored 2 times"] if copies == 2 else [])
    assert all(f.places[0].name == "weight (8192 bytes more)" and f.function is None for f in found)


@pytest.mark.parametrize(
    ("size", "chips"),
    [(900_000_000, ()), (1_500_000_000, ("a14", "a15", "a16", "a17", "a18")), (2_500_000_000, CHIP_NAMES)],
)
def test_weight_size(tmp_path: Path, size: int, chips: tuple[str, ...]) -> None:
    view = view_package(Package.open(Example(lambda i: conv(i["x"])).save(tmp_path / "x.mlpackage")))
    assert list(view.weight_files) == ["weight.bin"]
    view.weight_files["weight.bin"] = size
    found = [f for f in find([view], ALL) if f.rule == "weight-size"]
    assert [f.chips for f in found] == ([chips] if chips else [])


@pytest.mark.parametrize(("target", "fires"), [("iOS17", True), ("iOS18", False)])
def test_newer_system(tmp_path: Path, target: str, fires: bool) -> None:
    found = of(lint(Example(lambda i: mb.relu(x=i["x"])), tmp_path, [target]), "newer-system")
    assert [(f.found, f.systems) for f in found] == ([("needs iOS18", ("iOS17",))] if fires else [])


@pytest.mark.parametrize(
    "overrides",
    [(), ("prefill.outputs=logits", "prefill.embedding=graph", "passes.eager_gqa_attention.heads=single")],
    ids=["default", "logits"],
)
def test_own_packages_have_no_fatal_or_silent_finding(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    build(load_recipe("tiny", overrides=overrides), tmp_path / "out")
    report = lint_path(tmp_path / "out")
    assert report.passed, [f.found for f in report.findings if f.severity in ("fatal", "silent")]
    assert report.packages == [tmp_path / "out" / "prefill.mlpackage"]


def test_a_norm_without_scaling_is_named(tmp_path: Path) -> None:
    """What `safe_rms_norm` prevents: its absence is found at the squaring op of each norm."""
    recipe = load_recipe("tiny").resolved()
    recipe["passes"] = [item for item in recipe["passes"] if "safe_rms_norm" not in str(item)]
    path = tmp_path / "plain.yaml"
    path.write_text(json.dumps(recipe))
    build(load_recipe(str(path)), tmp_path / "out")
    (finding,) = of(lint_path(tmp_path / "out"), "squares-overflow")
    assert finding.count == 3
    assert [place.name.split("_layernorm")[0] for place in finding.places] == [
        "layers_0_input",
        "layers_0_post_attention",
        "layers_1_input",
    ]


class Usual(torch.nn.Module):
    """One decoder layer as it is usually written, with embedding and head: 4 heads of 16, 2 of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(20000, 64)
        self.q, self.o = (torch.nn.Linear(64, 64, bias=False) for _ in range(2))
        self.k, self.v = (torch.nn.Linear(64, 32, bias=False) for _ in range(2))
        self.head = torch.nn.Linear(64, 20000, bias=False)
        self.gain = torch.nn.Parameter(torch.ones(64))
        self.register_buffer("frequencies", 10000 ** -(torch.arange(8) / 8))
        self.register_buffer("mask", torch.full((32, 32), -torch.inf).triu(1))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        x = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-5) * self.gain
        angles = positions[:, None, :, None].float() * self.frequencies
        cos, sin = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))
        q = self.q(x).reshape(1, 32, 4, 16).transpose(1, 2)
        k, v = (layer(x).reshape(1, 32, 2, 16).transpose(1, 2) for layer in (self.k, self.v))
        q, k = (part * cos + torch.cat((-part[..., 8:], part[..., :8]), -1) * sin for part in (q, k))
        k, v = (part[:, :, None].expand(1, 2, 2, 32, 16).reshape(1, 4, 32, 16) for part in (k, v))
        weights = torch.softmax(q @ k.transpose(2, 3) / 4 + self.mask, -1)
        return self.head(hidden + self.o((weights @ v).transpose(1, 2).reshape(1, 32, 64)))


def test_a_model_as_it_is_usually_converted(tmp_path: Path) -> None:
    ids = torch.zeros(1, 32, dtype=torch.int32)
    model = ct.convert(
        torch.jit.trace(Usual().eval(), (ids, ids)),
        inputs=[ct.TensorType(name, (1, 32), np.int32) for name in ("ids", "positions")],
        outputs=[ct.TensorType("logits", dtype=np.float16)],
        minimum_deployment_target=ct.target.iOS18,
        skip_model_load=True,
    )
    model.save(str(tmp_path / "x.mlpackage"))
    found = {finding.rule for finding in lint_path(tmp_path / "x.mlpackage").findings}
    assert found == {
        "axis-limit",
        "squares-overflow",
        "mask-constant",
        "rope-in-graph",
        "slice-saturation",
        "linear-op",
        "last-axis-copy",
        "pow",
        "baked-mask",
        "repeated-keys",
        "all-logits",
        "gather",
        "integer-ops",
        "inner-last-axis",
        "softmax-last-axis",
        "heads-in-one-product",
        "large-head",
    }
