"""CPU-seconds to make the 4-bit lookup tables of every linear of SmolLM2-135M.

    python benchmarks/lookup_tables.py [--rows 4]

The time is the process's CPU time in `table_grid`, all threads counted; reading the weights is not in it. Columns are
weighted by seeded numbers, as activations would weight them.
"""

import argparse
import time

import torch

from pdconvert.quant.grids import table_grid
from pdconvert.recipe import load_recipe
from pdconvert.sources import open_source


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Time the lookup tables of SmolLM2-135M.")
    parser.add_argument("--rows", type=int, default=4, help="output channels that share a table")
    rows = parser.parse_args().rows
    source = open_source(load_recipe("smollm2-135m").source)
    names = [name for name, info in source.tensors().items() if ".layers." in name and len(info.shape) == 2]
    draw, seconds, weights = torch.Generator().manual_seed(0), 0.0, 0
    for name in names:
        weight = source.read(name)
        importance = torch.rand(weight.shape[1], generator=draw)
        started = time.process_time()
        table_grid(weight, importance, 4, rows, name)
        seconds += time.process_time() - started
        weights += weight.numel()
    print(f"{len(names)} linears, {weights:,} weights, a table per {rows} rows: {seconds:.1f} CPU-seconds")


if __name__ == "__main__":
    main()
