"""Where prefilled blocks are kept: limits, least recently used first, damage, and processes that share a folder."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pdconvert.errors import InputError
from pdconvert.runtime.prefix_cache import DiskStore, MemoryStore, PrefixCache

ROOT = Path(__file__).parents[2]
KEYS = [f"{number:064x}" for number in range(40)]


@pytest.fixture(params=["memory", "disk"])
def make_store(request, tmp_path):
    """Makes a store; blocks of 100 bytes take 100 bytes in memory and 140 on the disk."""

    def make(blocks):
        if request.param == "memory":
            return MemoryStore(blocks * 100)
        return DiskStore(tmp_path / "cache", blocks * 140)

    return make


class TestStores:
    def test_what_was_put_is_got(self, make_store):
        store = make_store(3)
        assert store.get(KEYS[0]) is None
        store.put(KEYS[0], b"a" * 100)
        store.put(KEYS[0], b"a" * 100)
        store.put(KEYS[1], b"b" * 100)
        assert store.get(KEYS[0]) == b"a" * 100
        assert store.get(KEYS[1]) == b"b" * 100
        assert store.size_bytes() in (200, 280)

    def test_the_least_recently_used_goes_first(self, make_store):
        store = make_store(3)
        for key in KEYS[:3]:
            store.put(key, b"x" * 100)
        store.get(KEYS[0])
        store.touch(KEYS[1])
        store.put(KEYS[3], b"x" * 100)
        assert [store.get(key) is None for key in KEYS[:4]] == [False, False, True, False]
        assert store.size_bytes() <= store.limit_bytes

    def test_a_block_above_the_limit_is_not_kept_and_drops_nothing(self, make_store):
        store = make_store(3)
        store.put(KEYS[0], b"x" * 100)
        store.put(KEYS[1], b"x" * 1000)
        assert store.get(KEYS[1]) is None
        assert store.get(KEYS[0]) is not None

    def test_touching_what_is_not_there_does_nothing(self, make_store):
        store = make_store(3)
        store.touch(KEYS[0])
        assert store.get(KEYS[0]) is None

    def test_a_slower_store_fills_the_faster_ones(self, tmp_path):
        disk = DiskStore(tmp_path / "cache")
        block = np.arange(6, dtype=np.float16).reshape(2, 3)
        PrefixCache("seed", (disk,)).put(KEYS[0], block)
        memory = MemoryStore(1000)
        cache = PrefixCache("seed", (memory, disk))
        found = cache.get(KEYS[0], (2, 3))
        np.testing.assert_array_equal(found, block)
        assert not found.flags.writeable
        assert memory.get(KEYS[0]) == block.tobytes()
        assert (cache.hits, cache.misses) == (1, 0)

    def test_a_block_of_another_size_is_none(self):
        cache = PrefixCache("seed", (MemoryStore(1000),))
        cache.put(KEYS[0], np.zeros(6, np.float16))
        assert cache.get(KEYS[0], (5,)) is None

    def test_only_fp16_is_kept(self):
        with pytest.raises(TypeError, match="Cannot cast"):
            PrefixCache("seed", (MemoryStore(1000),)).put(KEYS[0], np.zeros(6, np.float32))


class TestDisk:
    @pytest.mark.parametrize(
        "damage",
        [
            lambda content: content[:-1],
            lambda content: content + b"x",
            lambda content: content[:50] + bytes([content[50] ^ 1]) + content[51:],
            lambda content: b"X" + content[1:],
            lambda content: b"",
        ],
        ids=["cut off", "longer", "changed", "other magic", "empty"],
    )
    def test_a_damaged_file_is_dropped(self, tmp_path, damage):
        store = DiskStore(tmp_path / "cache")
        store.put(KEYS[0], b"x" * 100)
        path = tmp_path / "cache" / f"{KEYS[0]}.block"
        path.write_bytes(damage(path.read_bytes()))
        assert store.get(KEYS[0]) is None
        assert not path.exists()
        store.put(KEYS[0], b"y" * 100)
        assert store.get(KEYS[0]) == b"y" * 100

    def test_a_file_under_another_key_is_dropped(self, tmp_path):
        store = DiskStore(tmp_path / "cache")
        store.put(KEYS[0], b"x" * 100)
        (tmp_path / "cache" / f"{KEYS[0]}.block").rename(tmp_path / "cache" / f"{KEYS[1]}.block")
        assert store.get(KEYS[1]) is None

    def test_other_files_in_the_folder_are_left_alone(self, tmp_path):
        mine = {"notes.txt": "a", "big.block": "x" * 5000, ".old.tmp": "b", f"{KEYS[0]}.txt": "c"}
        for name, text in mine.items():
            (tmp_path / name).write_text(text)
            os.utime(tmp_path / name, (0, 0))
        store = DiskStore(tmp_path, 300)
        for key in KEYS[:5]:
            store.put(key, b"x" * 100)
        assert {name: (tmp_path / name).read_text() for name in mine} == mine
        assert len(list(tmp_path.glob("0*.block"))) == 2

    def test_what_killed_processes_left_goes_after_a_day(self, tmp_path):
        store = DiskStore(tmp_path / "cache")
        old, new = (tmp_path / "cache" / f".{key}.123-0123abcd.tmp" for key in KEYS[:2])
        for path, age in ((old, 25 * 3600), (new, 60)):
            path.write_bytes(b"half")
            os.utime(path, (time.time() - age,) * 2)
        store.put(KEYS[2], b"x")
        assert not old.exists()
        assert new.exists()

    def test_nobody_else_may_read_it(self, tmp_path):
        DiskStore(tmp_path / "cache")
        assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700

    def test_a_folder_that_cannot_be_made(self, tmp_path):
        (tmp_path / "file").write_text("x")
        message = r"the prefix cache .*file cannot be written \(File exists\); choose another --prefix-cache"
        with pytest.raises(InputError, match=message):
            DiskStore(tmp_path / "file")

    def test_a_full_disk_leaves_nothing_half_written(self, tmp_path, monkeypatch):
        store = DiskStore(tmp_path / "cache")

        def write(path, content):
            path.touch()
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", write)
        with pytest.raises(InputError, match="cannot be written .No space left on device."):
            store.put(KEYS[0], b"x")
        assert list((tmp_path / "cache").iterdir()) == []

    def test_processes_share_a_folder(self, tmp_path):
        """Four of them put, get, touch and evict the same keys; nobody ever gets a wrong block or an error."""
        code = (
            "import random, sys\n"
            "from pathlib import Path\n"
            "from pdconvert.runtime.prefix_cache import DiskStore\n"
            "store = DiskStore(Path(sys.argv[1]), 20 * 1040)\n"
            "chance, hits = random.Random(int(sys.argv[2])), 0\n"
            "for _ in range(300):\n"
            "    number = chance.randrange(40)\n"
            "    key, data = f'{number:064x}', bytes([number]) * 1000\n"
            "    found = store.get(key)\n"
            "    assert found is None or found == data, number\n"
            "    hits += found is not None\n"
            "    store.put(key, data) if found is None else store.touch(key)\n"
            "print(hits)\n"
        )
        children = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(tmp_path / "cache"), str(number)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in range(4)
        ]
        for child in children:
            out, error = child.communicate(timeout=60)
            assert (child.returncode, error) == (0, "")
            assert int(out) > 0
        store = DiskStore(tmp_path / "cache", 20 * 1040)
        assert 0 < store.size_bytes() <= store.limit_bytes
        assert not list((tmp_path / "cache").glob(".*"))
