from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from pdconvert.quant.grid import LutLinear, QuantizedLinear, quantize_symmetric
from pdconvert.quant.grids import table_grid
from pdconvert.quant.store import Stored, load_block, save_block


def block(seed: int = 0) -> dict[str, Stored]:
    """A block with plain tensors and records of every kind, in no order."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    weight = matrix(8, 32)
    tables = table_grid(weight, torch.ones(32), 4, 4, "o")
    return {
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
        if isinstance(value, QuantizedLinear):
            assert isinstance(found, QuantizedLinear)
            assert (found.bits, found.group) == (value.bits, value.group)
            assert torch.equal(found.codes, value.codes) and torch.equal(found.scales, value.scales)
            assert (found.codes.dtype, found.scales.dtype) == (torch.int8, torch.float16)
        elif isinstance(value, LutLinear):
            assert isinstance(found, LutLinear) and (found.bits, found.rows) == (value.bits, value.rows)
            assert torch.equal(found.codes, value.codes) and torch.equal(found.tables, value.tables)
            assert (found.codes.dtype, found.tables.dtype) == (torch.uint8, torch.float16)
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
        assert {"self_attn.q_proj.weight.codes", "self_attn.q_proj.weight.scales", "norm.weight"} <= set(
            file.keys()
        )
        assert file.get_tensor("self_attn.q_proj.weight.codes").dtype == torch.int8


def test_an_empty_block_is_a_block(tmp_path: Path) -> None:
    save_block(tmp_path / "empty", {})
    assert load_block(tmp_path / "empty") == {}


def test_a_missing_block_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_block(tmp_path / "none")
