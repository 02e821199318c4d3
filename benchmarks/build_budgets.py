"""Whole-process seconds and peak memory of a build, with the common way beside it in the same run.

    python benchmarks/build_budgets.py                       everything, once (about ten minutes on two cores)
    python benchmarks/build_budgets.py --part smollm2-135m --runs 3
    python benchmarks/build_budgets.py --part tiny           seconds; shows that the script works

Every line is a process of its own, measured from its start to its end by the operating system (`wait4`):
imports, reading the source, verification and writing are in it, installation is not. With several runs the
medians are given, and the contenders alternate. `pdconvert build` verifies what it wrote; the common way does
not. Prints a Markdown table.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "benchmarks"
PARTS = ("smollm2-135m", "tinyllama-random", "tiny")
PEAK_UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss


@dataclass(frozen=True)
class Cost:
    """What a process took."""

    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Line:
    """One thing to measure: its name, its command, and its budget in words."""

    name: str
    command: list[str]
    budget: str = ""


BUDGETS = {"smollm2-135m": "75 s, 2 GB", "tinyllama-random": "150 s, 4 GB"}


def measure(command: list[str], cache: Path, accepted: tuple[int, ...] = (0,)) -> Cost:
    """Run a command to its end; exit codes other than the accepted ones are failures.

    Raises:
        SystemExit: it failed; its output is shown.
    """
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PDCONVERT_CACHE": str(cache),
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryFile() as output:
        start = time.monotonic()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environ)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in accepted:
            output.seek(0)
            sys.stderr.write(output.read().decode(errors="replace")[-4000:])
            raise SystemExit(f"exit {process.returncode}: {' '.join(command)}")
    return Cost(seconds, usage.ru_maxrss * PEAK_UNIT)


def lines(part: str, folder: Path) -> list[Line]:
    """What is measured for a recipe, in order; the last line finds the first one's work in the cache."""
    python = sys.executable
    build = [python, "-m", "pdconvert", "build", part, "--out", str(folder / "build"), "--force"]
    checkpoint = folder / "checkpoint"
    common = [
        python,
        str(HERE / "common_way.py"),
        "package",
        str(checkpoint),
        str(folder / "common.mlpackage"),
    ]
    mlx = [python, "-m", "mlx_lm", "convert", "--hf-path", str(checkpoint), "--mlx-path", str(folder / "mlx")]
    mlx += ["-q", "--q-bits", "8", "--q-group-size", "64"]
    return [
        Line("pdconvert build, verified", build, BUDGETS.get(part, "")),
        Line("trace, ct.convert, linear_quantize_weights", common),
        Line("mlx_lm.convert", mlx),
        Line("pdconvert build again, verified", build, "reuses what is done"),
    ]


def measure_part(part: str, folder: Path, runs: int) -> list[tuple[Line, Cost]]:
    """Measure a recipe's lines; give each with its medians."""
    checkpoint = [sys.executable, str(HERE / "common_way.py"), "checkpoint", part, str(folder / "checkpoint")]
    measure(checkpoint, folder / "unused")
    todo = lines(part, folder)
    costs: list[list[Cost]] = [[] for _ in todo]
    for run in range(runs):
        for line, found in zip(todo, costs, strict=True):
            print(f"{part}, run {run + 1} of {runs}: {line.name}", file=sys.stderr, flush=True)
            shutil.rmtree(folder / "mlx", ignore_errors=True)  # mlx_lm.convert refuses an existing folder
            found.append(measure(line.command, folder / f"cache-{run}"))
    return [(line, median(found)) for line, found in zip(todo, costs, strict=True)]


def median(costs: list[Cost]) -> Cost:
    """The medians of several runs."""
    seconds = statistics.median(cost.seconds for cost in costs)
    return Cost(seconds, int(statistics.median(cost.peak_bytes for cost in costs)))


def executor_line(folder: Path) -> str:
    """Time the executor on the package just built."""
    command = [sys.executable, str(HERE / "executor_speed.py"), str(folder / "build")]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = json.loads(subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True).stdout)
    return (
        f"128 tokens, keys and values of all layers: mil fp32 {found['mil_fp32_ms']:.0f} ms, "
        f"mil fp16 {found['mil_fp16_ms']:.0f} ms, Hugging Face eager {found['hugging_face_eager_ms']:.0f} ms "
        f"(mil fp32 against Hugging Face: K {found['k_sqnr_db']:.0f} dB, V {found['v_sqnr_db']:.0f} dB)"
    )


def main() -> None:
    """Measure the chosen parts and print the table."""
    parser = argparse.ArgumentParser(description="Time and memory of a build beside the common way.")
    parser.add_argument("--part", choices=PARTS, action="append", help="default: both large ones")
    parser.add_argument("--runs", type=int, default=1)
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores, {sys.platform}, medians of {args.runs} run(s)\n")
    for part in args.part or PARTS[:2]:
        with tempfile.TemporaryDirectory() as name:
            measured = measure_part(part, Path(name), args.runs)
            speed = executor_line(Path(name))
        print(f"### {part}\n")
        print("| process | seconds | peak GB | budget |\n|---|---|---|---|")
        for line, cost in measured:
            print(f"| {line.name} | {cost.seconds:.1f} | {cost.peak_bytes / 1e9:.2f} | {line.budget} |")
        print(f"\n{speed}\n", flush=True)


if __name__ == "__main__":
    main()
