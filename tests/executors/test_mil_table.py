"""The op tables are complete: every op of coremltools is run and tested, or refused by name."""

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

import pytest
import test_mil_compression
import test_mil_elementwise
import test_mil_indexing
import test_mil_layers
import test_mil_products
import test_mil_recurrent
import test_mil_reduction
import test_mil_shape
from mil_programs import SSAOpRegistry

from pdconvert.executors.mil.op_types import KNOWN
from pdconvert.executors.mil.ops import OPS, REFUSED, STATE_OPS

TESTED = {
    *test_mil_compression.CASES,
    *test_mil_compression.TESTED,
    *test_mil_elementwise.CASES,
    *test_mil_indexing.CASES,
    *test_mil_layers.CASES,
    *test_mil_products.CASES,
    *test_mil_recurrent.CASES,
    *test_mil_reduction.CASES,
    *test_mil_shape.CASES,
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "op_conformance.py"
    spec = importlib.util.spec_from_file_location("op_conformance", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_op_is_run_or_refused(script: ModuleType) -> None:
    known = {*OPS, *REFUSED, *STATE_OPS, "const"}
    assert set(script.registered_ops()) == known == KNOWN
    assert not set(OPS) & set(REFUSED)


def test_every_op_that_is_run_is_tested() -> None:
    assert set(OPS) == TESTED


@pytest.mark.parametrize("op", sorted(OPS))
def test_a_row_takes_just_the_inputs_that_mil_gives(op: str) -> None:
    row = OPS[op]
    wanted = {
        name for version in SSAOpRegistry.core_ops[op].values() for name in version.input_spec.input_types
    }
    assert {*row.tensors, *row.params} == wanted
    if row.bind is not None:
        assert set(inspect.signature(row.bind).parameters) == set(row.params)


def test_the_page_is_up_to_date(script: ModuleType) -> None:
    page = script.TARGET.read_text(encoding="utf-8")
    assert page == script.document(), "run python scripts/op_conformance.py"
