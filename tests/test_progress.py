"""Progress: bars and stages on a terminal, nothing elsewhere."""

import re
import time

import pytest

from pdconvert.progress import Progress


class Terminal:
    """A stream that says it is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


def test_progress_is_silent_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    with progress.stage("compile"):
        assert list(progress.bar(range(3), "layers")) == [0, 1, 2]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("no_color", "escapes"), [("", True), ("1", False)])
def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch, no_color: str, escapes: bool) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress = Progress(stream)  # type: ignore[arg-type]
    with progress.stage("compile"):
        for _ in progress.bar(range(2), "layers", unit="layer"):
            time.sleep(0.12)
    assert "compile ..." in stream.text
    assert re.search(r"compile: 0\.\d s", stream.text)
    assert "layers" in stream.text
    assert ("\x1b[2m" in stream.text) is escapes


def test_a_bar_shows_the_item_the_memory_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    for _ in Progress(stream).bar(["layers.0", "layers.1", "layers.2"], "compile", unit="block", label=str):  # type: ignore[arg-type]
        time.sleep(0.12)
    assert re.search(
        r"compile:  33% \|.*\| 1/3 blocks, 00:00 left, layers\.\d, peak \d\.\d\d GB", stream.text
    )


def test_stages_are_kept_whether_or_not_they_are_shown() -> None:
    progress = Progress.silent()
    for name in ("first", "second"):
        with progress.stage(name):
            time.sleep(0.01)
    first, second = progress.stages
    assert (first.name, second.name) == ("first", "second")
    assert 0.01 <= first.seconds < 5 and 10**6 < first.peak_bytes <= second.peak_bytes
    assert first.to_json().keys() == {"name", "seconds", "peak_bytes"}
