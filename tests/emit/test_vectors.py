import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from pdconvert.emit.vectors import Case, GreedyCase, read_vectors, write_vectors
from pdconvert.errors import InputError

GREEDY = GreedyCase("Größe — ", (5, 6, 7), (1, 2), (0.123456, 4.0))


def case(name: str = "prefill_4") -> Case:
    random = np.random.default_rng(0)
    inputs = {
        "hidden": random.standard_normal((1, 8, 1, 4)).astype(np.float16),
        "token_ids": np.array([[3, 1, 2, 2]], np.int32),
        "mask": random.standard_normal((1, 1, 4, 4)).astype(np.float16).transpose(0, 1, 3, 2),
    }
    expected = {"k": random.standard_normal((1, 2, 3, 4)).astype(np.float32)}
    return Case(name, "prefill_4", (3, 1, 2), inputs, expected, {"k": {"fp32": 55.0, "fp16": 40.0}})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_vectors(tmp_path / "test_vectors", [case(), case("other")], [GREEDY])
    return tmp_path / "test_vectors"


def test_what_is_written_comes_back(folder: Path) -> None:
    cases, greedy = read_vectors(folder)
    assert [one.name for one in cases] == ["prefill_4", "other"]
    want, found = case(), cases[0]
    assert (found.function, found.token_ids, found.tokens) == (want.function, (3, 1, 2), 3)
    assert found.tolerances == want.tolerances
    for given, read in ((want.inputs, found.inputs), (want.expected, found.expected)):
        assert given.keys() == read.keys()
        assert all(np.array_equal(given[name], read[name]) for name in given)
        assert all(given[name].dtype == read[name].dtype for name in given)
    assert greedy == [GreedyCase("Größe — ", (5, 6, 7), (1, 2), (0.1235, 4.0))]


def test_another_program_needs_json_and_safetensors_only(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    assert index["schema"] and index["made"]
    line = index["cases"][0]
    assert {"name", "function", "token_ids", "inputs", "expected", "tolerances"} <= line.keys()
    assert set(load_file(folder / line["inputs"])) == set(case().inputs)
    tokens = json.loads((folder / "tokens.json").read_text(encoding="utf-8"))
    assert tokens["prompts"][0]["token_ids"] == [1, 2]


def test_equal_vectors_give_equal_bytes(folder: Path, tmp_path: Path) -> None:
    write_vectors(tmp_path / "again", [case(), case("other")], [GREEDY])
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert len(files) == 6


def test_a_folder_that_is_there_is_not_written_into(folder: Path) -> None:
    with pytest.raises(FileExistsError):
        write_vectors(folder, [case()], [])


def edit(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """A change of one of the JSON files."""

    def apply(folder: Path) -> None:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        change(content)
        (folder / name).write_text(json.dumps(content), encoding="utf-8")

    return apply


def cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


INPUTS = "prefill_4.inputs.safetensors"
DAMAGED = {
    "no index": (lambda folder: (folder / "index.json").unlink(), r"index\.json is missing; build again"),
    "no tokens": (lambda folder: (folder / "tokens.json").unlink(), r"tokens\.json is missing; build again"),
    "half an index": (cut("index.json", 40), r"index\.json: not JSON \(.*\); build again"),
    "no tensors": (lambda folder: (folder / INPUTS).unlink(), rf"{INPUTS} is missing; build again"),
    "cut tensors": (cut(INPUTS, 100), rf"{INPUTS}: damaged \(.*\); build again"),
    "empty tensors": (cut(INPUTS, 0), rf"{INPUTS}: damaged \(.*\); build again"),
    "a path outside": (
        edit("index.json", lambda index: index["cases"][0].update(inputs="../secret.safetensors")),
        r"index\.json: path '../secret\.safetensors' leads out of the folder; build again",
    ),
    "no cases": (
        edit("index.json", lambda index: index.pop("cases")),
        "'cases' is missing or of another form; build again",
    ),
    "no expected": (
        edit("index.json", lambda index: index["cases"][1].pop("expected")),
        "'expected' is missing or of another form; build again",
    ),
    "a case that is a number": (
        edit("index.json", lambda index: index.update(cases=[3])),
        ".* is missing or of another form; build again",
    ),
    "no margins": (
        edit("tokens.json", lambda tokens: tokens["prompts"][0].pop("margins")),
        "'margins' is missing or of another form; build again",
    ),
    "a newer schema": (
        edit("index.json", lambda index: index.update(schema="2.0")),
        r"index\.json: schema 2\.0 is newer than 1\.\d+; use a newer pdconvert",
    ),
    "no schema": (
        edit("tokens.json", lambda tokens: tokens.pop("schema")),
        r"tokens\.json: no schema version; it was not written by pdconvert",
    ),
}


@pytest.mark.parametrize("damage", list(DAMAGED))
def test_damage_is_an_error_that_names_the_file(damage: str, folder: Path) -> None:
    harm, message = DAMAGED[damage]
    harm(folder)
    with pytest.raises(InputError, match=f"{message}$") as error:
        read_vectors(folder)
    assert str(error.value).startswith(str(folder))


def test_a_newer_minor_schema_is_read(folder: Path) -> None:
    edit("index.json", lambda index: index.update(schema="1.9"))(folder)
    assert len(read_vectors(folder)[0]) == 2
