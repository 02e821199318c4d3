"""The committed test vectors still hold: another version of the program replays an older build."""

from pathlib import Path

import pytest

from pdconvert.verify import verify_build

VECTORS = Path(__file__).parents[1] / "test_vectors"


@pytest.mark.parametrize("form", ["rotated", "raw"])
def test_a_committed_build_replays(form):
    report = verify_build(VECTORS / form, executor="auto")
    failed = [check for check in report["checks"] if not check["passed"]]
    assert report["verdict"] == "pass" and failed == []
    assert len(report["checks"]) >= 5
