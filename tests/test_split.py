"""A model in parts: where it is cut, and that the parts together are the whole, bit for bit."""

import json

import numpy as np
import pytest

from pdconvert.errors import InputError
from pdconvert.lowering.contract import Part
from pdconvert.pipeline import build
from pdconvert.recipe import load_recipe, recipe_from_data
from pdconvert.runtime.manifest import read_manifest
from pdconvert.split import split
from pdconvert.verify import open_prefill, verify_build


def test_parts_are_cut_under_the_limit_and_evenly():
    sizes = [5, 1, 1, 1, 4, 1]
    assert split(sizes, limit=6) == [
        Part(0, 2, True, False),
        Part(2, 5, False, False),
        Part(5, 6, False, True),
    ]
    assert [(p.first, p.last) for p in split(sizes, parts=2)] == [(0, 2), (2, 6)]
    assert [(p.first, p.last) for p in split([1] * 6, parts=3)] == [(0, 2), (2, 4), (4, 6)]
    assert split(sizes, parts=1) == [Part(0, 6)]


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(InputError, match="layer 1 alone has 0.0 MB in the package, above the limit"):
        split([1, 9], limit=8)
    with pytest.raises(InputError, match="parts is 3, and the model has 2 layers"):
        split([1, 1], parts=3)


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("split")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDCONVERT_CACHE", str(folder / "cache"))
        for name, parts in (("whole", None), ("parts", {"parts": 3})):
            data = load_recipe("tiny").resolved()
            data["source"]["random"]["config"]["num_hidden_layers"] = 5
            data["prefill"] |= {
                "functions": [{"tokens": 32}, {"tokens": 32, "past": 64}],
                "outputs": "logits",
            }
            if parts:
                data["prefill"]["split_model"] = parts
            result = build(recipe_from_data(data, where="test", folder=folder), folder / name)
            assert result.verdict == "pass", result.summary
    return folder / "whole", folder / "parts"


def test_parts_give_what_the_whole_gives_bit_for_bit(builds):
    ids = list(range(90))
    for mode in ("fp32", "fp16"):
        whole, parts = (open_prefill(read_manifest(path), "mil", mode).run(ids) for path in builds)
        for a, b in zip(whole.keys + whole.values, parts.keys + parts.values, strict=True):
            assert np.array_equal(a, b)


def test_the_manifest_lists_the_parts_and_they_verify(builds):
    prefill = json.loads((builds[1] / "manifest.json").read_text())["prefill"]
    assert "package" not in prefill
    assert [part["layers"] for part in prefill["parts"]] == [[0, 2], [2, 4], [4, 5]]
    names = [
        {port["name"] for port in part["functions"]["prefill_32"]["outputs"]} for part in prefill["parts"]
    ]
    assert names == [{"k", "v", "next_hidden"}, {"k", "v", "next_hidden"}, {"k", "v", "logits"}]
    assert verify_build(builds[1], executor="mil")["verdict"] == "pass"
    sizes = [
        sum(f.stat().st_size for f in (builds[1] / part["package"]).rglob("*.bin"))
        for part in prefill["parts"]
    ]
    whole = sum(f.stat().st_size for f in builds[0].rglob("weight.bin"))
    assert abs(sum(sizes) - whole) < 0.02 * whole
