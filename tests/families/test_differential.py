"""Every family against Hugging Face and mlx-lm on small random configs over the fields that it knows."""

from types import ModuleType
from typing import Any

import pytest
from drawing import FIXED, STRUCTURE, VALUES, draw_config, measure, refusal
from hypothesis import event, given, settings
from hypothesis import strategies as st

from pdconvert import families
from pdconvert.program import FAMILY_FLOOR_DB

TRIES = 4
"""Configs that are drawn for one case until one is not refused."""


@pytest.fixture(params=families.names())
def family(request: pytest.FixtureRequest) -> ModuleType:
    return families.get({"model_type": request.param})


def test_everything_that_a_family_computes_with_is_drawn(family: ModuleType) -> None:
    """A new key of a family needs values in drawing.py, or this fails."""
    assert VALUES.keys() | STRUCTURE | FIXED >= family.COMPUTED


def test_a_family_equals_hugging_face_on_whatever_it_does_not_refuse(family: ModuleType) -> None:
    accepted = refused = 0

    @settings(deadline=None, max_examples=25, derandomize=True, database=None)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        nonlocal accepted, refused

        def choose(values: Any) -> Any:
            return data.draw(st.sampled_from(values))

        for _ in range(TRIES):
            config = draw_config(family, choose)
            reason = refusal(family, config)
            if reason is None:
                break
            event(reason.partition(";")[0][:60])
            refused += 1
        else:
            return
        accepted += 1
        found = measure(config, choose)
        assert found.plain_db >= FAMILY_FLOOR_DB
        assert found.adapted_db >= 60
        assert found.mlx_db >= 50

    check()
    assert accepted >= 5, f"{refused} of {refused + accepted} cases were refused"
