"""A small checkpoint as files, ways to damage it, and what every refusal on the command line owes."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor
from warm_cli import Command, Finished, WarmCli

from pdconvert.cache import Cache
from pdconvert.cli import main
from pdconvert.recipe import load_recipe
from pdconvert.sources import open_source

Q = "model.layers.0.self_attn.q_proj.weight"
UP = "model.layers.0.mlp.up_proj"
WEIGHTS = "model.safetensors"
Change = Callable[[Path], Any]
W4 = (
    "gates.kld=99",
    "gates.top1=0",
    "gates.kv_db=0",
    "gates.reason=random weights",
    "passes.quantize_weights.scheme=w4a16",
)
"""What the recipe `tiny` takes to build that checkpoint, whose weights are random, in 4 bits."""


def write_checkpoint(folder: Path) -> None:
    """The shipped tiny model as a checkpoint folder: hidden 64, 2 layers, 4 heads, 2 KV heads, vocabulary 320."""
    source = open_source(load_recipe("tiny").source)
    folder.mkdir(parents=True)
    save_file({name: source.read(name) for name in source.tensors()}, folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps(source.config))
    source.write_tokenizer(folder)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An intact checkpoint, not to be changed."""
    folder = tmp_path_factory.mktemp("base") / "checkpoint"
    write_checkpoint(folder)
    return folder


@pytest.fixture
def checkpoint(base: Path, tmp_path: Path) -> Path:
    """A copy of the intact checkpoint, to be damaged."""
    return shutil.copytree(base, tmp_path / "checkpoint")


@pytest.fixture(autouse=True)
def surroundings(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A working folder and a temporary folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("scratch")))


# Ways to damage a checkpoint


def config(**changes: Any) -> Change:
    """Set keys of config.json."""
    return json_file("config.json", lambda data: data | changes)


def json_file(name: str, change: Callable[[dict], Any]) -> Change:
    """Replace the content of a JSON file by what `change` makes of it."""

    def apply(folder: Path) -> None:
        path = folder / name
        data = json.loads(path.read_text())
        path.write_text(json.dumps(change(data)))

    return apply


def rope(**settings: Any) -> Change:
    """Set the old-style RoPE settings."""
    return config(rope_scaling=settings)


def content(name: str, change: Callable[[bytes], bytes] | bytes) -> Change:
    """Replace the bytes of a file."""

    def apply(folder: Path) -> None:
        path = folder / name
        path.write_bytes(change if isinstance(change, bytes) else change(path.read_bytes()))

    return apply


def gone(*names: str) -> Change:
    """Remove files."""
    return lambda folder: [(folder / name).unlink() for name in names]


def link(name: str) -> Change:
    """Put a link to a file that is gone in the place of a file, as an interrupted download leaves it."""

    def apply(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(folder / "blobs" / "gone")

    return apply


def tensors(change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> Change:
    """Replace the tensors of the weight file by what `change` makes of them."""

    def apply(folder: Path) -> None:
        state = dict(change(load_file(folder / WEIGHTS)))
        (folder / WEIGHTS).unlink()
        save_file(state, folder / WEIGHTS)

    return apply


def add(name: str, value: Tensor) -> Change:
    """Add a tensor, or put it in the place of one."""
    return tensors(lambda state: state | {name: value})


def drop(name: str) -> Change:
    """Take a tensor out."""
    return tensors(lambda state: {key: value for key, value in state.items() if key != name})


def spoil(name: str, value: float) -> Change:
    """Put one value into a tensor."""

    def change(state: dict[str, Tensor]) -> dict[str, Tensor]:
        state[name].view(-1)[7] = value
        return state

    return tensors(change)


def shards(
    change: Callable[[dict[str, str]], Any] = lambda weight_map: weight_map, *, pickled: bool = False
) -> Change:
    """Split the weights into two files with an index, whose map from tensor to file `change` may change."""

    def apply(folder: Path) -> None:
        state = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        stem, suffix = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
        weight_map = {}
        for number, names in enumerate((sorted(state)[:8], sorted(state)[8:]), 1):
            file = f"{stem}-{number:05}-of-00002.{suffix}"
            part = {name: state[name] for name in names}
            torch.save(part, folder / file) if pickled else save_file(part, folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = json.dumps({"weight_map": change(weight_map)})
        (folder / f"{stem}.{suffix}.index.json").write_text(index)

    return apply


def pickled(change: Callable[[dict[str, Tensor]], Any] = dict) -> Change:
    """Save what `change` makes of the tensors as `pytorch_model.bin` instead."""

    def apply(folder: Path) -> None:
        torch.save(change(load_file(folder / WEIGHTS)), folder / "pytorch_model.bin")
        (folder / WEIGHTS).unlink()

    return apply


def both(*changes: Change) -> Change:
    """Several changes, one after the other."""
    return lambda folder: [change(folder) for change in changes]


# What a refusal owes


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file below a folder, by path; folders without them."""
    return {
        str(path.relative_to(folder)): (
            (0, 0) if path.is_dir() else (path.lstat().st_size, path.lstat().st_mtime_ns)
        )
        for path in folder.rglob("*")
        if not path.name.startswith("torchinductor_")  # an empty folder that torch makes when it is imported
    }


def refusal(args: list[str], watched: Path, cache: Path, *, stdin: bytes | None = None) -> str:
    """Run a command that must refuse; what it says, without the leading `error: `.

    It must end with code 2, one or two lines on stderr and nothing on stdout, and leave nothing behind: no
    file in `watched` (the working folder among it) or in the temporary folder, and in the cache only entries
    that are whole.
    """
    before, temporary = listing(watched), Path(tempfile.gettempdir())
    scratch = listing(temporary)
    result = CliRunner().invoke(main, args, input=stdin, prog_name="pdconvert")
    said = result.stderr
    assert (result.exit_code, result.stdout) == (2, ""), said
    assert said.startswith("error: ") and said.endswith("\n") and "Traceback" not in said
    assert len(said.splitlines()) <= 2
    assert listing(watched) == before
    assert listing(temporary) == scratch
    assert_cache_is_whole(cache)
    return said.removeprefix("error: ").removesuffix("\n")


def assert_cache_is_whole(folder: Path) -> None:
    """Every entry of a cache matches its record, and nothing else lies there."""
    records = list(folder.glob("entries/*/*/entry.json"))
    with Cache(folder) as cache:
        assert all(cache.get(record.parent.name) for record in records)
    inside = {path for record in records for path in record.parent.rglob("*")}
    files = {path for path in folder.rglob("*") if path.is_file()}
    assert files <= inside | {folder / "lock"}


class Place:
    """A working folder with a temporary folder and a cache of its own, in which commands run.

    Attributes:
        folder: where commands work.
        temporary: their TMPDIR.
        cache: their PDCONVERT_CACHE.
    """

    def __init__(self, server: WarmCli, root: Path) -> None:
        self.server, self.root = server, root
        self.folder, self.temporary, self.cache = (root / name for name in ("work", "scratch", "cache"))
        self.folder.mkdir()
        self.temporary.mkdir()
        self.logs = 0

    def start(self, *args: str, env: Mapping[str, str | None] | None = None, **options: Any) -> Command:
        """Start `pdconvert` with these arguments; a variable that is None is not set."""
        variables = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.root / "home"),
            "PDCONVERT_CACHE": str(self.cache),
            "TMPDIR": str(self.temporary),
            **(env or {}),
        }
        known = {name: value for name, value in variables.items() if value is not None}
        self.logs += 1
        return self.server.start(args, self.folder, known, self.root / f"log{self.logs}", **options)

    def run(self, *args: str, **options: Any) -> Finished:
        """Run `pdconvert` to its end."""
        return self.start(*args, **options).wait()

    def assert_clean(self) -> None:
        """Nothing is left in the working and the temporary folder, and the cache is whole."""
        assert listing(self.folder) == {}
        assert listing(self.temporary) == {}
        assert_cache_is_whole(self.cache)


def says(text: str, expected: str) -> bool:
    """Whether a message is the expected one, in which … stands for anything."""
    pattern = ".*".join(re.escape(part) for part in expected.split("…"))
    return re.fullmatch(pattern, text, re.DOTALL) is not None
