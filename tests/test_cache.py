"""The cache: whole entries or none, checked, limited, shared between processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdconvert import cache as cache_module
from pdconvert.cache import Cache, cache_folder, cache_limit_bytes, open_cache
from pdconvert.errors import InputError


def put(cache: Cache, key: str, size: int = 100) -> Path:
    return cache.put(key, lambda folder: (folder / "data").write_bytes(b"x" * size) and None)


def age(path: Path, seconds: int) -> None:
    used = path.joinpath("entry.json").stat().st_mtime - seconds
    os.utime(path / "entry.json", (used, used))


def test_put_then_get(tmp_path: Path) -> None:
    with Cache(tmp_path) as cache:
        assert cache.get("abc") is None

        def write(folder: Path) -> None:
            (folder / "sub").mkdir()
            (folder / "sub" / "data").write_bytes(b"content")

        written = cache.put("abc", write)
    with Cache(tmp_path) as cache:
        found = cache.get("abc")
        assert found == written
        assert (found / "sub" / "data").read_bytes() == b"content"
        assert cache.get("abd") is None
    assert list((tmp_path / "tmp").iterdir()) == []


def test_an_entry_is_written_once(tmp_path: Path) -> None:
    def refuse(folder: Path) -> None:
        raise AssertionError("written again")

    with Cache(tmp_path) as cache:
        first = put(cache, "abc")
        assert cache.put("abc", refuse) == first
    with Cache(tmp_path) as cache:
        assert cache.put("abc", refuse) == first


def test_a_failed_writer_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    with Cache(tmp_path) as cache, pytest.raises(KeyboardInterrupt):
        cache.put("abc", fail)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert Cache(tmp_path).get("abc") is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: (entry / "data").write_bytes(b"y" * 100),
        lambda entry: (entry / "data").write_bytes(b"x" * 99),
        lambda entry: (entry / "data").unlink(),
        lambda entry: (entry / "more").write_bytes(b""),
        lambda entry: (entry / "entry.json").write_text("{"),
        lambda entry: (entry / "entry.json").write_text('{"schema": 0, "files": {}}'),
        lambda entry: (entry / "entry.json").unlink(),
    ],
    ids=["bytes", "length", "missing", "added", "not json", "old schema", "no record"],
)
def test_a_damaged_entry_is_dropped_and_made_anew(tmp_path: Path, damage) -> None:
    with Cache(tmp_path) as cache:
        damage(put(cache, "abc"))
    with Cache(tmp_path) as cache:
        assert cache.get("abc") is None
        assert not (tmp_path / "entries" / "ab" / "abc").exists()
        assert (put(cache, "abc") / "data").read_bytes() == b"x" * 100
    with Cache(tmp_path) as cache:
        damage(tmp_path / "entries" / "ab" / "abc")
        assert (put(cache, "abc") / "data").read_bytes() == b"x" * 100


def test_the_least_recently_used_entries_go_first(tmp_path: Path) -> None:
    for number, key in enumerate(["aaa", "bbb", "ccc"]):
        with Cache(tmp_path) as cache:
            age(put(cache, key), 100 - number)
    with Cache(tmp_path) as cache:
        assert cache.get("aaa")
        entry_bytes = cache.size_bytes() // 3
    with Cache(tmp_path, limit_bytes=2 * entry_bytes) as cache:
        cache.evict()
        assert cache.get("bbb") is None
        assert cache.get("aaa") and cache.get("ccc")


def test_entries_in_use_stay_until_they_are_let_go(tmp_path: Path) -> None:
    with Cache(tmp_path, limit_bytes=0) as cache:
        path = put(cache, "abc")
        Cache(tmp_path, limit_bytes=0).evict()
        assert (path / "data").exists()
    assert not path.exists()


def test_scratch_of_killed_processes_goes_after_a_day(tmp_path: Path) -> None:
    for name, age_seconds in (("old", 25 * 3600), ("new", 60)):
        (tmp_path / "tmp" / name).mkdir(parents=True)
        used = (tmp_path / "tmp" / name).stat().st_mtime - age_seconds
        os.utime(tmp_path / "tmp" / name, (used, used))
    with Cache(tmp_path) as cache:
        put(cache, "abc")
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == ["new"]


CHILD = """
import sys
from pathlib import Path
from pdconvert.cache import Cache
for turn in range(30):
    with Cache(Path(sys.argv[1]), limit_bytes=3000) as cache:
        for number in range(4):
            key, content = f"key{number}", bytes([number]) * 1000
            path = cache.put(key, lambda folder: (folder / "data").write_bytes(content) and None)
            assert (path / "data").read_bytes() == content
"""


def test_processes_share_a_cache(tmp_path: Path) -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path)],
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        for _ in range(4)
    ]
    errors = [child.communicate(timeout=60)[1] for child in children]
    assert errors == [""] * 4
    assert Cache(tmp_path).size_bytes() <= 3000


@pytest.mark.parametrize("key", ["", "ab", "../../etc", "A" * 64, "a/b", "x" * 200])
def test_keys_are_plain_names(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="not a cache key"):
        Cache(tmp_path).get(key)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written .*; set PDCONVERT_CACHE to another folder"):
        put(Cache(tmp_path / "file"), "abc")


def test_without_the_users_cache_entries_lie_in_the_scratch_folder(tmp_path: Path, own_cache: Path) -> None:
    with open_cache(False, tmp_path) as cache:
        assert put(cache, "abc").is_relative_to(tmp_path)
    with open_cache(True, tmp_path) as cache:
        assert cache.get("abc") is None
        assert cache.folder == own_cache


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(cache_module.sys, "platform", "linux")
    assert cache_folder({"PDCONVERT_CACHE": "~/c"}) == tmp_path / "c"
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/pdconvert")
    assert cache_folder({"XDG_CACHE_HOME": "relative"}) == tmp_path / ".cache" / "pdconvert"
    assert cache_folder({}) == tmp_path / ".cache" / "pdconvert"
    monkeypatch.setattr(cache_module.sys, "platform", "darwin")
    assert cache_folder({}) == tmp_path / "Library" / "Caches" / "pdconvert"


@pytest.mark.parametrize(
    ("text", "limit_bytes"),
    [("", 20 * 10**9), ("0", 0), ("1000", 1000), ("1.5 GB", 15 * 10**8), ("500mb", 5 * 10**8)],
)
def test_limit(text: str, limit_bytes: int) -> None:
    assert cache_limit_bytes({"PDCONVERT_CACHE_LIMIT": text}) == limit_bytes


@pytest.mark.parametrize("text", ["-1", "many", "1 GiB", "1e9"])
def test_limit_that_is_no_size(text: str) -> None:
    with pytest.raises(InputError, match="PDCONVERT_CACHE_LIMIT is .*; write a size such as 20GB"):
        cache_limit_bytes({"PDCONVERT_CACHE_LIMIT": text})
