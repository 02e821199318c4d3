"""The prefix cache: equal to a cold run to the bit, no call for a block it has, on the command line too."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tiny_build import assert_same_bits, prompt_text, tiny_build, tiny_prefill, token_ids

from pdconvert.cli import main
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
