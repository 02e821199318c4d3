from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from pdconvert.quant.grid import LutLinear, QuantizedLinear, quantize_symmetric
from pdconvert.quant.grids import integer_grid, table_grid
from pdconvert.quant.store import Stored, equal, load_block, save_block


def block(seed: int = 0) -> dict[str, Stored]:
    """A block with plain tensors and records of every kind, in no order."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    weight = matrix(8, 32)
    tables = table_grid(weight, torch.ones(32), 4, 4, "o")

    def rounded(name: str, weight: Tensor, **form: bool) -> QuantizedLinear:
        grid = integer_grid(weight, None, 4, 32, name, **form)
        return grid.record(grid.nearest(weight, torch.arange(weight.shape[1])))

    return {
        "self_attn.k_proj.weight": rounded("k", matrix(6, 64), symmetric=False),
        "self_attn.v_proj.weight": rounded("v", matrix(6, 64), lpbq=True),
        "self_attn.o_proj.weight": tables.record(tables.nearest(weight, torch.arange(32))),
        "self_attn.q_proj.weight": quantize_symmetric(matrix(6, 32), 8, "q"),
        "norm.weight": matrix(32).half(),
        "mlp.up_proj.weight": quantize_symmetric(matrix(4, 64), 8, "up", 32),
        "mlp.down_proj.weight": quantize_symmetric(matrix(4, 64), 4, "down"),
        "bias": matrix(5, 7).half().T,
    }


def assert_equal(one: dict[str, Stored], other: dict[str, Stored]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        found = other[name]
        if not isinstance(value, Tensor):
            assert type(found) is type(value) and found.bits == value.bits
            size = "rows" if isinstance(value, LutLinear) else "group"
            assert getattr(found, size) == getattr(value, size)
            mine, others = value.parts(), found.parts()
            assert mine.keys() == others.keys()
            for part, tensor in mine.items():
                assert others[part].dtype == tensor.dtype and torch.equal(others[part], tensor)
        else:
            assert isinstance(found, Tensor) and found.dtype == value.dtype and torch.equal(found, value)


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "block.safetensors"
    save_block(path, block())
    assert_equal(block(), load_block(path))


def test_equal_tensors_give_equal_bytes_in_any_order(tmp_path: Path) -> None:
    save_block(tmp_path / "a", block())
    save_block(tmp_path / "b", dict(reversed(block().items())))
    save_block(tmp_path / "c", load_block(tmp_path / "a"))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == (tmp_path / "c").read_bytes()


def test_other_values_give_other_bytes(tmp_path: Path) -> None:
    changed = block()
    record = changed["self_attn.q_proj.weight"]
    assert isinstance(record, QuantizedLinear)
    changed["self_attn.q_proj.weight"] = QuantizedLinear(record.codes, record.scales, 4)
    save_block(tmp_path / "a", block())
    save_block(tmp_path / "b", changed)
    assert (tmp_path / "a").read_bytes() != (tmp_path / "b").read_bytes()


def test_anybody_can_read_codes_and_scales(tmp_path: Path) -> None:
    path = tmp_path / "block.safetensors"
    save_block(path, block())
    with safe_open(path, framework="pt") as file:
        assert {
            "self_attn.q_proj.weight.codes",
            "self_attn.q_proj.weight.scales",
            "self_attn.k_proj.weight.zero_points",
            "self_attn.v_proj.weight.block_scales",
            "norm.weight",
        } <= set(file.keys())
        assert file.get_tensor("self_attn.q_proj.weight.codes").dtype == torch.int8


@pytest.mark.parametrize("part", ["codes", "scales", "zero_points"])
def test_records_that_differ_in_one_part_are_not_equal(part: str) -> None:
    record = block()["self_attn.k_proj.weight"]
    assert isinstance(record, QuantizedLinear) and equal(record, block()["self_attn.k_proj.weight"])
    assert not equal(record, record.with_parts({part: getattr(record, part) + 1}))
    assert not equal(record, replace(record, zero_points=None))


def test_an_empty_block_is_a_block(tmp_path: Path) -> None:
    save_block(tmp_path / "empty", {})
    assert load_block(tmp_path / "empty") == {}


def test_a_missing_block_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_block(tmp_path / "none")
