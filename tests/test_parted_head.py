"""Packages whose vocabulary is cut: the logits of one in one piece, to the bit, wherever they are read."""

import json
from pathlib import Path

import numpy as np
import pytest

from pdconvert.emit.vectors import read_vectors
from pdconvert.executors.mil import Package
from pdconvert.families import llama
from pdconvert.lint.report import lint_path
from pdconvert.pipeline import build
from pdconvert.recipe import load_recipe, recipe_from_data
from pdconvert.runtime.manifest import read_manifest
from pdconvert.runtime.run import run_build
from pdconvert.runtime.sessions import open_function
from pdconvert.verify import logits_db, verify_build

FUNCTIONS = [{"tokens": 32}, {"tokens": 1, "past": 64}]


def made(
    folder: Path, *, config: dict | None = None, scheme: str = "w8a16", drop: tuple[str, ...] = (), **prefill
) -> Path:
    """A verified build of the tiny recipe."""
    data = load_recipe("tiny", overrides=[f"passes.quantize_weights.scheme={scheme}"]).resolved()
    data["prefill"] |= {"outputs": "logits", "functions": FUNCTIONS, **prefill}
    data["passes"] = [item for item in data["passes"] if not any(name in str(item) for name in drop)]
    data["source"] = {"random": {"seed": 0, "config": {**llama.TINY, **(config or {})}}}
    recipe = recipe_from_data(data, where="test", folder=folder)
    result = build(recipe, folder / "build")
    assert result.verdict == "pass", result.summary
    return folder / "build"


FORMS = {
    "w8": {},
    "fp16, all rows": {"scheme": "none", "logits": "all", "functions": [{"tokens": 32}]},
    "linear": {"drop": ("linear_to_conv2d", "eager_gqa_attention", "safe_rms_norm"), "scheme": "none"},
    "in the graph": {"embedding": "graph"},
    "in parts of the model": {"split_model": {"parts": 2}},
}


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_one_piece(form: str, tmp_path: Path) -> None:
    whole, cut = (made(tmp_path / str(limit), head_limit=limit, **FORMS[form]) for limit in (320, 100))
    for mode in ("fp32", "fp16"):
        for case, other in zip(
            *(read_vectors(folder / "test_vectors")[0] for folder in (whole, cut)), strict=True
        ):
            got = []
            for folder, one in ((whole, case), (cut, other)):
                manifest = read_manifest(folder)
                session = open_function(manifest, one.function, kind="mil", mode=mode)
                got.append(manifest.functions[one.function].logits(session.run(one.inputs)))
            if mode == "fp16":
                np.testing.assert_array_equal(*got)
            else:  # products are packed for their size there
                np.testing.assert_allclose(*got, rtol=0, atol=1e-6 * np.abs(got[0]).max())
            names = [f"logits_{number}" for number in (1, 2, 3, 4)]
            np.testing.assert_array_equal(
                case.expected["logits"], np.concatenate([other.expected[name] for name in names], 1)
            )
    assert verify_build(cut, "mil")["verdict"] == "pass"


def test_weights_take_the_same_room_and_are_shared_between_functions(tmp_path: Path) -> None:
    whole, cut = (made(tmp_path / str(limit), head_limit=limit) for limit in (320, 100))
    sizes = [
        (folder / "prefill.mlpackage/Data/com.apple.CoreML/weights/weight.bin").stat().st_size
        for folder in (whole, cut)
    ]
    assert abs(sizes[1] - sizes[0]) < 0.01 * sizes[0]
    package = Package.open(cut / "prefill.mlpackage")
    used = [
        {
            binding.value.blobFileValue.offset
            for op in package.block(name).operations
            if op.type == "constexpr_blockwise_shift_scale" and op.outputs[0].name.startswith("head_")
            for argument in op.inputs.values()
            for binding in argument.arguments
        }
        for name in package.function_names
    ]
    assert used[0] == used[1]


def test_the_text_of_the_package_alone(tmp_path: Path) -> None:
    folder = made(tmp_path, head_limit=100)
    texts = [
        run_build(folder, "abc", max_tokens=12, decode=decode).token_ids for decode in ("mlx", "package")
    ]
    assert texts[0] == texts[1]


def test_the_manifest_gives_the_parts_in_order(tmp_path: Path) -> None:
    folder = made(tmp_path, head_limit=100)
    content = json.loads((folder / "manifest.json").read_text())
    outputs = content["prefill"]["functions"]["prefill_32"]["outputs"]
    found = [(port["name"], port["role"], port["shape"]) for port in outputs if port["role"] == "logits"]
    assert found == [(f"logits_{number}", "logits", [1, 80, 1, 1]) for number in (1, 2, 3, 4)]
    assert content["passes"]["graph"]["head"] == ["SplitHead(limit=100)"]
    assert content["recipe"]["prefill"]["head_limit"] == 100


def test_what_is_added_to_a_whole_row_of_logits_does_not_count() -> None:
    draw = np.random.default_rng(0)
    logits = draw.standard_normal((1, 320, 1, 4)).astype(np.float32)
    noisy = logits + 1e-3 * draw.standard_normal(logits.shape).astype(np.float32)
    found = logits_db(logits, noisy, 4)
    assert 58 < found < 62
    assert logits_db(logits, noisy + 5, 4) == pytest.approx(found, abs=0.01)
    shifted = noisy.copy()
    shifted[:, :160] += 0.5  # of a part of the vocabulary only
    assert logits_db(logits, shifted, 4) < 20
    noisy[..., 3] = 9e9  # padding
    assert logits_db(logits, noisy, 3) > 58


class TestLongVocabulary:
    """One that is too long for the Neural Engines through A15 and M1."""

    CONFIG = {"vocab_size": 20000, "tie_word_embeddings": True}

    def test_it_is_cut_without_being_asked(self, tmp_path: Path) -> None:
        folder = made(tmp_path, config=self.CONFIG)
        function = Package.open(folder / "prefill.mlpackage").function("prefill_32")
        assert [info.shape for name, info in function.outputs.items() if name.startswith("logits")] == [
            (1, 10000, 1, 1)
        ] * 2
        report = lint_path(folder)
        assert report.passed, [item.found for item in report.findings]

    def test_lint_names_the_chips_where_it_is_left_whole(self, tmp_path: Path) -> None:
        report = lint_path(made(tmp_path, config=self.CONFIG, head_limit=65536))
        found = [item for item in report.findings if item.rule == "axis-limit"]
        assert {item.chips for item in found} == {("a14", "a15", "m1")}
        assert {item.found for item in found} == {"channel axis 1 of 20000"}

    def test_without_logits_there_is_nothing_to_cut(self, tmp_path: Path) -> None:
        folder = made(tmp_path, config=self.CONFIG, outputs="kv", functions=[{"tokens": 32}])
        content = json.loads((folder / "manifest.json").read_text())
        assert content["passes"]["graph"]["head"] == []


@pytest.mark.parametrize("scheme", ["none", "w8a16"])
def test_a_tied_head_and_the_embedding_in_the_graph_are_stored_once(scheme: str, tmp_path: Path) -> None:
    config = {"tie_word_embeddings": True, "hidden_size": 64}
    apart, tied, cut = (
        made(
            tmp_path / name,
            config={**config, "tie_word_embeddings": name != "apart"},
            scheme=scheme,
            embedding="graph",
            head_limit=100 if name == "cut" else 320,
        )
        for name in ("apart", "tied", "cut")
    )
    stored = {
        folder: json.loads((folder / "manifest.json").read_text())["prefill"]["weights"]["stored_bytes"]
        for folder in (apart, tied, cut)
    }
    row = 64 + 2 if scheme == "w8a16" else 64 * 2
    assert stored[apart] - stored[tied] == 320 * row
    assert stored[cut] == stored[apart]
    assert run_build(tied, "abc", max_tokens=8, decode="package").token_ids == (
        run_build(tied, "abc", max_tokens=8).token_ids
    )
