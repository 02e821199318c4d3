"""Help, examples, completion and colours of the command line."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pdconvert.cli import main
from pdconvert.cli.app import SUBCOMMANDS
from pdconvert.cli.params import echo_verdict
from pdconvert.progress import takes_colour

ROOT = Path(__file__).parents[1]


def example_lines(command: click.Command) -> list[str]:
    """The command lines at the end of a command's help."""
    text = CliRunner().invoke(main, [str(command.name), "--help"]).stdout
    found = re.search(r"\n  Examples?:\n((?:    .+\n)+)", text)
    return [line.strip() for line in found[1].splitlines()] if found else []


@pytest.mark.parametrize("command", SUBCOMMANDS, ids=lambda command: command.name)
def test_every_help_has_an_example_that_parses(command: click.Command) -> None:
    lines = example_lines(command)
    assert lines, (
        f"`pdconvert {command.name} --help` shows no example: give the command an epilog=examples(...)"
    )
    for line in lines:
        words = shlex.split(line.partition(" < ")[0])
        assert words[:2] == ["pdconvert", command.name]
        command.make_context(command.name, words[2:])  # raises a usage error if it does not parse


def test_every_help_fits_80_columns() -> None:
    for command in SUBCOMMANDS:
        text = CliRunner().invoke(main, [str(command.name), "--help"]).stdout
        assert max(map(len, text.splitlines())) <= 80, command.name


COMPLETE = "from pdconvert.cli import main; main(prog_name='pdconvert')"


def complete(words: str) -> list[str]:
    """What bash would be offered for the last of the words."""
    environment = {
        **os.environ,
        "_PDCONVERT_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPLETE],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_the_shell_completes_commands_options_recipes_and_files() -> None:
    assert complete("pdconvert ver") == ["plain,verify"]
    assert {"plain,--set", "plain,--source"} <= set(complete("pdconvert build --s"))
    assert complete("pdconvert build tinyll") == ["plain,tinyllama", "plain,tinyllama-random", "file,tinyll"]
    assert complete("pdconvert verify bu") == ["file,bu"]


class Stream:
    def __init__(self, terminal: bool):
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize(
    ("terminal", "no_colour", "term", "expected"),
    [
        (True, None, "xterm-256color", True),
        (True, "", "xterm-256color", True),
        (True, "1", "xterm-256color", False),
        (True, "0", "xterm-256color", False),
        (True, None, "dumb", False),
        (False, None, "xterm-256color", False),
    ],
)
def test_colours_are_for_terminals_that_want_them(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, no_colour: str | None, term: str, expected: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_colour is not None:
        monkeypatch.setenv("NO_COLOR", no_colour)
    monkeypatch.setenv("TERM", term)
    assert takes_colour(Stream(terminal)) is expected  # type: ignore[arg-type]


def test_a_closed_stream_takes_no_colour() -> None:
    assert takes_colour(None) is False


@pytest.mark.parametrize(
    ("coloured", "expected"), [(True, "\x1b[32m\x1b[1mpass\x1b[0m: out\n"), (False, "pass: out\n")]
)
def test_a_verdict_is_coloured_alone(monkeypatch: pytest.MonkeyPatch, coloured: bool, expected: str) -> None:
    monkeypatch.setattr("pdconvert.cli.params.takes_colour", lambda stream: coloured)

    @click.command()
    def show() -> None:
        echo_verdict("pass", "pass: out")

    assert CliRunner().invoke(show, color=True).output == expected
