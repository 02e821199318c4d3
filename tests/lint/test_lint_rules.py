"""Every rule fires on one small package and is silent on another that differs in this point."""

from pathlib import Path

import pytest
from lint_cases_attention import ATTENTION
from lint_cases_indexing import INDEXING
from lint_cases_layout import LAYOUT
from lint_cases_numerics import NUMERICS
from lint_cases_weights import WEIGHTS
from lint_programs import lint, of

from pdconvert.lint.rule import FAILING
from pdconvert.lint.rules import RULES

CASES = LAYOUT + NUMERICS + ATTENTION + INDEXING + WEIGHTS
OWN_TESTS = {"run-time-shape", "enumerated-shapes", "weight-size", "unshared-weights", "newer-system"}
"""Rules that need more than one function of fixed shapes: their tests are in test_lint_packages.py."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_fires(case, tmp_path: Path) -> None:
    findings = of(lint(case.fires, tmp_path), case.rule)
    assert [finding.found for finding in findings] == [case.found]
    assert findings[0].count == case.count
    assert findings[0].places[0].name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_is_silent(case, tmp_path: Path) -> None:
    assert of(lint(case.silent, tmp_path), case.rule) == []


def test_every_rule_is_tested() -> None:
    tested = [case.rule for case in CASES]
    assert sorted({*tested, *OWN_TESTS}) == sorted(rule.id for rule in RULES)


def test_rules_are_complete_and_ordered() -> None:
    order = {"fatal": 0, "silent": 1, "perf": 2, "info": 3}
    severities = [order[rule.severity] for rule in RULES]
    assert severities == sorted(severities)
    assert len({rule.id for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.title and rule.source and rule.mend and rule.what and rule.chips, rule.id
        assert (rule.on_function is None) != (rule.on_package is None), rule.id
        claims = f"{rule.title} {rule.mend}".lower()
        assert "will run" not in claims and "guarantee" not in claims, rule.id
    assert FAILING == ("fatal", "silent")
