"""The generated pages are those that the code gives."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from lint_programs import Example, conv, mb

from pdconvert.executors.mil import Package
from pdconvert.executors.mil.view import view_package
from pdconvert.lint.rules import RULES
from pdconvert.pipeline import build
from pdconvert.recipe import load_recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch):
    """Import a module of the folder `scripts`."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    return load


def test_the_rules_page_is_current(script) -> None:
    module = script("lint_rules")
    page = module.TARGET.read_text(encoding="utf-8")
    assert page == module.render(), "run python scripts/lint_rules.py"
    assert all(f"\n#### {rule.id}\n" in page for rule in RULES)


def test_the_conformance_page_has_every_form_of_an_own_package(script, tmp_path: Path) -> None:
    module = script("conformance")
    page = module.TARGET.read_text(encoding="utf-8")
    build(load_recipe("tiny"), tmp_path / "out")
    missing = [
        one
        for one in module.forms(tmp_path / "out" / "prefill.mlpackage")
        if module.row_start(one) not in page
    ]
    assert missing == [], "run python scripts/conformance.py"


def form_of(script, tmp_path: Path, body) -> tuple[str, str, str]:
    package = Package.open(Example(body).save(tmp_path / "x.mlpackage"))
    (function,) = view_package(package).functions
    return script("conformance").form(function.ops[-1])


def test_a_form_names_choices_and_leaves_sizes_out(script, tmp_path: Path) -> None:
    assert form_of(script, tmp_path, lambda i: mb.softmax(x=i["x"], axis=-1)) == (
        "softmax",
        "axis=3 of 4",
        "x: fp16 4-d → fp16 4-d",
    )


@pytest.mark.parametrize("shape", [[1, 4, 16, 64], [1, 8, 8, 64]])
def test_a_form_is_the_same_for_other_sizes(script, tmp_path: Path, shape) -> None:
    assert form_of(script, tmp_path, lambda i: mb.reshape(x=i["x"], shape=shape)) == (
        "reshape",
        "shape=4 sizes",
        "x: fp16 4-d → fp16 4-d",
    )


def test_a_form_tells_constants_from_computed_tensors(script, tmp_path: Path) -> None:
    op, params, tensors = form_of(script, tmp_path, lambda i: conv(i["x"]))
    assert op == "conv"
    assert "groups=1" in params and "pad_type=valid" in params
    assert tensors == "weight: constant fp16 4-d; x: fp16 4-d → fp16 4-d"


def test_the_page_counts_what_coremltools_writes_too(script) -> None:
    module = script("conformance")
    one, other = ("relu", "", "x: fp16 4-d → fp16 4-d"), ("silu", "", "x: fp16 4-d → fp16 4-d")
    own = {"iOS16": {one}, "iOS17": {one, other}, "iOS18": {other}}
    page = module.render(own, {"iOS16": {one}, "iOS17": {one}, "iOS18": set()}, "9.0")
    assert "| `relu` | - | x: fp16 4-d → fp16 4-d | ct | ct | - |" in page
    assert "| `silu` | - | x: fp16 4-d → fp16 4-d | - | unproven | unproven |" in page
    assert "2 of 4 pairs" in page
