"""The parts of a build's manifest that a runtime needs, as checked values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from pdconvert import schema
from pdconvert.errors import InputError
from pdconvert.runtime.handoff import KeyForm
from pdconvert.runtime.rope import Frequencies

DECODE_FOLDER = "decode"


@dataclass(frozen=True)
class Port:
    """One input, output or state of a function."""

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Function:
    """One static entry point of the package: `tokens` new tokens on up to `past` cached ones.

    Attributes:
        states: keys and values that live on from call to call; none where the past is an input.
    """

    name: str
    tokens: int
    past: int
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    states: tuple[Port, ...] = ()

    def logits(self, outputs: Mapping[str, Any]) -> np.ndarray:
        """The logits (1, V, 1, n) fp32 among a call's outputs, put together where the vocabulary is cut."""
        parts = [np.asarray(outputs[port.name], np.float32) for port in self.outputs if port.role == "logits"]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, 1)


@dataclass(frozen=True)
class Part:
    """A function's share of one package.

    Attributes:
        package: inside the build folder.
        first, last: layers first … last − 1.
        inputs: names that the package's function takes.
    """

    package: Path
    first: int
    last: int
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class RopeTable:
    """Frequencies of the rotary embedding: radians per token, one for each pair of channels.

    Attributes:
        unrotated_layers: layers whose keys do not rotate.
        local: a second rotary embedding and the layers that have it instead.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float
    unrotated_layers: tuple[int, ...] = ()
    local: Frequencies | None = None

    def by_suffix(self, layers: int) -> dict[str, Frequencies]:
        """The embeddings of a model of so many layers, by the suffix of their inputs' roles."""
        local = self.local.layers if self.local else ()
        rest = tuple(index for index in range(layers) if index not in {*self.unrotated_layers, *local})
        main = Frequencies(self.inv_freq, self.attention_factor, rest)
        return {"": main, ".local": self.local} if self.local else {"": main}


@dataclass(frozen=True)
class Manifest:
    """What a runtime reads from `manifest.json`.

    Attributes:
        build: the build folder.
        verdict: "pass" or "fail"; a failed build still runs, and its report says why it failed.
        packages: the parts of the prefill package, each with its layers and its functions.
        functions: entry points, by name.
        rope: frequencies for the graph's tables.
        embedding_scale: factor on host embeddings.
        key_form: what the graph's `k` holds.
        layers, kv_heads, head_dim: geometry of K and V.
        eos_ids: tokens that end a text, as the build found them.
        hidden_size, vocab_size: geometry of the embedding.
        made_by: module path of a layer → the pass that made it, or "family"; empty for an older build.
        window: tokens that a token sees in layers with a window, itself included; None without such layers.
        max_positions: tokens that the model's positions are made for; None in an older build.
    """

    build: Path
    verdict: str
    packages: tuple[tuple[Path, tuple[int, int], Mapping[str, Function]], ...]
    functions: Mapping[str, Function]
    rope: RopeTable
    embedding_scale: float
    key_form: KeyForm
    layers: int
    kv_heads: int
    head_dim: int
    eos_ids: frozenset[int]
    hidden_size: int
    vocab_size: int
    made_by: Mapping[str, str]
    window: int | None = None
    max_positions: int | None = None

    @property
    def decode(self) -> Path:
        """The mlx-lm folder."""
        return self.build / DECODE_FOLDER

    def parts_of(self, function: str) -> tuple[Part, ...]:
        """Where the layers of a function lie, in order.

        Raises:
            InputError: the build has no such function.
        """
        if function not in self.functions:
            raise InputError(f"{self.build}: no function {function!r}; it has {', '.join(self.functions)}")
        return tuple(
            Part(package, *layers, inputs=tuple(port.name for port in functions[function].inputs))
            for package, layers, functions in self.packages
        )

    @property
    def longest_past(self) -> int:
        """Most past tokens that any function takes."""
        return max(function.past for function in self.functions.values())


def read_manifest(build: Path) -> Manifest:
    """Reads and checks the manifest of a build folder.

    Raises:
        InputError: no build, a newer schema, a field that is missing or of another type, or a path that
            leads out of the build folder.
    """
    fields = _Fields(build / "manifest.json", schema.read_manifest(build))
    prefill, kv = fields.object("prefill"), fields.object("kv")
    rope, embedding = fields.object("rope"), fields.object("embedding")
    if kv.text("rope") not in ("rotated", "raw"):
        raise InputError(f"{fields.path}: kv.rope is {kv.text('rope')!r}, expected rotated or raw")
    functions = prefill.object("functions")
    entries = {name: _function(name, functions.object(name)) for name in functions.values}
    layers = kv.integer("layers")
    if "parts" in prefill.values:
        packages = tuple(_part(build, part, entries, layers) for part in prefill.objects("parts"))
    else:
        packages = ((_inside(build, prefill.text("package")), (0, layers), entries),)
    return Manifest(
        build=build,
        verdict=fields.text("verdict"),
        packages=packages,
        functions=entries,
        rope=RopeTable(
            tuple(rope.numbers("inv_freq")),
            rope.number("attention_factor"),
            tuple(rope.integers("unrotated_layers")) if "unrotated_layers" in rope.values else (),
            _local(rope.object("local")) if "local" in rope.values else None,
        ),
        embedding_scale=embedding.number("scale"),
        key_form=cast(KeyForm, kv.text("rope")),
        layers=layers,
        kv_heads=kv.integer("kv_heads"),
        head_dim=kv.integer("head_dim"),
        eos_ids=frozenset(fields.integers("eos_token_ids")),
        hidden_size=fields.integer("hidden_size"),
        vocab_size=fields.integer("vocab_size"),
        made_by=dict(fields.values.get("made_by", {}).get("layers", {})),
        window=kv.object("window").integer("tokens") if "window" in kv.values else None,
        max_positions=fields.integer("max_positions") if "max_positions" in fields.values else None,
    )


def _local(rope: _Fields) -> Frequencies:
    frequencies, layers = tuple(rope.numbers("inv_freq")), tuple(rope.integers("layers"))
    return Frequencies(frequencies, rope.number("attention_factor"), layers)


def _part(
    build: Path, fields: _Fields, functions: Mapping[str, Function], layers: int
) -> tuple[Path, tuple[int, int], dict[str, Function]]:
    held, own = fields.integers("layers"), fields.object("functions")
    if len(held) != 2 or not 0 <= held[0] < held[1] <= layers or set(own.values) != set(functions):
        raise InputError(
            f"{fields.path}: {fields.prefix}layers or functions do not fit the model; build again"
        )
    own_functions = {name: _function(name, own.object(name)) for name in own.values}
    return _inside(build, fields.text("package")), (held[0], held[1]), own_functions


def _function(name: str, fields: _Fields) -> Function:
    keys = ("inputs", "outputs", *(["states"] if "states" in fields.values else []))
    ports = [tuple(_port(item) for item in fields.objects(key)) for key in keys]
    return Function(name, fields.integer("sequence_length"), fields.integer("past_length"), *ports)


def _port(fields: _Fields) -> Port:
    return Port(
        fields.text("name"), fields.text("role"), tuple(fields.integers("shape")), fields.text("dtype")
    )


def _inside(build: Path, name: str) -> Path:
    """A path of the manifest, which must stay inside the build folder."""
    path = build / name
    if Path(name).is_absolute() or not path.resolve().is_relative_to(build.resolve()):
        raise InputError(
            f"{build / 'manifest.json'}: path {name!r} leads out of the build folder; build again"
        )
    return path


@dataclass(frozen=True)
class _Fields:
    """An object of the manifest whose fields are read with their types."""

    path: Path
    values: Mapping[str, Any]
    prefix: str = ""

    def _get(self, key: str, kind: str, right: bool) -> Any:
        if key not in self.values:
            raise InputError(f"{self.path}: {self.prefix}{key} is missing; build again")
        if not right:
            value = str(self.values[key])[:80]
            raise InputError(f"{self.path}: {self.prefix}{key} is {value!r}, expected {kind}; build again")
        return self.values[key]

    def object(self, key: str) -> _Fields:
        value = self._get(key, "an object", isinstance(self.values.get(key), dict))
        return _Fields(self.path, value, f"{self.prefix}{key}.")

    def objects(self, key: str) -> list[_Fields]:
        value = self.values.get(key)
        right = isinstance(value, list) and all(isinstance(item, dict) for item in value)
        items = self._get(key, "a list of objects", right)
        return [_Fields(self.path, item, f"{self.prefix}{key}[{i}].") for i, item in enumerate(items)]

    def text(self, key: str) -> str:
        return self._get(key, "a text", isinstance(self.values.get(key), str))

    def integer(self, key: str) -> int:
        return self._get(key, "an integer", _is_integer(self.values.get(key)))

    def integers(self, key: str) -> list[int]:
        value = self.values.get(key)
        return self._get(key, "a list of integers", isinstance(value, list) and all(map(_is_integer, value)))

    def number(self, key: str) -> float:
        return float(self._get(key, "a number", _is_number(self.values.get(key))))

    def numbers(self, key: str) -> list[float]:
        value = self.values.get(key)
        return self._get(key, "a list of numbers", isinstance(value, list) and all(map(_is_number, value)))


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
