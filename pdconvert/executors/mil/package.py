"""Open a `.mlpackage`: its manifest, its protobuf, its weight files, its functions."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from pdconvert.errors import InputError
from pdconvert.executors.mil.blob import BlobFile
from pdconvert.executors.mil.proto import model_pb2
from pdconvert.executors.mil.values import ValueInfo, described, value_info
from pdconvert.plain_files import refuse_special

_MODEL_PATH = "@model_path/"
MIN_SPEC_VERSION = 6
"""The first specification with ML programs (iOS 15)."""
MAX_SPEC_VERSION = 9
"""The newest specification whose op set this executor covers (iOS 18)."""


@dataclass(frozen=True)
class FunctionInfo:
    """One function of a package.

    Attributes:
        name: as in the program.
        inputs: tensors by name, in the program's order.
        outputs: tensors by name, in the program's order.
        states: buffers by name that a call reads and writes.
    """

    name: str
    inputs: dict[str, ValueInfo]
    outputs: dict[str, ValueInfo]
    states: dict[str, ValueInfo]


class Package:
    """A `.mlpackage` that holds an ML program.

    Attributes:
        path: the package folder.
        spec: the `Model` protobuf.
        default_function: name of the function that runs when none is named.
    """

    def __init__(self, path: Path, model_file: Path, spec: Any) -> None:
        """Use `Package.open`; this takes parts that were already checked."""
        self.path = path
        self.spec = spec
        self._model_file = model_file
        self._functions: dict[str, FunctionInfo] = {}
        names = list(spec.mlProgram.functions)
        declared = spec.description.defaultFunctionName
        self.default_function = declared if declared in names else ("main" if "main" in names else names[0])

    @classmethod
    def open(cls, path: str | Path) -> "Package":
        """Open and check a package; weights are not read.

        Raises:
            InputError: no package lies there, or a part of it is missing or damaged.
        """
        from google.protobuf.message import DecodeError

        folder = Path(path)
        model_file = _find_model(folder)
        spec = model_pb2().Model()
        try:
            spec.ParseFromString(model_file.read_bytes())
        except OSError as error:
            raise InputError(f"{model_file}: cannot be read ({error.strerror})") from error
        except DecodeError as error:
            raise InputError(f"{model_file}: not a Core ML model, or damaged ({error})") from error
        kind = spec.WhichOneof("Type")
        if kind != "mlProgram":
            raise InputError(
                f"{model_file}: holds {kind or 'no model'}; only ML programs (iOS 15 and later) can be run"
            )
        if not MIN_SPEC_VERSION <= spec.specificationVersion <= MAX_SPEC_VERSION:
            raise InputError(
                f"{model_file}: specification version {spec.specificationVersion} is outside"
                f" {MIN_SPEC_VERSION}..{MAX_SPEC_VERSION} (iOS 15 to iOS 18)"
            )
        if not spec.mlProgram.functions:
            raise InputError(f"{model_file}: the program has no function")
        return cls(folder, model_file, spec)

    @property
    def function_names(self) -> list[str]:
        """Names of all functions, sorted."""
        return sorted(self.spec.mlProgram.functions)

    @property
    def functions(self) -> dict[str, FunctionInfo]:
        """All functions by name, sorted."""
        return {name: self.function(name) for name in self.function_names}

    def function(self, name: str | None = None) -> FunctionInfo:
        """Return what is known of one function; the default one where `name` is None.

        Raises:
            InputError: no such function, or an input or output that is neither tensor nor state.
        """
        chosen = name or self.default_function
        if chosen not in self._functions:
            self._functions[chosen] = self._read_function(chosen)
        return self._functions[chosen]

    def block(self, name: str) -> Any:
        """Return the protobuf `Block` (operations and output names) of a function.

        Raises:
            InputError: the function does not exist, or has no block for its own opset.
        """
        program = self.spec.mlProgram
        if name not in program.functions:
            raise InputError(f"{self.path}: no function {name!r}; it has {', '.join(self.function_names)}")
        function = program.functions[name]
        if function.opset not in function.block_specializations:
            raise InputError(
                f"{self._model_file}: function {name} has no operations for its opset {function.opset!r}"
            )
        return function.block_specializations[function.opset]

    @cached_property
    def blobs(self) -> "BlobTable":
        """Weight files by the name that the program gives them, opened when first asked for."""
        return BlobTable(self.path, self._model_file.parent)

    def _read_function(self, name: str) -> FunctionInfo:
        block = self.block(name)
        inputs: dict[str, ValueInfo] = {}
        states: dict[str, ValueInfo] = {}
        for item in self.spec.mlProgram.functions[name].inputs:
            info = value_info(item.type)
            (states if info.state else inputs)[item.name] = info
        wanted = set(block.outputs)
        types = {o.name: o.type for op in block.operations for o in op.outputs if o.name in wanted}
        outputs = {}
        for output in block.outputs:
            if output in types:
                outputs[output] = described(types[output])
            elif output in inputs:
                outputs[output] = inputs[output]
            else:
                raise InputError(
                    f"{self._model_file}: output {output!r} of function {name} is never computed"
                )
        return FunctionInfo(name, inputs, outputs, states)


class BlobTable(dict[str, BlobFile]):
    """Maps a program's file names (`@model_path/weights/weight.bin`) to mapped weight files."""

    def __init__(self, package: Path, model_folder: Path) -> None:
        """Resolve names below `model_folder`; nothing outside `package` is opened."""
        super().__init__()
        self._package = package.resolve()
        self._model_folder = model_folder.resolve()

    def __missing__(self, name: str) -> BlobFile:
        if not name.startswith(_MODEL_PATH) or not name.isprintable():
            raise InputError(
                f"{self._package}: weight file name {name!r} does not begin with {_MODEL_PATH}, or is no path"
            )
        target = (self._model_folder / name.removeprefix(_MODEL_PATH)).resolve()
        if not target.is_relative_to(self._package):
            raise InputError(f"{self._package}: weight file name {name!r} points outside the package")
        self[name] = BlobFile(target)
        return self[name]


def _find_model(folder: Path) -> Path:
    """Return the path of `model.mlmodel` as the package's manifest names it."""
    if not folder.is_dir():
        problem = "not a folder" if folder.exists() else "no such package"
        raise InputError(f"{folder}: {problem}; an .mlpackage is a folder with a Manifest.json")
    manifest_file = folder / "Manifest.json"
    refuse_special(manifest_file, "a package's manifest is one")
    try:
        manifest = json.loads(manifest_file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{folder}: has no Manifest.json, so it is not an .mlpackage") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{manifest_file}: not readable as JSON ({error})") from error
    items = manifest.get("itemInfoEntries") if isinstance(manifest, dict) else None
    root = manifest.get("rootModelIdentifier") if isinstance(manifest, dict) else None
    if not isinstance(items, dict) or not isinstance(root, str) or not isinstance(items.get(root), dict):
        raise InputError(f"{manifest_file}: names no model (rootModelIdentifier without an entry)")
    relative = items[root].get("path")
    if not isinstance(relative, str) or not relative or not relative.isprintable():
        raise InputError(f"{manifest_file}: the model's entry has no path that a file can have")
    model_file = folder / "Data" / PurePosixPath(relative)
    if not model_file.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"{manifest_file}: the model's path {relative!r} points outside the package")
    if not model_file.is_file():
        raise InputError(f"{model_file}: the model file is missing; the package is incomplete")
    return model_file
