"""Signals that arrive where an exception must not be raised."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pdconvert import interrupts
from pdconvert.interrupts import exit_on_sigterm, uninterrupted

ENDS = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: SystemExit}


@pytest.fixture(autouse=True)
def handlers_are_put_back():
    before = [signal.getsignal(number) for number in interrupts.SIGNALS]
    yield
    assert [signal.getsignal(number) for number in interrupts.SIGNALS] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def foreign(body: str) -> Callable[..., float]:
    """A function of an installed package, which notes in `seen` how far it came."""
    code = compile(
        f"def function(seen):\n    {body}\n    seen.append('end')\n", "/x/site-packages/torch/a.py", "exec"
    )
    space: dict = {"os": os, "time": time, "signal": signal}
    exec(code, space)
    return space["function"]


def busy(seconds: float = 1.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@pytest.mark.parametrize("number", ENDS, ids=lambda number: number.name)
def test_at_once_in_plain_code(number: signal.Signals) -> None:
    with pytest.raises(ENDS[number]) as caught, exit_on_sigterm():
        os.kill(os.getpid(), number)
        pytest.fail("not reached")
    assert number != signal.SIGTERM or caught.value.code == 143


@pytest.mark.parametrize("number", ENDS, ids=lambda number: number.name)
def test_inside_a_package_it_waits_until_control_is_back(number: signal.Signals) -> None:
    seen: list[str] = []
    function = foreign(f"os.kill(os.getpid(), {int(number)}); time.sleep(0.1)")
    with pytest.raises(ENDS[number]), exit_on_sigterm():
        function(seen)
        busy()
        pytest.fail("lost")
    assert seen == ["end"]


def test_inside_a_destructor_it_is_not_lost() -> None:
    class Loud:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            busy(0.05)
            seen.append("end")

    seen: list[str] = []
    with pytest.raises(KeyboardInterrupt), exit_on_sigterm():
        Loud()
        busy()
        pytest.fail("lost")
    assert seen == ["end"]


@pytest.mark.parametrize("patience, times", [(0.05, 1), (60.0, 2)], ids=["after a while", "the second time"])
def test_inside_a_package_that_does_not_come_back(
    monkeypatch: pytest.MonkeyPatch, patience: float, times: int
) -> None:
    monkeypatch.setattr(interrupts, "PATIENCE_SECONDS", patience)
    seen: list[str] = []
    function = foreign(f"[(os.kill(os.getpid(), 2), time.sleep(0.2)) for _ in range({times})]; time.sleep(5)")
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), exit_on_sigterm():
        function(seen)
    assert seen == [] and time.monotonic() - start < 4


def test_many_inside_a_package_are_one_wish() -> None:
    """As from a key that is held down, or a supervisor that asks again and again."""
    seen: list[str] = []
    function = foreign("[os.kill(os.getpid(), 2) for _ in range(2000)]")
    with pytest.raises(KeyboardInterrupt), exit_on_sigterm():
        function(seen)
        busy()
        pytest.fail("lost")
    assert seen == ["end"]


def test_many_do_not_end_the_cleaning_that_the_first_began() -> None:
    seen: list[str] = []
    with pytest.raises(KeyboardInterrupt), exit_on_sigterm():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("not reached")
        finally:
            for _ in range(2000):
                os.kill(os.getpid(), signal.SIGINT)
            seen.append("cleaned")
    assert seen == ["cleaned"]


def test_while_something_is_cleaned_up_it_waits(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), exit_on_sigterm():
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            (tmp_path / "cleaned").touch()
        pytest.fail("not reached")
    assert (tmp_path / "cleaned").exists()


def test_an_ignored_interrupt_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with exit_on_sigterm():
            os.kill(os.getpid(), signal.SIGINT)
            busy(0.05)
    finally:
        signal.signal(signal.SIGINT, before)
