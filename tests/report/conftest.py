"""Two whole builds that the tests of this folder share: one passes, one overflows fp16 in a norm."""

import shutil
from pathlib import Path

import pytest
from loud import LOUD_EMBEDDING, loud_checkpoint

from pdconvert.pipeline import build
from pdconvert.recipe import load_recipe


def loud_build(folder: Path, passes: tuple) -> Path:
    """A build of real text windows and samples, since its source is a folder with a tokenizer."""
    recipe = loud_checkpoint(folder / "source", LOUD_EMBEDDING, "kv", passes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDCONVERT_CACHE", str(folder / "cache"))
        build(load_recipe(str(recipe)), folder / "out")
    return folder / "out"


@pytest.fixture(scope="session")
def passing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_build(tmp_path_factory.mktemp("passing"), ("safe_rms_norm",))


@pytest.fixture(scope="session")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_build(tmp_path_factory.mktemp("failing"), ())


@pytest.fixture
def copied(passing: Path, tmp_path: Path) -> Path:
    """The passing build, to be changed."""
    return Path(shutil.copytree(passing, tmp_path / "copy"))
