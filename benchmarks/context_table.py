"""Prefill time against prompt length: the package in chunks on the MIL executor, Hugging Face in chunks and whole.

    pdconvert build smollm2-135m-long --set prefill.functions.3.past=3968 --out build/context
    python benchmarks/context_table.py build/context [--lengths 128 256 512 1024 2048 4096] [--runs 3]

Any build of a llama with functions that have a past will do; lengths beyond what they hold are left out. Both compute
K and V of all tokens with the same weights (Hugging Face with those of decode/, de-quantized, eager attention, without
its head); contenders alternate, medians are given. Prints a Markdown table.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fp16_quality import hugging_face

from pdconvert import text
from pdconvert.runtime.manifest import read_manifest
from pdconvert.runtime.tokenizer import Tokenizer
from pdconvert.verify import open_prefill

CHUNK = 128


def in_chunks(model: Any, ids: list[int]) -> None:
    """Hugging Face's model on 128 tokens at a time, with its own cache."""
    cache = None
    for start in range(0, len(ids), CHUNK):
        chunk = torch.tensor([ids[start : start + CHUNK]])
        cache = model(chunk, cache=cache, use_cache=True).cache


def seconds(work: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@torch.no_grad()
def measure(build: Path, lengths: list[int], runs: int) -> list[tuple[int, int, dict[str, float]]]:
    """Per length: calls of the package, and median seconds of each contender."""
    manifest = read_manifest(build)
    model = hugging_face(manifest.decode).model
    ids = Tokenizer(manifest.decode).encode(text.held_out()[0])
    sessions = {mode: open_prefill(manifest, "mil", mode) for mode in ("fp32", "fp16")}
    limit = min(sessions["fp32"].limit, len(ids))
    rows = []
    for length in (length for length in lengths if length <= limit):
        prompt = ids[:length]
        work = {
            "executor fp32, chunked": lambda p=prompt: sessions["fp32"].extend(None, p),
            "executor fp16, chunked": lambda p=prompt: sessions["fp16"].extend(None, p),
            "Hugging Face eager, chunked": lambda p=prompt: in_chunks(model, p),
            "Hugging Face eager, whole": lambda p=prompt: model(torch.tensor([p]), use_cache=True),
        }
        for call in work.values():
            call()
        before = sessions["fp32"].calls
        times = {name: [] for name in work}
        for _ in range(runs):
            for name, call in work.items():
                times[name].append(seconds(call))
        calls = (sessions["fp32"].calls - before) // runs
        rows.append((length, calls, {name: statistics.median(values) for name, values in times.items()}))
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    rows = measure(arguments.build, arguments.lengths, arguments.runs)
    if not rows:
        parser.error(f"{arguments.build} holds none of these lengths")
    names = list(rows[0][2])
    print(f"| tokens | calls | {' | '.join(f'{name}, s' for name in names)} | fp32 to Hugging Face whole |")
    print("|---|---|" + "---|" * (len(names) + 1))
    for length, calls, found in rows:
        ratio = found[names[0]] / found[names[-1]]
        print(f"| {length} | {calls} | {' | '.join(f'{found[name]:.2f}' for name in names)} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
