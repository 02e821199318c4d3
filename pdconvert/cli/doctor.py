"""`pdconvert doctor`: whether this environment can do what pdconvert needs."""

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import click

from pdconvert import __version__
from pdconvert.cli.params import echo_json, examples, json_option, table
from pdconvert.sizes import size_text

# The versions that were tested together; a test keeps them equal to constraints.txt.
TESTED = {
    "click": "8.5.1",
    "coremltools": "9.0",
    "gguf": "0.19.0",
    "huggingface_hub": "2.4.0",
    "Jinja2": "3.1.6",
    "matplotlib": "3.11.2",
    "mlx": "0.32.4",
    "mlx-lm": "0.32.2",
    "numpy": "2.4.6",
    "onnx": "1.23.2",
    "onnxruntime": "1.32.0",
    "protobuf": "7.36.2",
    "pydantic": "2.14.4",
    "PyYAML": "6.0.4",
    "safetensors": "0.8.0",
    "torch": "2.13.0",
    "tqdm": "4.70.1",
    "transformers": "5.24.0",
}
LOW_DISK_BYTES = 5 * 10**9
# What a library that is installed but broken raises when it is imported or used.
BROKEN = (ImportError, OSError, RuntimeError, AttributeError, ValueError)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what.
        status: `ok`; `warn`: works, with a limit that `detail` names; `fail`: a command will not work.
        value: what was found.
        detail: what it means or what to do; empty when all is well.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    value: str
    detail: str = ""


@click.command(
    "doctor",
    short_help="Check this environment.",
    epilog=examples(
        "pdconvert doctor",
    ),
)
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Check Python, the libraries, the executors, the disk and the cache.

    The exit code is 1 when something that pdconvert needs does not work.
    """
    findings = examine()
    failed = any(finding.status == "fail" for finding in findings)
    if as_json:
        echo_json(
            {"verdict": "fail" if failed else "pass", "checks": [asdict(finding) for finding in findings]}
        )
    else:
        rows = [(finding.status, finding.name, finding.value, finding.detail) for finding in findings]
        click.echo(table(rows, ("", "what", "found", "note")))
    if failed:
        ctx.exit(1)


def examine() -> list[Finding]:
    """Look at everything; a library that is missing or broken is a finding, not an exception."""
    findings = [
        Finding("pdconvert", "ok", __version__),
        _python(),
        Finding(
            "system",
            "ok",
            f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} cores",
        ),
        *(_library(name, tested) for name, tested in TESTED.items()),
    ]
    probes: dict[str, Callable[[], Finding]] = {
        "torch threads": _torch_threads,
        "saving packages": _package_writing,
        "mlx product": _mlx_product,
        "Core ML prediction": _coreml,
        "disk": _disk,
        "cache": _cache,
    }
    for name, probe in probes.items():
        try:
            findings.append(probe())
        except BROKEN as error:
            text = " ".join(str(error).split())[:200]
            findings.append(Finding(name, "fail", type(error).__name__, text))
    return findings


def _python() -> Finding:
    found = platform.python_version()
    if sys.version_info[:2] != (3, 11):
        return Finding("python", "warn", found, "tested with 3.11")
    return Finding("python", "ok", found)


def _library(name: str, tested: str) -> Finding:
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding(name, "fail", "missing", f"pip install {name}=={tested}")
    if found.partition("+")[0] != tested:
        return Finding(name, "warn", found, f"tested with {tested}")
    return Finding(name, "ok", found)


def _torch_threads() -> Finding:
    import torch

    return Finding("torch threads", "ok", f"{torch.get_num_threads()} of {os.cpu_count()} cores")


def _package_writing() -> Finding:
    """Write one record of a weight file with coremltools' native library."""
    import numpy as np
    from coremltools.libmilstoragepython import _BlobStorageWriter as BlobWriter

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "weight.bin"
        writer = BlobWriter(str(file))
        offset = writer.write_int8_data(np.arange(8, dtype=np.int8))
        del writer
        size = file.stat().st_size
    return Finding("saving packages", "ok", f"weight file of {size} bytes, record at {offset}")


def _mlx_product() -> Finding:
    import mlx.core as mx

    product = mx.matmul(mx.array([[1.0, 2.0]]), mx.array([[3.0], [4.0]])).item()
    if product != 11.0:
        return Finding("mlx product", "fail", f"[1 2]·[3 4] = {product}", "a wrong product: reinstall mlx")
    return Finding("mlx product", "ok", f"computes on {mx.default_device()}")


def _coreml() -> Finding:
    if platform.system() != "Darwin":
        return Finding(
            "Core ML prediction",
            "ok",
            "not on this system",
            "macOS only; the mil executor runs packages here",
        )
    import coremltools.libcoremlpython  # noqa: F401

    return Finding("Core ML prediction", "ok", f"macOS {platform.mac_ver()[0]}")


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    if free < LOW_DISK_BYTES:
        return Finding("disk", "warn", f"{size_text(free)} free here", "a 1 B model takes about 3 GB")
    return Finding("disk", "ok", f"{size_text(free)} free here")


def _cache() -> Finding:
    from pdconvert.cache import Cache, cache_folder, cache_limit_bytes

    folder, limit = cache_folder(), cache_limit_bytes()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    value = f"{size_text(Cache(folder, limit).size_bytes())} of {size_text(limit)} in {folder}"
    if not os.access(nearest, os.W_OK):
        return Finding("cache", "warn", value, "not writable: set PDCONVERT_CACHE, or build with --no-cache")
    return Finding("cache", "ok", value)
