import json
import math

import pytest

from pdconvert.checks import Check, verdict
from pdconvert.ledger import Ledger
from pdconvert.program import Step

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("value", "limit", "ceiling", "passed"),
    [
        (60.1, 60.0, False, True),
        (60.0, 60.0, False, True),
        (59.9, 60.0, False, False),
        (INF, 60.0, False, True),
        (-INF, 60.0, False, False),
        (NAN, 60.0, False, False),
        (0.009, 0.01, True, True),
        (0.01, 0.01, True, True),
        (0.011, 0.01, True, False),
        (INF, 0.01, True, False),
        (NAN, 0.01, True, False),
        (-3.0, None, False, True),
        (NAN, None, False, False),
    ],
)
def test_a_value_passes_its_limit_and_nan_never(
    value: float, limit: float | None, ceiling: bool, passed: bool
) -> None:
    assert Check("a", "sqnr_db", value, limit, ceiling).passed is passed


@pytest.mark.parametrize("value", [12.5, INF, -INF, 0.0])
@pytest.mark.parametrize("ceiling", [False, True])
@pytest.mark.parametrize("floor", [None, 3.0])
def test_a_check_survives_json(value: float, ceiling: bool, floor: float | None) -> None:
    check = Check("package fp16: k", "sqnr_db", value, floor, ceiling, hint="layer 3")
    assert Check.from_json(json.loads(json.dumps(check.to_json(), allow_nan=False))) == check


def test_nan_survives_json_as_a_failure() -> None:
    line = json.loads(json.dumps(Check("a", "kld_nats", NAN, 1.0).to_json(), allow_nan=False))
    assert line["value"] == "nan" and line["passed"] is False
    again = Check.from_json(line)
    assert math.isnan(again.value) and not again.passed


def test_the_json_of_a_check_is_complete_and_has_no_empty_hint() -> None:
    assert Check("a", "sqnr_db", 61.0, 60.0).to_json() == {
        "name": "a",
        "metric": "sqnr_db",
        "value": 61.0,
        "floor": 60.0,
        "passed": True,
        "limit": "min",
    }


def test_the_verdict_needs_every_check_and_at_least_one() -> None:
    good, bad = Check("a", "x", 1.0, 0.0), Check("b", "x", -1.0, 0.0)
    assert verdict([good, good]) == "pass"
    assert verdict([good, bad]) == verdict([bad]) == verdict([]) == "fail"


def step(block: str, name: str, previous: float, original: float = 80.0, floor: float = 80.0) -> Step:
    return Step(block, name, original, previous, floor, 0.1)


def test_the_ledger_asks_the_worst_block_of_every_step() -> None:
    ledger = Ledger(
        [
            step("layers.0", "family", 120.0, floor=90.0),
            step("layers.0", "linear_to_conv2d", 95.0),
            step("layers.1", "family", 118.0, floor=90.0),
            step("layers.1", "linear_to_conv2d", 70.0),
        ]
    )
    checks = ledger.gates(60.0)
    assert [(check.value, check.floor, check.passed) for check in checks] == [
        (118.0, 90.0, True),
        (70.0, 80.0, False),
    ]
    assert "layers.1" in checks[1].name and "linear_to_conv2d" in checks[1].hint


def test_a_recipe_raises_the_gate_of_exact_steps_but_not_of_the_quantizer() -> None:
    ledger = Ledger([step("head", "safe_rms_norm", 99.0), step("head", "quantize_weights", 33.0, floor=25.0)])
    assert [check.floor for check in ledger.gates(100.0)] == [100.0, 25.0]
    assert [check.passed for check in ledger.gates(100.0)] == [False, True]


def test_the_worst_block_is_the_one_nearest_to_its_own_floor() -> None:
    """Layers at eight bits and a head in fp16 have different floors for the same step."""
    layer, head = (
        step("layers.0", "quantize_weights", 33.0, floor=25.0),
        step("head", "quantize_weights", 45.0, floor=50.0),
    )
    (check,) = Ledger([layer, head]).gates(60.0)
    assert not check.passed and check.floor == 50.0 and "head" in check.name


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("where", ["previous", "original"])
def test_nan_in_any_block_fails_its_step(where: str, order: int) -> None:
    broken = step(
        "layers.1", "fix_shapes", **{where: NAN, **({"previous": 200.0} if where == "original" else {})}
    )
    steps = [step("layers.0", "fix_shapes", 120.0), broken, step("layers.2", "fix_shapes", 110.0)]
    ledger = Ledger(steps[::order])
    (check,) = ledger.gates(60.0)
    assert not check.passed
    assert math.isnan(ledger.table()[0][f"{where}_db"])


def test_a_table_has_one_row_per_step_in_order() -> None:
    ledger = Ledger([step("a", "one", 90.0, 70.0), step("b", "one", 95.0, 65.0), step("a", "two", 99.0)])
    assert ledger.names() == ["one", "two"]
    assert ledger.table()[0] == {"step": "one", "block": "a", "previous_db": 90.0, "original_db": 65.0}
