"""Whole builds, roughly handled: interrupted, killed, two at once, without space, without rights, from odd places."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from refusals import Place, assert_cache_is_whole, base, listing
from test_pipeline import digest
from warm_cli import ROOT, WarmCli, warm_cli

__all__ = ["base"]

EVERY_FILE = {"manifest.json", "prefill.mlpackage", "decode", "test_vectors", "report"}


@pytest.fixture(scope="module")
def server() -> Iterator[WarmCli]:
    with warm_cli() as started:
        yield started


@pytest.fixture
def place(server: WarmCli, tmp_path: Path) -> Place:
    return Place(server, tmp_path)


@pytest.fixture(scope="module")
def finished(server: WarmCli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place where a build has finished, not to be changed: `work/out` and `cache`."""
    place = Place(server, tmp_path_factory.mktemp("finished"))
    assert place.run("build", "tiny", "--out", "out").code == 0
    return place.root


def built(folder: Path) -> bool:
    """Whether a folder holds a whole build that passed, and nothing else."""
    manifest = json.loads((folder / "manifest.json").read_text())
    return (
        {path.name for path in folder.iterdir()} == EVERY_FILE
        and manifest["verdict"] == "pass"
        and all((folder / name).is_file() for name in manifest["files"])
    )


# Signals

MOMENTS = {
    "at the start": "work/build/.tiny.lock",
    "while blocks are compiled": "cache/entries/*/*/entry.json",
    "while the decode folder is written": "work/build/.tiny.tmp-*/decode",
    "while it is verified": "work/build/.tiny.tmp-*/manifest.json",
}
INTERRUPTS = {signal.SIGINT: (130, "interrupted\n"), signal.SIGTERM: (143, "")}


def wait_for(place: Place, moment: str) -> None:
    """Wait for a file that shows how far a build is."""
    deadline = time.monotonic() + 60
    while not any(place.root.glob(moment)):
        assert time.monotonic() < deadline, f"{moment} did not appear"
        time.sleep(0.002)


@pytest.mark.parametrize("number", INTERRUPTS, ids=lambda number: number.name)
@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
def test_an_interrupted_build_leaves_nothing(place: Place, moment: str, number: signal.Signals) -> None:
    code, said = INTERRUPTS[number]
    command = place.start("build", "tiny")
    wait_for(place, moment)
    command.send(number)
    ended = command.wait()
    assert (ended.code, ended.stdout, ended.stderr) == (code, "", said)
    place.assert_clean()


def test_a_build_interrupted_at_any_moment_leaves_nothing_or_all(place: Place) -> None:
    chance = random.Random(os.urandom(8))
    for turn in range(4):
        number, moment = list(INTERRUPTS)[turn % 2], chance.uniform(0.1, 1.0)
        command = place.start("build", "tiny", env={"PDCONVERT_CACHE": str(place.cache / str(turn))})
        time.sleep(moment)
        command.send(number)
        ended = command.wait()
        if (place.folder / "build").exists():
            assert built(place.folder / "build" / "tiny"), f"{number.name} after {moment} s"
            assert [path.name for path in (place.folder / "build").iterdir()] == ["tiny"]
            shutil.rmtree(place.folder / "build")
        else:
            assert ended.code == INTERRUPTS[number][0], f"{number.name} after {moment} s: {ended.stderr}"
        assert listing(place.folder) == {} == listing(place.temporary), f"{number.name} after {moment} s"
        assert_cache_is_whole(place.cache / str(turn))


def test_a_second_interrupt_does_not_disturb_the_cleaning(place: Place) -> None:
    command = place.start("build", "tiny")
    wait_for(place, MOMENTS["while it is verified"])
    command.send(signal.SIGINT)
    deadline = time.monotonic() + 60
    while any(place.root.glob("work/build/.tiny.tmp-*/manifest.json")):
        assert time.monotonic() < deadline, "it was not cleaned up"
        command.send(signal.SIGINT)
    assert command.wait().code == 130
    place.assert_clean()


@pytest.mark.parametrize("moment", list(MOMENTS.values())[1:], ids=list(MOMENTS)[1:])
def test_after_a_killed_build_the_next_one_is_whole(place: Place, moment: str) -> None:
    command = place.start("build", "tiny")
    wait_for(place, moment)
    command.send(signal.SIGKILL)
    assert command.wait().code == -signal.SIGKILL
    assert not (place.folder / "build" / "tiny").exists()
    assert place.run("build", "tiny").code == 0
    assert built(place.folder / "build" / "tiny")
    assert [path.name for path in (place.folder / "build").iterdir()] == ["tiny"]


def test_a_killed_replacement_keeps_a_whole_build(place: Place, finished: Path) -> None:
    shutil.copytree(finished / "work" / "out", place.folder / "build" / "tiny")
    command = place.start("build", "tiny", "--force", "--set", "prefill.kv.rope=raw")
    wait_for(place, MOMENTS["while it is verified"])
    command.send(signal.SIGKILL)
    assert command.wait().code == -signal.SIGKILL
    assert built(place.folder / "build" / "tiny")
    assert place.run("build", "tiny", "--force").code == 0
    assert [path.name for path in (place.folder / "build").iterdir()] == ["tiny"]


# Two at once


def test_the_second_build_into_one_place_says_who_is_first(place: Place) -> None:
    first = place.start("build", "tiny")
    wait_for(place, MOMENTS["while blocks are compiled"])
    second = place.run("build", "tiny", "--force")
    assert second.code == 2
    assert second.stderr == (
        f"error: another build (process {first.pid}) is writing {place.folder / 'build' / 'tiny'}; "
        "wait for it, or choose another --out\n"
    )
    assert first.wait().code == 0
    assert built(place.folder / "build" / "tiny")


def test_of_two_builds_that_start_together_one_wins(place: Place) -> None:
    ended = [command.wait() for command in [place.start("build", "tiny") for _ in range(2)]]
    assert sorted(one.code for one in ended) == [0, 2]
    loser = next(one for one in ended if one.code == 2)
    assert "another build (process " in loser.stderr or "already holds a build" in loser.stderr
    assert built(place.folder / "build" / "tiny")
    assert [path.name for path in (place.folder / "build").iterdir()] == ["tiny"]


def test_two_builds_side_by_side_share_the_cache(place: Place) -> None:
    ended = [command.wait() for command in [place.start("build", "tiny", "--out", name) for name in "ab"]]
    assert [one.code for one in ended] == [0, 0]
    assert digest(place.folder / "a") == digest(place.folder / "b")


# Without space


if sys.platform == "linux" and os.geteuid() == 0:  # who may mount a small disk

    @pytest.fixture
    def small_disk(tmp_path: Path) -> Iterator[Path]:
        """A disk of 300 kB, which is less than a tiny build and more than its first files."""
        disk = tmp_path / "disk"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)], check=True)
        yield disk
        subprocess.run(["umount", str(disk)], check=True)

    @pytest.mark.parametrize("option", ["--force", "--no-cache"])
    def test_a_full_disk(place: Place, small_disk: Path, option: str) -> None:
        ended = place.run("build", "tiny", "--out", str(small_disk / "build" / "out"), option)
        said = f"the disk of {small_disk / 'build'} is full; free some space, or choose another --out"
        assert (ended.code, ended.stderr) == (2, f"error: {said}\n")
        assert listing(small_disk) == {}
        place.assert_clean()

    def test_a_full_disk_of_the_cache(place: Place, small_disk: Path) -> None:
        place.cache = small_disk / "cache"
        ended = place.run("build", "tiny")
        assert ended.code == 2
        assert ended.stderr == (
            f"error: the disk of {place.cache} is full; free some space, set PDCONVERT_CACHE to another folder, "
            "or use --no-cache\n"
        )
        place.assert_clean()


@pytest.mark.parametrize("limit_bytes", [2000, 20_000, 100_000])
@pytest.mark.parametrize("filled", [False, True], ids=["empty cache", "filled cache"])
def test_files_that_may_not_grow(place: Place, finished: Path, limit_bytes: int, filled: bool) -> None:
    """As on a disk of a format that ends at 4 GB a file; native libraries meet the limit too."""
    if filled:
        shutil.copytree(finished / "cache", place.cache)
    ended = place.run("build", "tiny", file_limit_bytes=limit_bytes)
    assert ended.code == 2, ended.stderr
    where = place.cache if limit_bytes == 20_000 and not filled else place.folder / "build"
    assert ended.stderr.startswith(f"error: {where} "), ended.stderr
    assert "takes no file of this size; " in ended.stderr or "cannot be written; " in ended.stderr
    place.assert_clean()


# Without rights


def test_a_source_that_may_only_be_read(place: Place, base: Path) -> None:
    source = shutil.copytree(base, place.root / "model")
    for path in source.iterdir():
        path.chmod(0o444)
    source.chmod(0o555)
    before = listing(source)
    gates = ("--set", "gates.kld=9", "--set", "gates.top1=0", "--set", "gates.reason=random weights")
    ended = place.run(
        "build", "tiny", "--source", str(source), "--out", "out", *gates, "--set", "probe.eval_windows=1",
        powerless=True,
    )  # fmt: skip
    assert ended.code == 0, ended.stderr
    assert built(place.folder / "out")
    assert listing(source) == before
    assert all(os.stat(path).st_mode & 0o200 for path in (place.folder / "out").rglob("*"))


def test_places_that_may_not_be_written(place: Place) -> None:
    locked = place.root / "locked"
    locked.mkdir(mode=0o555)
    for args, env, said in (
        (["--out", str(locked / "out")], {}, f"Permission denied: {locked}/.out.lock"),
        (["--out", str(locked / "deep" / "out")], {}, f"Permission denied: {locked}/deep"),
        (
            ["--out", "out"],
            {"PDCONVERT_CACHE": str(locked)},
            f"the cache folder {locked} cannot be written (Permission denied); "
            "set PDCONVERT_CACHE to another folder, or use --no-cache",
        ),
    ):
        ended = place.run("build", "tiny", *args, env=env, powerless=True)
        assert (ended.code, ended.stderr) == (2, f"error: {said}\n")
        place.assert_clean()


def test_a_read_only_build_is_not_replaced(place: Place, finished: Path) -> None:
    shutil.copytree(finished / "work" / "out", place.folder / "out")
    before = listing(place.folder)
    (place.folder / "out" / "report").chmod(0o555)
    ended = place.run("build", "tiny", "--out", "out", "--force", powerless=True)
    assert (ended.code, ended.stderr) == (
        2,
        "error: out/report is read-only, so the build in out cannot be replaced; make it writable, "
        "or choose another --out\n",
    )
    assert listing(place.folder) == before


# Caches


def test_a_filled_cache_that_may_only_be_read_is_read(place: Place, finished: Path) -> None:
    shutil.copytree(finished / "cache", place.cache)
    subprocess.run(["chmod", "-R", "a-w", str(place.cache)], check=True)
    before = listing(place.cache)
    ended = place.run("build", "tiny", "--out", "b", powerless=True)
    subprocess.run(["chmod", "-R", "u+w", str(place.cache)], check=True)
    assert ended.code == 0, ended.stderr
    assert digest(finished / "work" / "out") == digest(place.folder / "b")
    assert listing(place.cache) == before


def test_damaged_entries_are_made_anew(place: Place, finished: Path) -> None:
    shutil.copytree(finished / "cache", place.cache)
    entries = sorted(place.cache.glob("entries/*/*"))
    assert len(entries) == 4
    tensors = entries[0] / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"x")
    (entries[1] / "entry.json").write_text("[" * 100_000)
    (entries[2] / "steps.json").unlink()
    (entries[3] / "entry.json").write_text('{"schema": 1}')
    assert place.run("build", "tiny", "--out", "b").code == 0
    assert digest(finished / "work" / "out") == digest(place.folder / "b")
    assert_cache_is_whole(place.cache)


def test_a_cache_that_is_a_file(place: Place) -> None:
    place.cache.write_text("mine")
    ended = place.run("build", "tiny")
    assert (ended.code, ended.stderr) == (
        2,
        f"error: the cache folder {place.cache} cannot be written (Not a directory); "
        "set PDCONVERT_CACHE to another folder, or use --no-cache\n",
    )
    assert place.cache.read_text() == "mine"
    assert listing(place.folder) == {}
    assert place.run("build", "tiny", "--no-cache").code == 0
    assert place.cache.read_text() == "mine"


# Odd places


def test_names_with_spaces_and_other_letters(place: Place, base: Path) -> None:
    odd = place.folder / "a b" / "ñ 模型" / "~x"
    odd.mkdir(parents=True)
    place.folder = odd
    place.cache = odd / "ca che ñ"
    shutil.copytree(base, odd / "mo del ~")
    options = ("--set", "prefill.kv.rope=raw", "--out", "o ut/~ 模")
    assert place.run("build", "tiny", *options).code == 0
    assert built(odd / "o ut" / "~ 模")
    for command in (["run", "o ut/~ 模", "--prompt", "ñ", "--max-tokens", "2"], ["verify", "o ut/~ 模"]):
        ended = place.run(*command)
        assert (ended.code, ended.stderr) == (0, ""), command
    shutil.rmtree(odd / "o ut")
    said = place.run(
        "build", "tiny", "--source", "mo del ~", "--out", "~/out", "--set", "probe.eval_windows=0"
    )
    assert "probe.eval_windows: 0" in said.stderr
    assert sorted(path.name for path in odd.iterdir()) == ["ca che ñ", "mo del ~"]


def test_a_home_folder_is_meant_by_a_leading_tilde_only(place: Place) -> None:
    assert place.run("build", "tiny", "--out", "~/b").code == 0
    assert built(place.root / "home" / "b")
    assert listing(place.folder) == {}


def test_a_build_works_from_everywhere_and_after_a_move(place: Place, finished: Path) -> None:
    moved = shutil.copytree(finished / "work" / "out", place.root / "moved")
    assert place.run("run", str(moved), "--prompt", "a", "--max-tokens", "1").code == 0
    assert place.run("verify", "../work/../moved/").code == 0
    assert place.run("inspect", "../moved", "--json").code == 0
    assert listing(place.folder) == {}


def test_folders_of_the_user_are_left_alone(place: Place) -> None:
    for name in ("tmp", "build", "out", ".cache"):
        (place.folder / name).mkdir()
        (place.folder / name / "keep.txt").write_text(name)
    assert place.run("build", "tiny").code == 0
    assert built(place.folder / "build" / "tiny")
    for name in ("tmp", "build", "out", ".cache"):
        assert (place.folder / name / "keep.txt").read_text() == name
    assert sorted(path.name for path in (place.folder / "build").iterdir()) == ["keep.txt", "tiny"]


@pytest.mark.parametrize(
    "env", [{"HOME": None, "TMPDIR": "/proc"}, {"HOME": "/nonexistent", "TMPDIR": "/nonexistent"}], ids=str
)
def test_without_a_home_or_a_temporary_folder(place: Place, env: dict[str, str | None]) -> None:
    ended = place.run("build", "tiny", env=env)
    assert ended.code == 0, ended.stderr
    assert built(place.folder / "build" / "tiny")
    assert [path.name for path in place.folder.iterdir()] == ["build"]


# Streams


@pytest.mark.parametrize(("without", "code"), [("reader", 141), ("stdout", 0), ("stderr", 0)])
def test_streams_that_are_closed(place: Place, without: str, code: int) -> None:
    ended = place.run("build", "tiny", without=without)
    assert (ended.code, ended.stderr) == (code, "")
    assert built(place.folder / "build" / "tiny")
    assert listing(place.temporary) == {}


# Equal bytes


def test_equal_bytes_whatever_the_surroundings(place: Place, finished: Path) -> None:
    """Another process, hash seed, number of threads, locale, time zone, folder, TMPDIR and cache."""
    far = place.root / "far ñ" / "away"
    far.mkdir(parents=True)
    env = {
        "PYTHONPATH": str(ROOT),
        "PYTHONHASHSEED": "7",
        "OMP_NUM_THREADS": "2",
        "LC_ALL": "C",
        "TZ": "Asia/Tokyo",
        "TMPDIR": str(far),
        "PDCONVERT_CACHE": str(far / "cache"),
    }
    command = [sys.executable, "-m", "pdconvert", "build", "tiny", "--out", "other"]
    done = subprocess.run(command, cwd=far, env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert digest(far / "other") == digest(finished / "work" / "out")
