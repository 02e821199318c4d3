"""Every command that README and docs show works as written; so does every Python example.

Blocks fenced as `sh` and `console` are run, page by page, each page in an empty folder of its own and its blocks in
order. Of a `console` block the lines after `$ ` are run, and what is shown as output must come, line by line, as far
as it holds no digits. Commands with a placeholder in capitals (`pdconvert run BUILD`) are templates: they are not
fenced. Pages that use SmolLM2 belong to the tests on a real model.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from warm_cli import Finished, WarmCli, warm_cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

NOT_RUN = {
    "git clone": "needs the network",
    "make demo": "installs; what it runs then is on the tutorial's page, and the demo is a job of its own in CI",
    "make docs": "installs; a test builds the pages",
    "make lint": "installs; a job of its own in CI",
    "make test": "this is it",
}
"""Commands that are not run, by how they begin, and why."""


def fenced(page: Path, *kinds: str) -> list[str]:
    """The contents of fenced blocks of some kinds."""
    found = re.findall(
        r"^```(\w+)[^\n]*\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    return [content for kind, content in found if kind in kinds]


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """(command, lines that it shows) of a page, in order."""
    found: list[tuple[str, list[str]]] = []
    for block in fenced(page, "sh"):
        found += [(line, []) for line in block.splitlines() if line.strip() and not line.startswith("#")]
    for block in fenced(page, "console"):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            else:
                assert found, f"{page.name}: a console block begins without a command"
                found[-1][1].append(line)
    return found


def is_run(command: str) -> bool:
    return not command.startswith(tuple(NOT_RUN))


def is_real(page: Path) -> bool:
    return any("smollm2" in command for command, _ in commands(page) if is_run(command))


def pages(real: bool) -> list:
    chosen = [page for page in PAGES if any(is_run(command) for command, _ in commands(page))]
    return [pytest.param(page, id=page.stem) for page in chosen if is_real(page) == real]


@pytest.fixture(scope="session")
def environment(tmp_path_factory) -> dict[str, str]:
    """An environment in which `pdconvert` and `python` are this program's."""
    folder = tmp_path_factory.mktemp("bin")
    for name, arguments in (("pdconvert", "-m pdconvert "), ("python", "")):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments}"$@"\n')
        script.chmod(0o755)
    cache = tmp_path_factory.mktemp("cache")
    return {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PDCONVERT_CACHE": str(cache),
        "HF_HUB_OFFLINE": "1",
    }


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmCli]:
    with warm_cli() as server:
        yield server


def run_page(page: Path, environment: dict[str, str], folder: Path, warm: WarmCli) -> None:
    (folder / "scripts").symlink_to(ROOT / "scripts")
    for command, shown in commands(page):
        if not is_run(command):
            continue
        ended = run_command(command, environment, folder, warm)
        assert ended.code == 0, f"{page.name}: $ {command}\n{ended.stdout}{ended.stderr}"
        written = {line.strip() for line in (ended.stdout + ended.stderr).splitlines()}
        for line in shown:
            assert re.search(r"\d", line) or line.strip() in written, f"{page.name}: $ {command}: {line!r}"


def run_command(command: str, environment: dict[str, str], folder: Path, warm: WarmCli) -> Finished:
    """What a shell makes of a command; a plain call of pdconvert goes to a process that has imported everything."""
    words = shlex.split(command, comments=True)
    if words[0] == "pdconvert" and not set("|<>&;$`*") & set(command.partition(" #")[0]):
        return warm.start(words[1:], folder, environment, folder / "output").wait()
    ended = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    return Finished(ended.returncode, ended.stdout, ended.stderr)


@pytest.mark.parametrize("page", pages(real=False))
def test_commands_of_a_page(page, environment, tmp_path, warm):
    run_page(page, environment, tmp_path, warm)


@pytest.mark.real_model
@pytest.mark.parametrize("page", pages(real=True))
def test_commands_of_a_page_on_the_real_model(page, environment, tmp_path, warm):
    run_page(page, environment, tmp_path, warm)


@pytest.mark.parametrize("start", sorted(NOT_RUN))
def test_what_is_not_run_is_there(start):
    assert any(command.startswith(start) for page in PAGES for command, _ in commands(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_concrete_commands_are_fenced(page):
    """An indented command is a template; without a placeholder in capitals it would have to be run."""
    lines = re.findall(r"^    (pdconvert [^\n]*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert [line for line in lines if not re.search(r"\b[A-Z]{2,}\b", line.partition("#")[0])] == []


@pytest.fixture(scope="module")
def example_folder(tmp_path_factory) -> Path:
    """A folder with what the Python examples take for granted: a build, and a hand-off file."""
    import pdconvert
    from pdconvert.runtime.split_run import prefill_build

    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("examples")
        patch.setenv("PDCONVERT_CACHE", str(folder / "cache"))
        build = pdconvert.build("tiny", folder / "build/tiny").path
        prefill_build(build, "a prompt " * 12, folder / "kv.pdkv")
    return folder


class MilModel:
    """Stands for coremltools' MLModel, whose predictions need macOS: the package in the MIL executor."""

    def __init__(self, path: str, *, compute_units: object) -> None:
        from pdconvert.executors import open_executor

        self.session = open_executor(path, kind="mil")

    def predict(self, inputs: dict) -> dict:
        return self.session.run(inputs)


PRELUDE = """
from dataclasses import dataclass
from typing import ClassVar
from pdconvert.program import Block
"""


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.stem) for page in PAGES if fenced(page, "python")]
)
def test_python_examples(page, example_folder, monkeypatch, capsys):
    import coremltools

    monkeypatch.chdir(example_folder)
    monkeypatch.setattr(coremltools.models, "MLModel", MilModel)
    names: dict = {}
    exec(PRELUDE, names)
    for block in fenced(page, "python"):
        exec(compile(block, page.name, "exec"), names)
    if page.stem == "on_a_mac":
        import pdconvert

        expected = pdconvert.load("build/tiny", executor="mil").generate(
            "The capital of France is", max_tokens=16
        )
        assert tuple(names["text"]) == expected.token_ids
        assert capsys.readouterr().out.strip() == expected.text.strip()
