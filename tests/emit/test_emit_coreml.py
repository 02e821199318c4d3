import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import one_thread, random_source, reference_of
from lowered import FULL, Form, call, inputs, lowering, package, run, write_package

from passes import FoldNormGain
from pdconvert.families import llama
from pdconvert.lowering.contract import FunctionShape
from pdconvert.quiet import quiet_coremltools
from pdconvert.reference import Reference

__all__ = ["one_thread"]

CONFIG = {**llama.TINY, "hidden_size": 32, "intermediate_size": 48}
SHAPES = (FunctionShape(16), FunctionShape(8, 24))
FORM = Form(scheme="w8a16", outputs="logits", shapes=SHAPES)
SPECIFICATION_VERSIONS = {"iOS16": 7, "iOS17": 8, "iOS18": 9}


@pytest.fixture(scope="module")
def reference() -> Reference:
    return reference_of(random_source(CONFIG))


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a package by its path in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("target", list(SPECIFICATION_VERSIONS))
def test_coremltools_opens_the_package(target: str, reference: Reference, tmp_path: Path) -> None:
    ct = quiet_coremltools()
    shapes = SHAPES if target == "iOS18" else SHAPES[:1]
    path = tmp_path / "prefill.mlpackage"
    package(path, reference, replace(FORM, target=target, shapes=shapes))
    model = ct.models.MLModel(str(path), skip_model_load=True)
    spec = model.get_spec()
    assert spec.specificationVersion == SPECIFICATION_VERSIONS[target]
    assert set(spec.mlProgram.functions) == {shape.name for shape in shapes}
    assert model.user_defined_metadata["made by"] == "a test"
    described = spec.description.functions or [spec.description]
    names = [feature.name for feature in described[0].input]
    assert names == ["hidden", "rope_cos", "rope_sin", "mask", "row"]
    assert [feature.name for feature in described[0].output] == ["k", "v", "logits"]


def test_the_first_function_is_the_default(reference: Reference, tmp_path: Path) -> None:
    assert package(tmp_path / "x.mlpackage", reference, FORM).default_function == SHAPES[0].name


def test_equal_programs_give_equal_bytes(reference: Reference, tmp_path: Path) -> None:
    """Twice from one lowering, again from a new one, and with other work in between."""
    lowered, _ = lowering(reference, FORM)
    for name in ("one", "two"):
        write_package(tmp_path / name, lowered.program(SHAPES), "iOS18", {"made by": "a test"})
    package(tmp_path / "other", reference_of(random_source(CONFIG, seed=9)), replace(FORM, shapes=SHAPES[:1]))
    package(tmp_path / "three", reference, FORM)
    one = content(tmp_path / "one")
    assert set(one) == {
        "Manifest.json",
        "Data/com.apple.CoreML/model.mlmodel",
        "Data/com.apple.CoreML/weights/weight.bin",
    }
    assert one == content(tmp_path / "two") == content(tmp_path / "three")


def test_other_weights_change_the_weight_file_alone(reference: Reference, tmp_path: Path) -> None:
    package(tmp_path / "one", reference, FORM)
    package(tmp_path / "two", reference_of(random_source(CONFIG, seed=1)), FORM)
    one, two = content(tmp_path / "one"), content(tmp_path / "two")
    assert [name for name in one if one[name] != two[name]] == ["Data/com.apple.CoreML/weights/weight.bin"]


def test_maps_are_serialized_in_the_order_of_their_keys(reference: Reference, tmp_path: Path) -> None:
    opened = package(tmp_path / "x", reference, FORM)
    written = (tmp_path / "x" / "Data" / "com.apple.CoreML" / "model.mlmodel").read_bytes()
    assert opened.spec.SerializeToString(deterministic=True) == written


def test_metadata_is_written_in_one_order(reference: Reference, tmp_path: Path) -> None:
    lowered, _ = lowering(reference, FORM)
    for name, order in (("one", ("a", "b")), ("two", ("b", "a"))):
        write_package(tmp_path / name, lowered.program(SHAPES), "iOS18", dict.fromkeys(order, "x"))
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_the_manifest_lists_both_items(reference: Reference, tmp_path: Path) -> None:
    package(tmp_path / "x", reference, FORM)
    manifest = json.loads((tmp_path / "x" / "Manifest.json").read_text())
    items = manifest["itemInfoEntries"]
    assert manifest["rootModelIdentifier"] in items and len(items) == 2
    for item in items.values():
        assert (tmp_path / "x" / "Data" / item["path"]).exists()
    assert items[manifest["rootModelIdentifier"]]["path"].endswith("model.mlmodel")


def test_an_existing_package_is_not_mixed_with_a_new_one(reference: Reference, tmp_path: Path) -> None:
    package(tmp_path / "x", reference, FORM)
    before = content(tmp_path / "x")
    with pytest.raises(FileExistsError):
        package(tmp_path / "x", reference, replace(FORM, scheme="none"))
    assert content(tmp_path / "x") == before


def test_a_path_with_spaces_and_letters_beyond_ascii(reference: Reference, tmp_path: Path) -> None:
    path = tmp_path / "mein Gerät — 模型" / "prefill.mlpackage"
    path.parent.mkdir()
    prompt = call(reference, [3, 1, 4, 1, 5])
    got = run(package(path, reference, FORM), SHAPES[0].name, inputs(reference, FORM, SHAPES[0], prompt), 5)
    assert np.isfinite(got["logits"].numpy()).all()


def test_weights_that_were_folded_are_the_ones_that_are_written(reference: Reference, tmp_path: Path) -> None:
    folded = replace(FORM, passes=(*FULL, FoldNormGain()))
    package(tmp_path / "plain", reference, FORM)
    package(tmp_path / "folded", reference, folded)
    name = "Data/com.apple.CoreML/weights/weight.bin"
    assert content(tmp_path / "plain")[name] != content(tmp_path / "folded")[name]
