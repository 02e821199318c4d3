"""The prefix cache: equal to a cold run to the bit, no call for a block it has, and stores that keep to their limit."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tiny_build import prompt_text, tiny_build, tiny_prefill, token_ids

from pdconvert.cli import main
from pdconvert.errors import InputError
from pdconvert.executors.mlx import DecodeModel
from pdconvert.runtime.chunks import plan_chunks
from pdconvert.runtime.prefix_cache import DiskStore, MemoryStore, PrefixCache, cache_seed

ROOT = Path(__file__).parents[2]
FORMS = ["rotated", "raw"]
MEGABYTE = 10**6


@pytest.fixture(scope="module", params=FORMS)
def build(request, tmp_path_factory):
    return tiny_build(tmp_path_factory, request.param)


@pytest.fixture(scope="module")
def cold(build):
    """A package without a cache."""
    return tiny_prefill(build)[1]


@pytest.fixture
def warm(build):
    """A package with an empty cache in memory."""
    manifest, prefill = tiny_prefill(build)
    seed = cache_seed(manifest, "mil", "fp32", "cpu_only")
    prefill.cache = PrefixCache(seed, (MemoryStore(MEGABYTE),))
    return prefill


def assert_same_bits(a, b):
    assert (a.tokens, a.form, a.start) == (b.tokens, b.form, b.start)
    for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True):
        np.testing.assert_array_equal(x.view(np.uint16), y.view(np.uint16))


def calls_of(prefill, ids):
    before = prefill.calls
    return prefill.run(ids), prefill.calls - before


class TestPrefill:
    @pytest.mark.parametrize("length", [2, 9, 32, 33, 34, 65, 100, 257, 288])
    def test_a_prompt_seen_before_needs_no_call(self, cold, warm, length):
        ids = token_ids(length)
        expected, calls = calls_of(cold, ids)
        for needed in (calls, 0, 0):
            found, made = calls_of(warm, ids)
            assert made == needed
            assert_same_bits(found, expected)
        assert warm.cached_tokens == 2 * (length - 1)

    @pytest.mark.parametrize("position", [0, 31, 32, 100, 127, 128, 198])
    def test_a_changed_token_reuses_exactly_the_blocks_before_it(self, cold, warm, position):
        ids = token_ids(200)
        _, calls = calls_of(warm, ids)
        assert calls == 7
        changed = list(ids)
        changed[position] = (changed[position] + 1) % 256
        cached = warm.cached_tokens
        found, made = calls_of(warm, changed)
        assert made == 7 - position // 32
        assert warm.cached_tokens - cached == position // 32 * 32
        assert_same_bits(found, cold.run(changed))
        assert calls_of(warm, ids)[1] == calls_of(warm, changed)[1] == 0

    def test_the_last_token_decides_nothing(self, warm):
        ids = token_ids(65)
        calls_of(warm, ids)
        assert calls_of(warm, [*ids[:-1], 3])[1] == 0

    def test_prompts_that_begin_alike_share_their_full_blocks(self, cold, warm):
        ids = token_ids(280)
        calls_of(warm, ids[:100])
        found, made = calls_of(warm, ids)
        assert made == 9 - 3
        assert_same_bits(found, cold.run(ids))

    def test_tokens_that_go_through_another_function_are_another_block(self, cold, warm):
        """41 tokens are 32 and, for the last 8, the function of 8; in a longer prompt these 8 are part of 32."""
        ids = token_ids(65)
        plan = [
            [
                (chunk.function.name, chunk.length)
                for chunk in plan_chunks(warm.manifest.functions.values(), 0, n)
            ]
            for n in (40, 64)
        ]
        assert plan == [
            [("prefill_32", 32), ("extend_8_ctx64", 8)],
            [("prefill_32", 32), ("extend_32_ctx64", 32)],
        ]
        calls_of(warm, ids[:41])
        found, made = calls_of(warm, ids)
        assert made == 1
        assert_same_bits(found, cold.run(ids))

    def test_a_padded_block_serves_only_the_prompt_that_ends_there(self, cold, warm):
        ids = token_ids(50)
        calls_of(warm, ids[:45])
        for length, needed in ((44, 1), (46, 1), (50, 1), (45, 0)):
            found, made = calls_of(warm, ids[:length])
            assert made == needed
            assert_same_bits(found, cold.run(ids[:length]))

    @settings(
        max_examples=12,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(data=st.data())
    def test_any_row_of_prompts_equals_cold_runs(self, cold, build, data):
        manifest, prefill = tiny_prefill(build)
        prefill.cache = PrefixCache("seed", (MemoryStore(data.draw(st.sampled_from([20_000, MEGABYTE]))),))
        text = token_ids(200, seed=data.draw(st.integers(0, 1)))
        for _ in range(4):
            ids = text[: data.draw(st.integers(2, 200))]
            if data.draw(st.booleans()):
                ids[data.draw(st.integers(0, len(ids) - 1))] = 7
            assert_same_bits(prefill.run(ids), cold.run(ids))

    def test_a_lost_block_in_the_middle_costs_one_call(self, cold, warm):
        ids = token_ids(129)
        store = warm.cache.stores[0]
        calls_of(warm, ids)
        keys = list(store._blocks)
        store._size -= len(store._blocks.pop(keys[1]))
        found, made = calls_of(warm, ids)
        assert made == 1
        assert_same_bits(found, cold.run(ids))

    def test_decoding_leaves_the_kept_blocks_alone(self, cold, warm, build):
        ids, model = token_ids(65), DecodeModel.load(build / "decode")
        for _ in range(2):
            kv = warm.run(ids)
            model.logits(token_ids(5, seed=1), model.new_cache(kv))
            for array in (*kv.keys, *kv.values):
                array[:] = 0
        assert_same_bits(warm.run(ids), cold.run(ids))
        assert warm.cache.misses == 2

    def test_more_tokens_on_a_given_past_do_not_use_it(self, cold, warm):
        ids = token_ids(64)
        first = warm.extend(None, ids[:32])
        before = (warm.cache.hits, warm.cache.misses)
        assert_same_bits(warm.extend(first, ids[32:]), cold.extend(first, ids[32:]))
        assert (warm.cache.hits, warm.cache.misses) == before

    def test_fp16_arithmetic(self, build):
        (_, plain), (_, prefill) = tiny_prefill(build, "fp16"), tiny_prefill(build, "fp16")
        prefill.cache = PrefixCache("seed", (MemoryStore(MEGABYTE),))
        ids = token_ids(70)
        for _ in range(2):
            assert_same_bits(prefill.run(ids), plain.run(ids))

    def test_shared_blocks_outlive_the_ends_of_prompts(self, build):
        """Of a long prompt, what goes first is its end, which nobody else has."""
        _, prefill = tiny_prefill(build)
        store = MemoryStore(6 * 32 * 256)
        prefill.cache = PrefixCache("seed", (store,))
        ids = token_ids(161)
        prefill.run(ids)
        prefill.run(token_ids(65, seed=1))
        assert calls_of(prefill, ids[:129])[1] == 0


class TestSeed:
    def test_it_is_all_that_decides_the_bits(self, tmp_path_factory):
        manifest, _ = tiny_prefill(tiny_build(tmp_path_factory))
        raw, _ = tiny_prefill(tiny_build(tmp_path_factory, "raw"))
        w8, _ = tiny_prefill(tiny_build(tmp_path_factory, "rotated", "w8a16"))
        rope = replace(manifest.rope, attention_factor=1.5)
        seeds = [
            cache_seed(manifest, "mil", "fp32", "all"),
            cache_seed(manifest, "mil", "fp16", "all"),
            cache_seed(raw, "mil", "fp32", "all"),
            cache_seed(w8, "mil", "fp32", "all"),
            cache_seed(replace(manifest, rope=rope), "mil", "fp32", "all"),
            cache_seed(replace(manifest, embedding_scale=2.0), "mil", "fp32", "all"),
            cache_seed(manifest, "coreml", "fp32", "all"),
            cache_seed(manifest, "coreml", "fp32", "cpu_only"),
        ]
        assert len(set(seeds)) == len(seeds)
        assert seeds[0] == cache_seed(manifest, "mil", "fp32", "cpu_only")
        assert seeds[6] == cache_seed(manifest, "coreml", "fp16", "all")

    def test_a_changed_program_is_another_seed(self, tmp_path_factory, tmp_path):
        manifest, _ = tiny_prefill(tiny_build(tmp_path_factory))
        (package, *rest), *_ = manifest.packages
        changed = tmp_path / "prefill.mlpackage"
        changed.mkdir()
        (source,) = package.rglob("*.mlmodel")
        (changed / "model.mlmodel").write_bytes(source.read_bytes() + b"\0")
        other = replace(manifest, packages=((changed, *rest),))
        assert cache_seed(other, "mil", "fp32", "all") != cache_seed(manifest, "mil", "fp32", "all")

    def test_keys_are_a_chain(self):
        cache = PrefixCache("seed", ())
        first, second = cache.keys([("f", [1, 2]), ("g", [3])])
        assert cache.keys([("f", [1, 2]), ("g", [4])])[0] == first
        others = [
            PrefixCache("other", ()).keys([("f", [1, 2]), ("g", [3])]),
            cache.keys([("f", [1, 1]), ("g", [3])]),
            cache.keys([("h", [1, 2]), ("g", [3])]),
            cache.keys([("f", [1]), ("g", [2, 3])]),
        ]
        assert len({first, second, *(key for keys in others for key in keys)}) == 10


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


class TestCommandLine:
    def run(self, folder, prompt, *options):
        arguments = [
            "run",
            str(folder),
            "--prompt",
            prompt,
            "--max-tokens",
            "6",
            "--json",
            *map(str, options),
        ]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    def test_a_second_run_takes_what_the_first_one_kept(self, build, tmp_path):
        prompt, options = prompt_text(140), ("--prefix-cache", tmp_path / "cache")
        plain = self.run(build, prompt)
        assert "cached_tokens" not in plain
        first, second = self.run(build, prompt, *options), self.run(build, prompt, *options)
        assert (first["cached_tokens"], second["cached_tokens"]) == (0, 139)
        assert plain["token_ids"] == first["token_ids"] == second["token_ids"]
        package = self.run(build, prompt, *options, "--decode", "package")
        assert package["cached_tokens"] == 139
        assert self.run(build, prompt, *options, "--mode", "fp16")["cached_tokens"] == 0
        for path in (tmp_path / "cache").glob("*.block"):
            path.write_bytes(path.read_bytes()[:-2] + b"xy")
        damaged = self.run(build, prompt, *options)
        assert (damaged["cached_tokens"], damaged["token_ids"]) == (0, plain["token_ids"])

    def test_the_limit(self, build, tmp_path):
        self.run(build, prompt_text(140), "--prefix-cache", tmp_path / "cache", "--prefix-cache-mb", 1)
        assert DiskStore(tmp_path / "cache").size_bytes() <= MEGABYTE

    def test_prefill_uses_it_too(self, build, tmp_path):
        options = ["--prompt", prompt_text(70), "--prefix-cache", str(tmp_path / "cache"), "--json"]
        contents = []
        for name in ("a.pdkv", "b.pdkv"):
            arguments = ["prefill", str(build), "--out", str(tmp_path / name), *options]
            contents.append(json.loads(CliRunner().invoke(main, arguments).stdout)["cached_tokens"])
        assert contents == [0, 69]
        assert (tmp_path / "a.pdkv").read_bytes() == (tmp_path / "b.pdkv").read_bytes()

    def test_a_folder_that_cannot_be_made(self, build, tmp_path):
        (tmp_path / "file").write_text("x")
        arguments = ["run", str(build), "--prompt", "a", "--prefix-cache", str(tmp_path / "file")]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 2
        assert result.stderr.startswith("error: the prefix cache ")
