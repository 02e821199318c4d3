"""Commands as processes of their own that need no seconds to start: forks of one that has imported everything.

Run as a program, this file is that process: it reads requests as lines of JSON and answers each with one line. On
macOS, where frameworks do not survive a fork, nothing is imported ahead and every command takes its seconds.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CAPABILITIES = 64
LINUX_CAPABILITY_VERSION_3 = 0x20080522
PR_CAPBSET_DROP = 24


@dataclass(frozen=True)
class Finished:
    """How a command ended: exit code (negative for a signal), and what it wrote."""

    code: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Command:
    """A command that runs."""

    server: WarmCli
    pid: int
    log: Path

    def send(self, number: signal.Signals) -> None:
        """Send a signal; the process is there until `wait` has been called."""
        os.kill(self.pid, number)

    def wait(self) -> Finished:
        """Wait for the end."""
        code = self.server.ask({"wait": self.pid})["code"]
        out, err = (Path(f"{self.log}.{name}") for name in ("out", "err"))
        return Finished(code, out.read_text(errors="replace"), err.read_text(errors="replace"))


class WarmCli:
    """The process that waits, and the way to it."""

    def __init__(self, env: Mapping[str, str] = {}) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env},
        )
        assert self.ask({}) == {"ready": True}

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """One request, one answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(
        self, args: Sequence[str], folder: Path, env: Mapping[str, str], log: Path, **options: Any
    ) -> Command:
        """Start a command.

        Args:
            args: of `pdconvert`.
            folder: where it works.
            env: its whole environment.
            log: `<log>.out` and `<log>.err` receive what it writes.
            options: `file_limit_bytes`: no file may grow larger; `powerless`: root's right to write everywhere
                is given up; `without`: "reader" for a stdout that nobody reads, "stdout" or "stderr" for none.
        """
        request = {"args": [*args], "folder": str(folder), "env": {**env}, "log": str(log), **options}
        return Command(self, self.ask(request)["pid"], log)

    def close(self) -> None:
        """End the process that waits."""
        self._process.communicate()


@contextmanager
def warm_cli() -> Iterator[WarmCli]:
    """A server for as long as the block lasts."""
    server = WarmCli()
    try:
        yield server
    finally:
        server.close()


def serve() -> None:
    """Answer requests; a child returns from here when it has become its command's process."""
    if sys.platform != "darwin":
        import_everything()
        gc.freeze()  # so that children do not copy what they never touch
    for line in sys.stdin:
        request = json.loads(line)
        if not request:
            answer: dict[str, Any] = {"ready": True}
        elif "wait" in request:
            answer = {"code": os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])}
        else:
            pid = os.fork()
            if not pid:
                become(request)
                return
            answer = {"pid": pid}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def import_everything() -> None:
    """What a build imports, and one export, which imports the rest; nothing that starts a thread."""
    import importlib

    import torch

    from pdconvert.executors.mil.proto import model_pb2
    from pdconvert.quiet import quiet_coremltools
    from pdconvert.recipe import load_recipe

    quiet_coremltools()
    load_recipe("tiny")
    model_pb2()
    modules = (
        "cli",
        "emit.coreml",
        "executors.mil",
        "lowering.assemble",
        "pipeline",
        "runtime.run",
        "verify",
    )
    for name in (
        *(f"pdconvert.{module}" for module in modules),
        "mlx_lm.utils",
        "transformers.models.llama.modeling_llama",
    ):
        importlib.import_module(name)
    torch.export.export(torch.nn.ReLU(), (torch.ones(2),))


def become(request: Mapping[str, Any]) -> None:
    """Take on a command's environment, folder, streams and limits."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    for descriptor, name in ((0, os.devnull), (1, f"{request['log']}.out"), (2, f"{request['log']}.err")):
        opened = os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    if request.get("without") == "reader":
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
    elif "without" in request:
        setattr(sys, request["without"], None)
    if "file_limit_bytes" in request:
        limit = request["file_limit_bytes"]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if request.get("powerless") and os.geteuid() == 0:
        drop_capabilities()
    sys.argv[1:] = request["args"]


def drop_capabilities() -> None:
    """Make root a user like others, who may not write what permissions forbid (Linux)."""
    import ctypes
    import struct

    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(CAPABILITIES):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = struct.pack("Ii", LINUX_CAPABILITY_VERSION_3, 0)
    if libc.capset(header, struct.pack("6I", *[0] * 6)):
        raise OSError(ctypes.get_errno(), "capset")


if __name__ == "__main__":
    serve()
    if len(sys.argv) > 1:
        from pdconvert.cli import main

        try:
            main(prog_name="pdconvert")
        except SystemExit as ended:
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()
            os._exit(ended.code)  # torch takes long to leave a process in order
