"""A decode step of a package in the manner of other tools: one state for all layers, written twice a layer.

    python benchmarks/stateful_step.py                    both parts
    python benchmarks/stateful_step.py --part 135m        SmolLM2-135M's geometry, fp16 weights
    python benchmarks/stateful_step.py --part 1b          TinyLlama's geometry, int8 weights: opening and memory
    python benchmarks/stateful_step.py --part tiny        seconds; shows that the script works

The package has random weights: RMSNorm by squares, RoPE on the last axis, keys and values repeated for their groups, K
and V of all layers in one state (2 · layers, kv_heads, context, head_dim), which `slice_update` writes at a position
known at run time, and a head in 16 parts. It is written in one process and measured in another, so that the peak is
that of running it alone. Prints one JSON object for each part; a step's time is the median of 20 after 3.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BUDGETS = {"135m": {"step_ms": 300}, "1b": {"open_s": 20, "peak_gb": 4}, "tiny": {}}
HEAD_PARTS = 16
PEAK_UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss


@dataclass(frozen=True)
class Geometry:
    """Sizes of a llama, and how its weights are stored: fp16, or int8 with a scale per output channel."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    bits: int


GEOMETRIES = {
    "135m": Geometry(30, 576, 1536, 9, 3, 64, 49152, 1024, 16),
    "1b": Geometry(22, 2048, 5632, 32, 4, 64, 32000, 1024, 8),
    "tiny": Geometry(2, 64, 128, 4, 2, 16, 320, 32, 8),
}


class Writer:
    """Writes the step as a MIL program."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.draw = np.random.default_rng(0)

    def write(self, path: Path) -> None:
        """Write the package."""
        from coremltools import target
        from coremltools.converters.mil import Builder as mb
        from coremltools.converters.mil.mil import Function, Program, types

        from pdconvert.emit.coreml import write_package

        g, self.mb = self.geometry, mb
        shapes = {
            "hidden": (1, g.hidden, 1, 1),
            "cos": (1, 1, 1, g.head_dim),
            "sin": (1, 1, 1, g.head_dim),
            "mask": (1, 1, 1, g.context),
        }
        inputs: dict[str, Any] = {name: mb.placeholder(s, types.fp16) for name, s in shapes.items()}
        inputs["position"] = mb.placeholder((1,), types.int32)
        inputs["cache"] = mb.state_tensor_placeholder(
            (2 * g.layers, g.kv_heads, g.context, g.head_dim), types.fp16
        )
        program = Program()
        with Function(inputs, opset_version=target.iOS18) as function:
            function.set_outputs(self.step(dict(function.inputs)))
        program.add_function("main", function)
        write_package(path, program, "iOS18", {})

    def step(self, v: dict[str, Any]) -> list[Any]:
        """All layers and the head."""
        g, mb, hidden = self.geometry, self.mb, v["hidden"]
        for layer in range(g.layers):
            normed = self.norm(hidden)
            q = self.rope(mb.reshape(x=self.conv(normed, g.heads * g.head_dim), shape=[1, g.heads, 1, -1]), v)
            k, value = (
                mb.reshape(x=self.conv(normed, g.kv_heads * g.head_dim), shape=[1, g.kv_heads, 1, -1])
                for _ in "kv"
            )
            keys = self.cached(v, 2 * layer, self.rope(k, v))
            values = self.cached(v, 2 * layer + 1, value)
            scores = mb.mul(x=mb.matmul(x=q, y=keys, transpose_y=True), y=np.float16(g.head_dim**-0.5))
            weights = mb.softmax(x=mb.add(x=scores, y=v["mask"]), axis=-1)
            mixed = mb.reshape(x=mb.matmul(x=weights, y=values), shape=[1, g.heads * g.head_dim, 1, 1])
            hidden = mb.add(x=hidden, y=self.conv(mixed, g.hidden))
            normed = self.norm(hidden)
            gate = mb.silu(x=self.conv(normed, g.intermediate))
            product = mb.mul(x=gate, y=self.conv(normed, g.intermediate))
            hidden = mb.add(x=hidden, y=self.conv(product, g.hidden))
        normed = self.norm(hidden)
        size = g.vocabulary // HEAD_PARTS
        return [self.conv(normed, size, name=f"logits{part + 1}") for part in range(HEAD_PARTS)]

    def conv(self, x: Any, outputs: int, name: str | None = None) -> Any:
        """A 1×1 convolution with random weights."""
        shape = (outputs, x.shape[1], 1, 1)
        if self.geometry.bits == 16:
            weight = (self.draw.standard_normal(shape, np.float32) * 0.02).astype(np.float16)
        else:
            codes = self.draw.integers(-127, 128, shape, np.int8)
            scale = np.full((outputs, 1, 1, 1), 0.02 / 73, np.float16)
            weight = self.mb.constexpr_blockwise_shift_scale(data=codes, scale=scale)
        return self.mb.conv(x=x, weight=weight, **({"name": name} if name else {}))

    def norm(self, x: Any) -> Any:
        """RMSNorm on channels, by squares."""
        mb = self.mb
        mean = mb.reduce_mean(x=mb.mul(x=x, y=x), axes=[1], keep_dims=True)
        gain = np.ones((1, x.shape[1], 1, 1), np.float16)
        return mb.mul(x=mb.mul(x=x, y=mb.rsqrt(x=mean, epsilon=np.float16(1e-5))), y=gain)

    def rope(self, x: Any, v: dict[str, Any]) -> Any:
        """RoPE on the last axis of (1, heads, 1, D)."""
        mb, (_, heads, _, dim) = self.mb, x.shape
        first = mb.slice_by_index(x=x, begin=[0, 0, 0, 0], end=[1, heads, 1, dim // 2])
        second = mb.slice_by_index(x=x, begin=[0, 0, 0, dim // 2], end=[1, heads, 1, dim])
        turned = mb.concat(values=[mb.mul(x=second, y=np.float16(-1)), first], axis=3)
        return mb.add(x=mb.mul(x=x, y=v["cos"]), y=mb.mul(x=turned, y=v["sin"]))

    def cached(self, v: dict[str, Any], row: int, new: Any) -> Any:
        """Write (1, kv_heads, 1, D) into a row of the state, read the row, and repeat it for its group."""
        g, mb = self.geometry, self.mb
        begin = self.place(row, v["position"], 0, 0)
        end = self.place(row + 1, mb.add(x=v["position"], y=np.int32(1)), g.kv_heads, g.head_dim)
        updated = mb.slice_update(x=mb.read_state(input=v["cache"]), update=new, begin=begin, end=end)
        whole = mb.coreml_update_state(state=v["cache"], value=updated)
        held = mb.slice_by_index(
            x=whole, begin=[row, 0, 0, 0], end=[row + 1, g.kv_heads, g.context, g.head_dim]
        )
        groups = g.heads // g.kv_heads
        repeated = mb.tile(x=mb.expand_dims(x=held, axes=[2]), reps=[1, 1, groups, 1, 1])
        return mb.reshape(x=repeated, shape=[1, g.heads, g.context, g.head_dim])

    def place(self, row: int, position: Any, head: int, channel: int) -> Any:
        """Bounds of which one is known at run time."""
        before, after = np.array([row, head], np.int32), np.array([channel], np.int32)
        return self.mb.concat(values=[before, position, after], axis=0)


def measure(path: Path, geometry: Geometry, runs: int) -> dict[str, float]:
    """Open the package and run steps, all in this process."""
    started = time.perf_counter()
    from pdconvert.executors.mil import MilSession

    session = MilSession(path)
    steps = len(session.plan.steps)
    opened = time.perf_counter() - started
    state = session.make_state()
    draw = np.random.default_rng(1)
    seconds = []
    for position in range(runs + 3):
        mask = np.where(np.arange(geometry.context) <= position, 0, -4e4).astype(np.float16)
        inputs = {
            "hidden": draw.standard_normal((1, geometry.hidden, 1, 1)).astype(np.float16),
            "cos": np.ones((1, 1, 1, geometry.head_dim), np.float16),
            "sin": np.zeros((1, 1, 1, geometry.head_dim), np.float16),
            "mask": mask[None, None, None],
            "position": np.array([position], np.int32),
        }
        start = time.perf_counter()
        session.run(inputs, state)
        seconds.append(time.perf_counter() - start)
    return {
        "open_s": round(opened, 3),
        "first_step_ms": round(1e3 * seconds[0], 1),
        "step_ms": round(1e3 * statistics.median(seconds[3:]), 1),
        "ops": steps,
        "state_mb": round(2e-6 * sum(value.numel() for value in state.values()), 1),
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * PEAK_UNIT / 1e9, 2),
    }


def main() -> None:
    """Write and measure, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=list(GEOMETRIES), action="append")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--step", choices=("write", "measure"), help=argparse.SUPPRESS)
    parser.add_argument("--package", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    parts = arguments.part or ["135m", "1b"]
    if arguments.step == "write":
        Writer(GEOMETRIES[parts[0]]).write(arguments.package)
        return
    if arguments.step == "measure":
        print(json.dumps(measure(arguments.package, GEOMETRIES[parts[0]], arguments.runs)))
        return
    for part in parts:
        with tempfile.TemporaryDirectory() as folder:
            package = Path(folder) / "step.mlpackage"
            command = [sys.executable, __file__, "--part", part, "--runs", str(arguments.runs)]
            command += ["--package", str(package)]
            subprocess.run([*command, "--step", "write"], check=True, stderr=subprocess.DEVNULL)
            found = subprocess.run([*command, "--step", "measure"], check=True, stdout=subprocess.PIPE)
            size = sum(file.stat().st_size for file in package.rglob("*") if file.is_file())
            content = {"part": part, "package_mb": round(size / 1e6), **json.loads(found.stdout)}
            print(json.dumps({**content, "budget": BUDGETS[part]}))


if __name__ == "__main__":
    main()
