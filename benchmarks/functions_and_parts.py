"""What more functions cost, and whether a model in parts computes what it does in one.

    python benchmarks/functions_and_parts.py                     both, once
    python benchmarks/functions_and_parts.py --part functions    six functions beside one: SmolLM2-135M, fp16 weights
    python benchmarks/functions_and_parts.py --part parts        four parts beside one: TinyLlama's geometry, random
    python benchmarks/functions_and_parts.py --tiny              seconds; shows that the script works

Functions: both builds give K, V and logits and start from an empty cache; whole processes are measured, verification
of every function included. They alternate, and with `--runs` the medians are given. Parts: the second build finds the
first one's blocks in the cache; then both run the same prompt in both arithmetics, and their K and V are compared bit
for bit. Prints one JSON object for each.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from build_budgets import Cost, measure

from pdconvert.recipe import load_recipe

SIX = [
    {"tokens": 128},
    {"tokens": 128, "past": 512},
    {"tokens": 128, "past": 1024},
    {"tokens": 32, "past": 512},
    {"tokens": 1, "past": 512},
    {"tokens": 1, "past": 1024},
]
BUDGETS: dict[str, dict[str, Any]] = {
    "functions": {"size_ratio": 1.03, "time_ratio": 1.5},
    "parts": {"equal": True, "peak_gb": 12},
}


def build(folder: Path, name: str, recipe: str, cache: Path, **prefill: Any) -> Cost:
    """Build a recipe with another prefill section into folder/name, in a process of its own."""
    data = load_recipe(recipe).resolved()
    data["prefill"] |= prefill
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    command = [sys.executable, "-m", "pdconvert", "build", str(path), "--out", str(folder / name)]
    print(f"{recipe}: {name}", file=sys.stderr, flush=True)
    return measure(command, cache, accepted=(0, 1))  # 1: a gate failed; the verdict is shown


def verdict(build_folder: Path) -> str:
    """What the build says of itself."""
    return json.loads((build_folder / "manifest.json").read_text(encoding="utf-8"))["verdict"]


def package_bytes(build_folder: Path) -> int:
    """Bytes of the prefill half."""
    found = [*build_folder.glob("prefill.mlpackage"), *build_folder.glob("prefill")]
    return sum(file.stat().st_size for root in found for file in root.rglob("*") if file.is_file())


def functions(folder: Path, tiny: bool, runs: int) -> dict[str, Any]:
    """Six functions beside one with the same outputs."""
    recipe = "tiny" if tiny else "smollm2-135m-fp16"
    six = [{name: max(1, size // 4) for name, size in shape.items()} for shape in SIX] if tiny else SIX
    costs: dict[str, list[Cost]] = {"one": [], "six": []}
    for run in range(runs):
        for name, chosen in (("one", six[:1]), ("six", six)):
            shutil.rmtree(folder / name, ignore_errors=True)
            cache = folder / f"cache-{name}-{run}"
            costs[name].append(build(folder, name, recipe, cache, outputs="logits", functions=chosen))
            shutil.rmtree(cache)
    seconds = {name: statistics.median(cost.seconds for cost in found) for name, found in costs.items()}
    sizes = {name: package_bytes(folder / name) for name in costs}
    return {
        "size_mb": {name: round(size / 1e6, 2) for name, size in sizes.items()},
        "seconds": {name: [round(cost.seconds, 1) for cost in found] for name, found in costs.items()},
        "peak_gb": {
            name: round(max(cost.peak_bytes for cost in found) / 1e9, 2) for name, found in costs.items()
        },
        "verdicts": {name: verdict(folder / name) for name in costs},
        "size_ratio": round(sizes["six"] / sizes["one"], 4),
        "time_ratio": round(seconds["six"] / seconds["one"], 2),
    }


def parts(folder: Path, tiny: bool) -> dict[str, Any]:
    """A model in parts beside the same one in one part."""
    recipe, count = ("tiny", 2) if tiny else ("tinyllama-random", 4)
    cache = folder / "cache"
    cost = {
        "one": build(folder, "one", recipe, cache),
        "parts": build(folder, "parts", recipe, cache, split_model={"parts": count}),
    }
    command = [sys.executable, __file__, "--compare", str(folder / "one"), str(folder / "parts")]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return {
        "parts": count,
        "verdicts": {name: verdict(folder / name) for name in cost},
        "seconds": {name: round(item.seconds, 1) for name, item in cost.items()},
        "peak_gb": round(max(item.peak_bytes for item in cost.values()) / 1e9, 2),
        **found,
    }


def compare(whole: Path, cut: Path) -> dict[str, Any]:
    """Whether K and V of a prompt have the same bits in both builds."""
    import numpy as np

    from pdconvert.runtime.manifest import read_manifest
    from pdconvert.verify import open_prefill

    equal, values = True, 0
    for mode in ("fp32", "fp16"):
        found = []
        for path in (whole, cut):
            manifest = read_manifest(path)
            prefill = open_prefill(manifest, "mil", mode)
            ids = np.random.default_rng(0).integers(0, manifest.vocab_size, prefill.limit).tolist()
            kv = prefill.run(ids)
            assert kv is not None, "a prompt of one token has no K and V"
            found.append([array.view(np.uint16) for array in (*kv.keys, *kv.values)])
        equal &= all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
        values += sum(array.size for array in found[0])
    return {"equal": equal, "values_compared": values}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=list(BUDGETS), action="append")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--runs", type=int, default=1, help="of the functions; parts are built once")
    parser.add_argument("--compare", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compare:
        print(json.dumps(compare(*arguments.compare)))
        return
    for part in arguments.part or BUDGETS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            found = (
                functions(path, arguments.tiny, arguments.runs)
                if part == "functions"
                else parts(path, arguments.tiny)
            )
        print(json.dumps({"part": part, **found, "budget": BUDGETS[part]}), flush=True)


if __name__ == "__main__":
    main()
