"""The decode folder: exact values, the config that mlx-lm expects, reproducible bytes, refusals."""

import json
import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from pdconvert.emit.mlx import check_store_equality, mlx_group, write_decode_folder
from pdconvert.emit.shards import ShardWriter
from pdconvert.errors import CheckFailed, InputError
from pdconvert.quant.grid import QuantizedLinear
from pdconvert.quant.grids import integer_grid


class NoTokenizer:
    def write_tokenizer(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def record(outputs: int, inputs: int, bits: int = 8, group: int = 0, seed: int = 0) -> QuantizedLinear:
    random = np.random.default_rng(seed)
    limit = 1 << (bits - 1)
    codes = random.integers(-limit, limit, (outputs, inputs), dtype=np.int8)
    columns = inputs // group if group else 1
    scales = (random.standard_normal((outputs, columns)) * 0.01).astype(np.float16)
    return QuantizedLinear(torch.from_numpy(codes), torch.from_numpy(scales), bits, group)


def rounded(
    outputs: int, inputs: int, bits: int, seed: int, group: int = 32, **form: bool
) -> QuantizedLinear:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) + 0.5
    grid = integer_grid(weight, None, bits, group, "w", **form)
    return grid.record(grid.nearest(weight, torch.arange(inputs)))


def write(folder: Path, tensors: dict, config: dict | None = None):
    return write_decode_folder(
        folder, config or {"model_type": "llama"}, iter(tensors.items()), NoTokenizer()
    )


def quantization(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization"]


@pytest.mark.parametrize(
    ("inputs", "group", "expected"),
    [
        (576, 0, 64),
        (1536, 0, 128),
        (96, 0, 32),
        (80, 0, None),
        (256, 32, 32),
        (256, 64, 64),
        (256, 256, 128),
        (256, 16, None),
    ],
)
def test_the_largest_group_that_divides(inputs, group, expected):
    assert mlx_group(inputs, group) == expected


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    bits=st.sampled_from([4, 8]),
    outputs=st.integers(1, 9),
    blocks=st.integers(1, 6),
    group=st.sampled_from([0, 32]),
    form=st.sampled_from([None, {"symmetric": False}, {"lpbq": True}]),
)
def test_mlx_reads_codes_times_scales_exactly(tmp_path_factory, seed, bits, outputs, blocks, group, form):
    folder = tmp_path_factory.mktemp("decode")
    value = record(outputs, 32 * blocks, bits, group, seed)
    if form is not None:
        value = rounded(outputs, 32 * blocks, bits, seed, group, **form)
    write(folder, {"a.weight": value})
    found = load_file(folder / "model.safetensors")
    assert found["a.weight"].dtype == np.uint32
    assert found["a.scales"].dtype == found["a.biases"].dtype == np.float16
    grid = quantization(folder)
    scales, biases = (mx.array(found[f"a.{part}"].astype(np.float32)) for part in ("scales", "biases"))
    values = mx.dequantize(
        mx.array(found["a.weight"]), scales, biases, group_size=grid["group_size"], bits=grid["bits"]
    )
    np.testing.assert_array_equal(np.array(values), value.dequantize().numpy())


def test_config_states_the_common_grid_and_every_other_one(tmp_path):
    tensors = {
        "model.layers.0.self_attn.q_proj.weight": record(8, 192),
        "model.layers.0.self_attn.k_proj.weight": record(8, 192),
        "model.layers.0.mlp.down_proj.weight": record(8, 256),
        "model.layers.0.mlp.up_proj.weight": record(8, 192, bits=4),
        "model.norm.weight": torch.ones(192),
    }
    result = write(tmp_path, tensors)
    expected = {
        "group_size": 64,
        "bits": 8,
        "mode": "affine",
        "model.layers.0.mlp.down_proj": {"group_size": 128, "bits": 8},
        "model.layers.0.mlp.up_proj": {"group_size": 64, "bits": 4},
    }
    assert quantization(tmp_path) == result.quantization == expected
    assert result.unquantized == {}
    assert (tmp_path / "tokenizer.json").exists()


def test_config_has_no_quantization_where_nothing_is_quantized(tmp_path):
    result = write(tmp_path, {"model.norm.weight": torch.ones(8)}, {"model_type": "llama", "head_dim": 4})
    assert json.loads((tmp_path / "config.json").read_text()) == {"model_type": "llama", "head_dim": 4}
    assert result.quantization == {}


def test_a_width_without_a_group_is_written_as_fp16_and_listed(tmp_path):
    value = record(4, 80)
    result = write(tmp_path, {"a.weight": value, "b.weight": record(4, 96)})
    assert result.unquantized == {"a.weight": "MLX's groups (128, 64, 32) do not divide 80 input channels"}
    assert set(quantization(tmp_path)) == {"group_size", "bits", "mode"}
    found = load_file(tmp_path / "model.safetensors")["a.weight"]
    np.testing.assert_array_equal(found, value.dequantize().half().numpy())
    assert check_store_equality(tmp_path, [("a.weight", value), ("b.weight", record(4, 96))]).tensors == 2


def test_equal_input_gives_equal_bytes(tmp_path):
    tensors = {"a.weight": record(8, 64), "norm.weight": torch.rand(64, generator=torch.manual_seed(0))}
    for name in ("one", "two"):
        write(tmp_path / name, tensors)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            torch.tensor([1.0, 7e4]),
            "a.weight: values up to 70000 do not fit fp16 (65504); rescale this tensor in the checkpoint",
        ),
        (
            QuantizedLinear(torch.ones(2, 32, dtype=torch.int8), torch.tensor([[1.0], [600.0]]).half(), 8),
            "a.weight: output channel 1 has scale 600, whose MLX bias -128 x scale does not fit fp16 (65504, 11 bits); "
            "leave this weight unquantized",
        ),
        (
            QuantizedLinear(
                torch.ones(2, 32, dtype=torch.uint8),
                torch.tensor([[1.0], [1 + 2**-10]]).half(),
                8,
                zero_points=torch.tensor([[3], [3]], dtype=torch.uint8),
            ),
            "a.weight: output channel 1 has scale 1.00098, whose MLX bias -3 x scale does not fit fp16 (65504, 11 "
            "bits); leave this weight unquantized",
        ),
    ],
)
def test_refuses_what_fp16_cannot_hold(tmp_path, value, message):
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        write(tmp_path, {"a.weight": value})
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("a", record(2, 32))], "quantized tensor a does not end in .weight"),
        ([("a.weight", torch.ones(2))] * 2, "tensor a.weight was already written"),
        (
            [
                (
                    "a.weight",
                    QuantizedLinear(torch.ones(2, 64, dtype=torch.int8), torch.ones(2, 1).half(), 8, 32),
                )
            ],
            "a.weight: scales of shape (2, 1) for codes of shape (2, 64) and group 32, expected (2, 2)",
        ),
    ],
)
def test_refuses_records_that_contradict_themselves(tmp_path, tensors, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        write_decode_folder(tmp_path, {}, tensors, NoTokenizer())


def test_refuses_a_folder_with_other_weights(tmp_path):
    write(tmp_path, {"a.weight": torch.ones(2)})
    with pytest.raises(ValueError, match="already holds model.safetensors"):
        write(tmp_path, {"a.weight": torch.ones(2)})


class TestStoreEquality:
    tensors = {
        "a.weight": record(8, 64),
        "b.weight": record(4, 64, bits=4, group=32),
        "n.weight": torch.ones(8),
    }

    def test_counts_what_it_compared(self, tmp_path):
        write(tmp_path, self.tensors)
        result = check_store_equality(tmp_path, self.tensors.items())
        assert (result.tensors, result.values) == (3, 8 * 64 + 4 * 64 + 8)

    @pytest.mark.parametrize("name", ["a.weight", "b.weight"])
    @pytest.mark.parametrize("part", ["codes", "scales"])
    def test_one_other_value_in_the_store_fails(self, tmp_path, name, part):
        write(tmp_path, self.tensors)
        old = self.tensors[name]
        parts = {"codes": old.codes.clone(), "scales": old.scales.clone()}
        parts[part][2, 0] += 1
        changed = self.tensors | {name: QuantizedLinear(**parts, bits=old.bits, group=old.group)}
        with pytest.raises(CheckFailed, match=f"{name}: .* values differ from the store, the first at row 2"):
            check_store_equality(tmp_path, changed.items())

    def test_one_other_plain_value_fails(self, tmp_path):
        write(tmp_path, self.tensors)
        changed = self.tensors | {"n.weight": torch.full((8,), 1 + 2**-10)}
        with pytest.raises(CheckFailed, match="n.weight: 8 values differ"):
            check_store_equality(tmp_path, changed.items())

    def test_a_tensor_too_few_fails(self, tmp_path):
        write(tmp_path, {name: self.tensors[name] for name in ("a.weight", "b.weight")})
        with pytest.raises(CheckFailed, match="tensor n.weight is missing"):
            check_store_equality(tmp_path, self.tensors.items())

    def test_a_tensor_too_many_fails(self, tmp_path):
        write(tmp_path, self.tensors)
        with pytest.raises(CheckFailed, match="tensor n.weight is not in the store"):
            check_store_equality(tmp_path, list(self.tensors.items())[:2])


class TestShards:
    def chunks(self, size: int, seed: int = 0) -> list[np.ndarray]:
        return [np.random.default_rng(seed).standard_normal(size).astype("<f2")]

    def test_shards_are_named_numbered_and_indexed(self, tmp_path):
        with ShardWriter(tmp_path, limit_bytes=100) as writer:
            for number in range(3):
                writer.add(f"t{number}", "F16", (40,), self.chunks(40, number))
            names = writer.close({"total_parameters": 120})
        shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
        assert names == (*shards, "model.safetensors.index.json")
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["weight_map"] == {f"t{number}": shards[number] for number in range(3)}
        assert index["metadata"] == {"total_size": 240, "total_parameters": 120}
        for number, shard in enumerate(shards):
            np.testing.assert_array_equal(
                load_file(tmp_path / shard)[f"t{number}"], self.chunks(40, number)[0]
            )

    def test_a_tensor_larger_than_the_limit_has_its_own_shard(self, tmp_path):
        with ShardWriter(tmp_path, limit_bytes=10) as writer:
            writer.add("big", "F16", (40,), self.chunks(40))
            assert writer.close()[0] == "model.safetensors"

    def test_words_are_aligned_to_their_size(self, tmp_path):
        with ShardWriter(tmp_path) as writer:
            writer.add("odd", "F16", (3,), self.chunks(3))
            writer.add("words", "U32", (2,), [np.arange(2, dtype="<u4")])
            assert len(writer.close()) == 3
        assert set(load_file(tmp_path / "model-00002-of-00002.safetensors")) == {"words"}

    def test_a_full_header_begins_a_new_shard(self, tmp_path):
        with ShardWriter(tmp_path) as writer:
            for number in range(1500):
                writer.add(f"model.layers.{number}.self_attn.q_proj.weight", "F16", (1,), self.chunks(1))
            names = writer.close()
        found = [set(load_file(tmp_path / name)) for name in names[:-1]]
        assert len(found) > 1
        assert sum(map(len, found)) == len(set().union(*found)) == 1500

    def test_chunks_must_fill_the_shape(self, tmp_path):
        with (
            pytest.raises(ValueError, match="tensor a: 6 bytes for shape .*, expected 8"),
            ShardWriter(tmp_path) as writer,
        ):
            writer.add("a", "F16", (4,), self.chunks(3))
        assert list(tmp_path.iterdir()) == []
