"""The hand-off file: what is in it, what is refused and by which name, and that a text goes on as if never parted."""

import hashlib
import io
import json
import os
import threading
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from tiny_build import assert_same_bits, tiny_build, token_ids

from pdconvert.errors import InputError
from pdconvert.runtime.handoff import KeysValues
from pdconvert.runtime.layouts import LAYOUTS, pack
from pdconvert.runtime.manifest import read_manifest
from pdconvert.runtime.pdkv import PdkvReader, encode, read_pdkv, write_pdkv
from pdconvert.runtime.pdkv_header import FRAME, MAGIC, PREFIX, Header, seal
from pdconvert.runtime.split_run import prefill_build

GOLDEN_SHA256 = "3e74301bac9ae6bcc7ea3f83772b284b46692ac161cc6c6d70854ad628de8477"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_build(tmp_path_factory)


@pytest.fixture(scope="module")
def manifest(folder):
    return read_manifest(folder)


def keys_values(manifest, tokens, seed=0):
    """Random K and V of a build's geometry."""
    shape = (2, manifest.layers, 1, manifest.kv_heads, tokens, manifest.head_dim)
    keys, values = np.random.default_rng(seed).standard_normal(shape).astype(np.float16)
    return KeysValues(tuple(keys), tuple(values), manifest.key_form)


def file_bytes(manifest, tokens, layout="native"):
    ids = token_ids(tokens + 1)
    return b"".join(encode(Header.of(manifest, ids, tokens, layout), keys_values(manifest, tokens)))


def read_bytes(content, manifest):
    """What a stream that is no file gives."""
    reader = PdkvReader(io.BytesIO(content), "kv.pdkv")
    reader.header.check(manifest, "kv.pdkv")
    return list(reader.blocks())


def with_header(content, **changes):
    """A file with other header fields and the checksum that belongs to them; None takes a field out."""
    magic, major, minor, length, _ = PREFIX.unpack(content[: PREFIX.size])
    values = json.loads(content[PREFIX.size : PREFIX.size + length]) | changes
    text = json.dumps({key: value for key, value in values.items() if value is not None}).encode()
    text = text.ljust(-(-(PREFIX.size + len(text)) // 64) * 64 - PREFIX.size)
    return seal(PREFIX, (magic, major, minor, len(text)), text) + text + content[PREFIX.size + length :]


def with_schema(content, major, minor):
    magic, _, _, length, _ = PREFIX.unpack(content[: PREFIX.size])
    text = content[PREFIX.size : PREFIX.size + length]
    return seal(PREFIX, (magic, major, minor, length), text) + content[PREFIX.size :]


class TestFormat:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("tokens", [1, 127, 128, 129, 256, 300])
    def test_what_is_written_is_read(self, manifest, tmp_path, tokens, layout):
        ids, kv, path = token_ids(tokens + 1), keys_values(manifest, tokens), tmp_path / "kv.pdkv"
        header = Header.of(manifest, ids, tokens, layout)
        assert write_pdkv(path, header, kv) == path.stat().st_size
        found, again = read_pdkv(path, manifest, ids)
        assert found == header
        assert_same_bits(kv, again)
        assert [entry.name for entry in tmp_path.iterdir()] == ["kv.pdkv"]

    def test_the_header_says_what_it_is_about(self, manifest):
        ids = token_ids(301)
        header = Header.of(manifest, ids, 300, "pd")
        store = json.loads((manifest.build / "manifest.json").read_text())["hash"]["store"]
        assert asdict(header) == {
            "model_hash": store,
            "rope_dims": 16,
            "rope_inv_freq_sha256": hashlib.sha256(np.array(manifest.rope.inv_freq).tobytes()).hexdigest(),
            "rope_attention_factor": 1.0,
            "key_form": "rotated",
            "layers": 2,
            "kv_heads": 2,
            "head_dim": 16,
            "dtype": "fp16",
            "layout": "pd",
            "block_tokens": 128,
            "tokens": 300,
            "token_ids_sha256": hashlib.sha256(np.array(ids[:300], "<i4").tobytes()).hexdigest(),
            "last_token_ids": (ids[300],),
            "window": None,
        }
        assert (header.prompt_tokens, header.blocks) == (301, 3)

    def test_no_tokens(self, manifest, tmp_path):
        write_pdkv(tmp_path / "kv.pdkv", Header.of(manifest, [7], 0), None)
        header, kv = read_pdkv(tmp_path / "kv.pdkv", manifest, [7])
        assert (header.tokens, header.blocks, header.last_token_ids, kv) == (0, 0, (7,), None)

    def test_blocks_come_one_at_a_time_with_their_positions(self, manifest):
        content, kv = file_bytes(manifest, 300), keys_values(manifest, 300)
        stream = io.BytesIO(content)
        reader, begin = PdkvReader(stream, "kv.pdkv"), stream.tell()
        blocks = reader.blocks()
        for index, (start, tokens) in enumerate([(0, 128), (128, 128), (256, 44)]):
            block = next(blocks)
            assert (block.start, block.tokens) == (start, tokens)
            np.testing.assert_array_equal(block.keys[1], kv.keys[1][:, :, start : start + tokens])
            if index < 2:
                assert stream.tell() == begin + (index + 1) * reader.header.frame_bytes(128)
        assert list(blocks) == []

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_arrays_can_be_mapped(self, manifest, tmp_path, layout):
        path, kv = tmp_path / "kv.pdkv", keys_values(manifest, 300)
        path.write_bytes(file_bytes(manifest, 300, layout))
        header = Header.of(manifest, token_ids(301), 300, layout)
        begin = PREFIX.size + int.from_bytes(path.read_bytes()[12:16], "little")
        for index in range(header.blocks):
            start, tokens = header.block(index)
            offset = begin + index * header.frame_bytes(header.block_tokens) + FRAME.size
            for part in (kv.keys, kv.values):
                assert offset % 64 == 0
                mapped = np.memmap(path, "<f2", "r", offset, header.array_shape(tokens))
                expected = pack([layer[:, :, start : start + tokens] for layer in part], layout)
                np.testing.assert_array_equal(mapped, expected)
                offset += header.array_bytes(tokens)

    def test_the_documented_reader_reads_it(self, manifest, tmp_path, monkeypatch):
        text = (Path(__file__).parents[2] / "docs" / "handoff.md").read_text()
        code = text.partition("```python\n")[2].partition("```")[0]
        monkeypatch.chdir(tmp_path)
        Path("kv.pdkv").write_bytes(file_bytes(manifest, 300))
        found = {}
        exec(compile(code, "docs/handoff.md", "exec"), found)
        expected = np.concatenate(keys_values(manifest, 300).keys)
        np.testing.assert_array_equal(np.concatenate(found["keys"], 2), expected)

    def test_arrays_that_do_not_fill_whole_lines_are_filled_up(self, manifest, tmp_path):
        small = replace(manifest, layers=1, kv_heads=1, head_dim=5)
        kv, path = keys_values(small, 131), tmp_path / "kv.pdkv"
        write_pdkv(path, Header.of(small, token_ids(132), 131), kv)
        assert path.stat().st_size % 64 == 0
        assert_same_bits(kv, read_pdkv(path, small)[1])

    def test_a_pipe_will_do(self, manifest):
        content = file_bytes(manifest, 300)
        reading, writing = os.pipe()

        def send():
            with open(writing, "wb") as pipe:
                pipe.write(content)

        thread = threading.Thread(target=send)
        thread.start()
        with open(reading, "rb") as pipe:
            blocks = list(PdkvReader(pipe, "a pipe").blocks())
        thread.join()
        assert [block.tokens for block in blocks] == [128, 128, 44]

    def test_the_bytes_are_those_of_this_schema(self, manifest):
        """A change of the format without a change of its version is noticed here."""
        header = replace(
            Header.of(manifest, [1, 2, 3, 4], 3), model_hash="m", layers=1, kv_heads=2, head_dim=4
        )
        header = replace(header, rope_inv_freq_sha256="f", token_ids_sha256="t")
        values = np.arange(48, dtype=np.float16).reshape(2, 1, 1, 2, 3, 4)
        content = b"".join(encode(header, KeysValues(tuple(values[0]), tuple(values[1]))))
        assert content[:16] == MAGIC + bytes([1, 0, 1, 0]) + (336).to_bytes(4, "little")
        assert hashlib.sha256(content).hexdigest() == GOLDEN_SHA256

    def test_keys_and_values_that_are_not_the_headers_are_a_mistake(self, manifest):
        header, kv = Header.of(manifest, token_ids(11), 10), keys_values(manifest, 10)
        wide = KeysValues(*(tuple(x.astype(np.float32) for x in part) for part in (kv.keys, kv.values)))
        for wrong in (
            None,
            keys_values(manifest, 9),
            replace(kv, form="raw"),
            wide,
            replace(kv, keys=kv.keys[:1]),
        ):
            with pytest.raises(ValueError, match="not those of the header|not fp16"):
                list(encode(header, wrong))


class TestRefusals:
    def test_every_changed_byte_is_noticed(self, manifest):
        content = file_bytes(manifest, 2)
        for position in range(len(content)):
            damaged = bytearray(content)
            damaged[position] ^= 1 << position % 8
            with pytest.raises(InputError, match=r"^kv\.pdkv"):
                read_bytes(bytes(damaged), manifest)

    def test_every_cut_is_noticed(self, manifest, tmp_path):
        content, path = file_bytes(manifest, 2), tmp_path / "kv.pdkv"
        for length in range(len(content)):
            with pytest.raises(InputError, match="truncated|magic"):
                read_bytes(content[:length], manifest)
            if length % 37 == 0:
                path.write_bytes(content[:length])
                with pytest.raises(InputError, match="truncated|magic"):
                    read_pdkv(path, manifest)

    def test_a_cut_file_says_how_long_it_should_be(self, manifest, tmp_path):
        content, path = file_bytes(manifest, 130), tmp_path / "kv.pdkv"
        path.write_bytes(content[:-1])
        message = rf"is truncated \(size {len(content) - 1} of {len(content)} bytes\); copy it again"
        with pytest.raises(InputError, match=message):
            read_pdkv(path, manifest)

    def test_trailing_bytes(self, manifest, tmp_path):
        content, path = file_bytes(manifest, 130) + b"\0", tmp_path / "kv.pdkv"
        path.write_bytes(content)
        with pytest.raises(InputError, match=f"trailing bytes: size is {len(content)}, its header says"):
            read_pdkv(path, manifest)
        with pytest.raises(InputError, match="trailing bytes after its last block"):
            read_bytes(content, manifest)

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"layers": 3}, "layers is 2, and .* has 3"),
            ({"kv_heads": 4}, "kv_heads is 2, and .* has 4"),
            ({"head_dim": 32}, "head_dim is 16, and .* has 32"),
            ({"key_form": "raw"}, "key_form is 'rotated', and .* has 'raw'"),
        ],
    )
    def test_another_geometry_or_form(self, manifest, changes, field):
        with pytest.raises(InputError, match=f"^kv.pdkv: {field}; prefill the prompt with the build"):
            read_bytes(file_bytes(manifest, 2), replace(manifest, **changes))

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"inv_freq": (1.0,) * 8}, "rope_inv_freq_sha256"),
            ({"inv_freq": (1.0,) * 4}, "rope_dims is 16, and .* has 8"),
            ({"attention_factor": 1.1}, "rope_attention_factor is 1.0, and .* has 1.1"),
        ],
    )
    def test_another_rope(self, manifest, changes, field):
        other = replace(manifest, rope=replace(manifest.rope, **changes))
        with pytest.raises(InputError, match=f"^kv.pdkv: {field}"):
            read_bytes(file_bytes(manifest, 2), other)

    def test_the_last_bit_of_a_frequency_counts(self, manifest):
        first, *rest = manifest.rope.inv_freq
        other = replace(manifest, rope=replace(manifest.rope, inv_freq=(np.nextafter(first, 2), *rest)))
        with pytest.raises(InputError, match="rope_inv_freq_sha256"):
            read_bytes(file_bytes(manifest, 2), other)

    def test_another_model(self, manifest):
        content = with_header(file_bytes(manifest, 2), model_hash="0" * 64)
        with pytest.raises(InputError, match=f"^kv.pdkv: model_hash is '{'0' * 64}', and .* has '[0-9a-f]*'"):
            read_bytes(content, manifest)

    def test_another_prompt(self, manifest, tmp_path):
        path, ids = tmp_path / "kv.pdkv", token_ids(11)
        write_pdkv(path, Header.of(manifest, ids, 10), keys_values(manifest, 10))
        with pytest.raises(InputError, match="last_token_ids are not the end of this prompt"):
            read_pdkv(path, manifest, [*ids[:10], ids[10] + 1])
        with pytest.raises(InputError, match="token_ids_sha256 is of another prompt"):
            read_pdkv(path, manifest, [ids[0] + 1, *ids[1:]])

    @pytest.mark.parametrize(
        ("field", "value", "expected"),
        [
            ("model_hash", 5, "a text"),
            ("token_ids_sha256", "", "a text"),
            ("layers", 0, "an integer of at least 1"),
            ("layers", True, "an integer of at least 1"),
            ("head_dim", 16.0, "an integer of at least 1"),
            ("tokens", -1, "an integer of at least 0"),
            ("block_tokens", 0, "an integer of at least 1"),
            ("block_tokens", 10**9, "at most 65536"),
            ("rope_attention_factor", "1", "a number"),
            ("key_form", "turned", "rotated or raw"),
            ("dtype", "bf16", "fp16"),
            ("layout", ["native"], "native or graph or pd"),
            ("last_token_ids", [], "a list of token ids, at least one"),
            ("last_token_ids", [1, -2], "a list of token ids, at least one"),
        ],
    )
    def test_a_value_that_a_field_cannot_have(self, manifest, field, value, expected):
        content = with_header(file_bytes(manifest, 2), **{field: value})
        with pytest.raises(InputError) as caught:
            read_bytes(content, manifest)
        assert (
            str(caught.value)
            == f"kv.pdkv: {field} is {value!r}, expected {expected}; prefill the prompt again"
        )

    def test_fields_that_are_missing_or_unknown(self, manifest):
        content = file_bytes(manifest, 2)
        with pytest.raises(InputError, match="^kv.pdkv: dtype is missing"):
            read_bytes(with_header(content, dtype=None), manifest)
        with pytest.raises(InputError, match="^kv.pdkv: colour is not known"):
            read_bytes(with_header(content, colour="red"), manifest)

    def test_tokens_outside_the_vocabulary(self, manifest):
        with pytest.raises(InputError, match="last_token_ids holds 320, and the vocabulary ends at 319"):
            read_bytes(with_header(file_bytes(manifest, 2), last_token_ids=[320]), manifest)

    def test_other_versions(self, manifest):
        content = file_bytes(manifest, 2)
        for major in (0, 2):
            message = rf"^kv.pdkv: schema is {major}\.0, and this version reads 1\.1; use the pdconvert that wrote it"
            with pytest.raises(InputError, match=message):
                read_bytes(with_schema(content, major, 0), manifest)
        newer = with_schema(with_header(content, colour="red"), 1, 7)
        assert [block.tokens for block in read_bytes(newer, manifest)] == [2]

    @pytest.mark.parametrize("text", [b"[" * 100_000, b"[1]", b"{", b"\xff"])
    def test_a_header_that_is_no_object(self, manifest, text):
        text = text.ljust(-(-(48 + len(text)) // 64) * 64 - 48)
        content = seal(PREFIX, (MAGIC, 1, 0, len(text)), text) + text
        with pytest.raises(InputError, match="^kv.pdkv: its header is (not JSON|no JSON object)"):
            read_bytes(content, manifest)

    def test_a_prompt_cache_of_mlx_lm(self, manifest, tmp_path):
        """Its form changed between versions, and it says nothing of the model: it is never taken."""
        from mlx_lm.models.cache import save_prompt_cache

        from pdconvert.executors.mlx import DecodeModel

        path = tmp_path / "prompt.safetensors"
        save_prompt_cache(str(path), DecodeModel.load(manifest.decode).new_cache(keys_values(manifest, 4)))
        with pytest.raises(
            InputError, match="magic is not that of a hand-off file; write one with `pdconvert"
        ):
            read_pdkv(path, manifest)

    def test_a_manifest_without_a_store_hash(self, manifest, tmp_path):
        content = json.loads((manifest.build / "manifest.json").read_text())
        del content["hash"]
        (tmp_path / "manifest.json").write_text(json.dumps(content))
        with pytest.raises(InputError, match="hash.store is missing; build again"):
            Header.of(replace(manifest, build=tmp_path), [1, 2], 1)


class TestWriting:
    def test_an_older_file_is_replaced_and_anything_else_is_not(self, folder, manifest, tmp_path):
        path = tmp_path / "kv.pdkv"
        for tokens in (3, 5):
            write_pdkv(
                path, Header.of(manifest, token_ids(tokens + 1), tokens), keys_values(manifest, tokens)
            )
        assert read_pdkv(path, manifest)[0].tokens == 5
        other = tmp_path / "notes.txt"
        other.write_text("mine")
        for out, message in [
            (other, "exists and is no hand-off file"),
            (tmp_path, "exists and is no hand-off file"),
        ]:
            with pytest.raises(InputError, match=message):
                prefill_build(folder, "abc", out)
        with pytest.raises(InputError, match="nowhere is not a folder; make it, or choose another --out"):
            prefill_build(folder, "abc", tmp_path / "nowhere" / "kv.pdkv")
        assert other.read_text() == "mine"

    def test_a_failure_leaves_the_older_file_and_nothing_else(self, manifest, tmp_path):
        path = tmp_path / "kv.pdkv"
        write_pdkv(path, Header.of(manifest, token_ids(4), 3), keys_values(manifest, 3))
        before = path.read_bytes()
        wrong = replace(keys_values(manifest, 200), values=keys_values(manifest, 130).values)
        with pytest.raises(ValueError, match="not fp16"):
            write_pdkv(path, Header.of(manifest, token_ids(201), 200), wrong)
        assert [entry.name for entry in tmp_path.iterdir()] == ["kv.pdkv"]
        assert path.read_bytes() == before
