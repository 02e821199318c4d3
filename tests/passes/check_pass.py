"""What every pass promises, checked in one place."""

import dataclasses
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from pdconvert.program import Block, Pass, Probe, worst_db


def check_pass(rewrite: Pass, block: Block, probe: Probe) -> Block:
    """Run a pass on a block as the run loop does.

    Checks that the pass is a frozen value named after its file, that the given block is left as it was, that
    the new block computes what the given one does to within the pass's own floor, and that running the pass
    again gives the same values.

    Returns:
        The new block.
    """
    check_declaration(rewrite)
    rewrite.requires(block)
    before, outputs = snapshot(block), block.run(probe)
    new = rewrite.run(block)
    rewrite.ensures(block, new)
    got = new.run(probe)
    assert snapshot(block) == before, f"{rewrite.name} changed the block that it was given"
    assert_same(outputs, block.run(probe), f"{rewrite.name} changed what the given block computes")
    assert set(got) <= set(outputs)
    found = worst_db({name: outputs[name] for name in got}, got)
    assert found >= rewrite.floor_db, f"{rewrite.name}: {found:.1f} dB, promised {rewrite.floor_db:.1f}"
    assert_same(got, rewrite.run(block).run(probe), f"{rewrite.name} gives another result when run again")
    return new


def check_declaration(rewrite: Pass) -> None:
    """A pass is a frozen dataclass; its name is that of its file."""
    kind = type(rewrite)
    assert isinstance(rewrite, Pass)
    assert dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    source = sys.modules[kind.__module__].__file__
    assert source is not None and Path(source).stem == rewrite.name
    assert kind.__doc__ and "Before:" in kind.__doc__ and "After:" in kind.__doc__


def snapshot(block: Block) -> list[tuple]:
    """Everything that makes up a block: fields, module tree, parameters and their bytes."""
    fields = (block.name, block.spec, block.layout, block.tokens, tuple(block.records), dict(block.factors))
    parts: list[tuple] = [fields]
    for path, part in block.module.named_modules():
        plain = {name: value for name, value in vars(part).items() if not name.startswith("_")}
        parts.append((path, type(part), tuple(part._modules), repr(plain)))
        for name, value in part._parameters.items():
            parts.append((path, name, id(value), None if value is None else _bytes(value)))
    return parts


def assert_same(expected: dict[str, Tensor], got: dict[str, Tensor], message: str) -> None:
    """Bit-equal tensors under equal names."""
    assert expected.keys() == got.keys(), message
    assert all(torch.equal(expected[name], got[name]) for name in expected), message


def storages(module: nn.Module) -> dict[str, int]:
    """Where each parameter's bytes lie; equal for two modules that share their weights."""
    return {name: value.data_ptr() for name, value in module.named_parameters()}


def _bytes(value: Tensor) -> bytes:
    return value.detach().contiguous().numpy().tobytes()
