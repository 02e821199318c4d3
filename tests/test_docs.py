"""The documentation: generated pages are current, and the site builds without a broken link."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def reference(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("reference")


def test_the_reference_pages_are_current(reference):
    for target, render in (
        (reference.RECIPES, reference.recipes_page),
        (reference.PASSES_PAGE, reference.passes_page),
    ):
        assert target.read_text(encoding="utf-8") == render(), "run python scripts/reference.py"


def test_every_field_and_option_has_a_meaning(reference):
    for page in (reference.recipes_page(), reference.passes_page()):
        rows = [line for line in page.splitlines() if line.startswith("| `")]
        assert rows and all(line.split(" | ")[-1].strip(" |") for line in rows)


def test_the_site_builds(tmp_path):
    """With --strict: a broken link, an unlisted page or an outdated reference fails it."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (tmp_path / "tutorial.html").is_file()
