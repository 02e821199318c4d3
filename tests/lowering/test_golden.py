"""The lowered op lists, line by line; write_golden.py writes them anew."""

import difflib
from pathlib import Path

import pytest
from write_golden import CASES, GOLDEN, text_of


@pytest.mark.parametrize("name", list(CASES))
def test_the_op_list_is_the_one_that_was_reviewed(name: str, tmp_path: Path) -> None:
    expected = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    difference = list(
        difflib.unified_diff(expected, text_of(name, tmp_path).splitlines(), "golden", "now", n=1)
    )
    shown = "\n".join(difference[:40])
    assert not difference, f"if this is meant, run python tests/lowering/write_golden.py\n{shown}"


def test_every_golden_file_belongs_to_a_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*")} == set(CASES)
