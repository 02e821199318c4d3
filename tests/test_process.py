"""The output folder: all or nothing, one build at a time, foreign files untouched."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdconvert import process
from pdconvert.errors import CheckFailed, InputError
from pdconvert.interrupts import exit_on_sigterm
from pdconvert.process import check_output, output_folder

MANIFEST = {"schema": "1.0", "verdict": "pass", "prefill": {}}


def write_build(folder: Path, text: str = "new", **manifest: object) -> None:
    (folder / "decode").mkdir(parents=True)
    (folder / "decode" / "config.json").write_text(text)
    (folder / "manifest.json").write_text(json.dumps({**MANIFEST, **manifest}))


def build(out: Path, text: str = "new", *, force: bool = False) -> None:
    with output_folder(out, force=force) as work:
        write_build(work, text)


def content(out: Path) -> str:
    return (out / "decode" / "config.json").read_text()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_appears_whole_and_leaves_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "a b" / "ñ 模型" / "~x[1]*"
    with output_folder(out, force=False) as work:
        write_build(work)
        assert work.parent == out.parent
        assert not out.exists()
    assert names(out.parent) == [out.name]
    assert content(out) == "new"


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        build(tmp_path / "out")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755


def test_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    build(Path("build/name"))
    assert content(tmp_path / "build" / "name") == "new"


@pytest.mark.parametrize("error", [ValueError("x"), CheckFailed("x"), KeyboardInterrupt(), SystemExit(143)])
def test_failure_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), output_folder(tmp_path / "build" / "out", force=False) as work:
        write_build(work)
        raise error
    assert names(tmp_path) == []


def test_failure_leaves_the_old_build_and_made_parents_with_content(tmp_path: Path) -> None:
    build(tmp_path / "build" / "out", "old")
    with pytest.raises(ValueError), output_folder(tmp_path / "build" / "out", force=True):
        raise ValueError
    assert content(tmp_path / "build" / "out") == "old"
    assert names(tmp_path / "build") == ["out"]


def test_force_is_needed_to_replace(tmp_path: Path) -> None:
    out = tmp_path / "out"
    build(out, "old")
    with pytest.raises(InputError, match="already holds a build; add --force"):
        build(out)
    assert content(out) == "old"
    build(out, force=True)
    assert content(out) == "new"
    assert names(tmp_path) == ["out"]


def test_replaces_without_an_atomic_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "exchange", lambda first, second: False)
    build(tmp_path / "out", "old")
    build(tmp_path / "out", force=True)
    assert content(tmp_path / "out") == "new"
    assert names(tmp_path) == ["out"]


def test_failed_replacement_brings_the_old_build_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path.resolve() / "out"
    build(out, "old")
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if ".tmp-" in self.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    monkeypatch.setattr(process, "exchange", lambda first, second: False)
    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        build(out, force=True)
    assert content(out) == "old"
    assert names(tmp_path) == ["out"]


def test_an_empty_folder_needs_no_force(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    build(tmp_path / "out")
    assert content(tmp_path / "out") == "new"


def test_foreign_files_are_never_removed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    cases = [
        ("no manifest", lambda: (out / "notes.txt").write_text("mine"), "notes.txt"),
        (
            "another manifest",
            lambda: (out / "manifest.json").write_text('{"name": "web app"}'),
            "manifest.json",
        ),
        ("no JSON", lambda: (out / "manifest.json").write_text("{"), "manifest.json"),
        ("beside a build", lambda: (write_build(out), (out / "notes.txt").write_text("mine")), "notes.txt"),
        (
            "inside a build",
            lambda: (
                write_build(out, files=["decode/config.json"]),
                (out / "decode" / "adapter.bin").write_text("mine"),
            ),
            "decode/adapter.bin",
        ),
    ]
    for case, make, foreign in cases:
        out.mkdir()
        make()
        before = sorted(path.relative_to(out) for path in out.rglob("*"))
        with pytest.raises(InputError, match="did not write") as caught:
            build(out, force=True)
        assert foreign in str(caught.value), case
        assert sorted(path.relative_to(out) for path in out.rglob("*")) == before, case
        shutil.rmtree(out)


def test_a_build_that_lists_its_files_can_be_replaced(tmp_path: Path) -> None:
    write_build(tmp_path / "out", "old", files={"decode/config.json": {"bytes": 3}})
    build(tmp_path / "out", force=True)
    assert content(tmp_path / "out") == "new"


@pytest.mark.parametrize("place", ["out", "out/below"])
def test_a_file_is_no_output_folder(tmp_path: Path, place: str) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(InputError, match="is not a folder; choose another --out"):
        build(tmp_path / place, force=True)
    assert (tmp_path / "out").read_text() == "mine"


def test_a_dangling_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "real")
    build(tmp_path / "out")
    assert content(tmp_path / "real") == "new"
    assert (tmp_path / "out").is_symlink()


def test_check_output_writes_nothing(tmp_path: Path) -> None:
    check_output(tmp_path / "none" / "out", force=False)
    assert names(tmp_path) == []


def test_two_builds_in_one_place(tmp_path: Path) -> None:
    with output_folder(tmp_path / "out", force=False) as work:
        write_build(work)
        with pytest.raises(InputError, match=rf"another build \(process {os.getpid()}\) is writing"):
            build(tmp_path / "out", force=True)
        build(tmp_path / "other", "other")
    assert content(tmp_path / "out") == "new"
    assert content(tmp_path / "other") == "other"


def test_what_dead_builds_left_is_cleaned_up(tmp_path: Path) -> None:
    write_build(tmp_path / ".out.tmp-1-abc")
    write_build(tmp_path / ".out2.tmp-1-abc")
    (tmp_path / ".out.lock").write_text("1")
    build(tmp_path / "out")
    assert names(tmp_path) == [".out2.tmp-1-abc", "out"]


def test_a_build_put_aside_by_a_dead_replacement_comes_back(tmp_path: Path) -> None:
    write_build(tmp_path / ".out.old-1-abc", "old")
    with pytest.raises(InputError, match="already holds a build"):
        build(tmp_path / "out")
    assert content(tmp_path / "out") == "old"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("error", "free_bytes"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "a.safetensors"), 10**9),
        (ValueError("Error while serializing: I/O error: No space left on device (os error 28)"), 10**9),
        (RuntimeError("a native library's own words"), 4096),
    ],
)
def test_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, free_bytes: int
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=free_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    refusal = pytest.raises(InputError, match=r"the disk of .* is full; free some space")
    with refusal, output_folder(tmp_path / "out", force=False) as work:
        write_build(work)
        raise error
    assert names(tmp_path) == []


CHILD = """
import sys, time
from pathlib import Path
from pdconvert.interrupts import exit_on_sigterm
from pdconvert.process import output_folder
with exit_on_sigterm(), output_folder(Path(sys.argv[1]), force=False) as work:
    (work / "half").write_text("half")
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("sent", "code", "left"),
    [(signal.SIGTERM, 143, []), (signal.SIGINT, -signal.SIGINT, []), (signal.SIGKILL, -signal.SIGKILL, None)],
)
def test_signals(tmp_path: Path, sent: signal.Signals, code: int, left: list[str] | None) -> None:
    out = tmp_path / "build" / "out"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    with pytest.raises(InputError, match=f"process {child.pid}"):
        build(out)
    child.send_signal(sent)
    assert child.wait(10) == code
    child.stdout.close()
    assert not out.exists()
    if left is not None:
        assert names(tmp_path) == left
    build(out)
    assert names(out.parent) == ["out"]


def test_sigterm_handler_is_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught, exit_on_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
