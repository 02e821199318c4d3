"""This machine's roofline: how fast it reads memory and multiplies, at best, by any of the ways that a build uses.

A figure above it is not a fast machine but a wrong measurement: work that was not done yet when the clock stopped,
or bytes that were counted and not read.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pdconvert.bench.timing import repeat
from pdconvert.errors import CheckFailed

TOLERANCE = 1.1
"""The best of a few runs is not quite the best: figures up to a tenth above it are let through."""

RUNS = 5
SMALLEST_BYTES = 1 << 20
WIDTH, COLUMNS = 2048, 512
"""Of the products: (WIDTH, WIDTH) times (WIDTH, COLUMNS), large enough for any engine."""

PRODUCTS = {"mil": 2, "coreml": 24}
"""Products in the program that measures an executor; a device needs more of them to hide the call."""


@dataclass
class Machine:
    """What was measured of this machine.

    Attributes:
        executor: kind of the executor that runs packages.
        options: as of `open_executor`.
        on_gpu: whether MLX has a GPU.
        products: FLOP/s by who multiplied.
        reads: bytes a second, by the size of what was read: caches count where it fits them.
    """

    executor: str
    options: dict[str, Any]
    on_gpu: bool
    products: dict[str, float] = field(default_factory=dict)
    reads: dict[int, float] = field(default_factory=dict)

    def measure_products(self) -> None:
        """Measure every way to multiply that a build uses here."""
        self.products = {"package": self._package_products(), "torch": _torch_products()}
        if self.on_gpu:
            self.products["mlx"] = _mlx_products()

    def read_rate(self, size_bytes: int) -> float:
        """The most bytes a second that are read of an array of this size."""
        size = max(size_bytes, SMALLEST_BYTES)
        if size not in self.reads:
            rates = [_torch_reads(size)]
            if self.on_gpu:
                rates.append(_mlx_reads(size))
            self.reads[size] = max(rates)
        return self.reads[size]

    def check(self, what: str, seconds: float, flops: float, read_bytes: int) -> None:
        """Compare a time with the roofline.

        Args:
            what: names the figure.
            flops, read_bytes: the least that was computed and read in that time.

        Raises:
            CheckFailed: the machine cannot do that; the figure must not be shown.
        """
        bounds = (
            ("compute", flops, max(self.products.values()), 1e9, "GFLOP/s"),
            ("read", read_bytes, self.read_rate(read_bytes), 1e9, "GB/s"),
        )
        for verb, amount, limit, unit, name in bounds:
            if seconds <= 0 or amount / seconds > TOLERANCE * limit:
                rate = amount / seconds / unit if seconds > 0 else float("inf")
                raise CheckFailed(
                    f"{what}: in {1000 * seconds:.3g} ms this would {verb} {rate:,.1f} {name}, and the most that "
                    f"was measured here is {limit / unit:,.1f}: the measurement is wrong, so nothing is shown"
                )

    def to_json(self) -> dict[str, Any]:
        return {
            "products_flops_per_s": self.products,
            "reads_bytes_per_s": {str(size): rate for size, rate in self.reads.items()},
        }

    def _package_products(self) -> float:
        """Products in a package of nothing else, run by the executor that runs the build's package."""
        from pdconvert.executors import open_executor

        count = PRODUCTS[self.executor]
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "products.mlpackage"
            _write_products(path, count)
            session = open_executor(path, **self.options)
            x = np.full((1, WIDTH, 1, COLUMNS), 1 / WIDTH, np.float16)
            return _rate(lambda: session.run({"x": x}), 2 * count * WIDTH * WIDTH * COLUMNS)


def _rate(action: Callable[[], object], amount: float) -> float:
    """The best rate of a few runs."""
    return amount / repeat(action, RUNS).least


def _write_products(path: Path, count: int) -> None:
    """A package with a chain of 1×1 convolutions, in fp16."""
    from pdconvert.quiet import quiet_coremltools

    ct = quiet_coremltools()
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import Function, Program, types

    from pdconvert.emit.coreml import write_package

    generator = np.random.default_rng(0)
    program = Program()
    inputs = {"x": mb.placeholder(shape=(1, WIDTH, 1, COLUMNS), dtype=types.fp16)}
    with Function(inputs, opset_version=ct.target.iOS18) as function:
        x = function.inputs["x"]
        for index in range(count):
            weight = generator.standard_normal((WIDTH, WIDTH, 1, 1), np.float32) / np.sqrt(WIDTH)
            x = mb.conv(x=x, weight=weight.astype(np.float16), name=f"product_{index}")
        function.set_outputs([mb.identity(x=x, name="y")])
    program.add_function("main", function)
    program.default_function_name = "main"
    write_package(path, program, "iOS18", {})


def _torch_products() -> float:
    import torch

    x, y = torch.ones(WIDTH, WIDTH), torch.ones(WIDTH, COLUMNS)
    return _rate(lambda: torch.mm(x, y), 2 * WIDTH * WIDTH * COLUMNS)


def _torch_reads(size_bytes: int) -> float:
    import torch

    values = torch.ones(size_bytes // 4)
    return _rate(values.sum, 4 * values.numel())


def _mlx_products() -> float:
    import mlx.core as mx

    x, y = mx.ones((WIDTH, WIDTH), mx.float16), mx.ones((WIDTH, 8 * COLUMNS), mx.float16)
    return _rate(lambda: mx.eval(x @ y), 2 * WIDTH * WIDTH * 8 * COLUMNS)


def _mlx_reads(size_bytes: int) -> float:
    import mlx.core as mx

    values = mx.ones((size_bytes // 4,), mx.float32)
    return _rate(lambda: mx.eval(values.sum()), 4 * values.size)
