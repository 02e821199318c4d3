"""The packages that a path stands for: itself, or those of a build folder."""

from pathlib import Path
from typing import Any

from pdconvert.errors import InputError
from pdconvert.schema import read_manifest


def is_build(path: Path) -> bool:
    """Whether a build folder lies there."""
    return (path / "manifest.json").is_file()


def packages_of(path: Path) -> list[Path]:
    """The `.mlpackage` at a path, or all that a build's prefill is made of, in order.

    Raises:
        InputError: neither a package nor a build lies there, or the manifest names no package of the build.
    """
    if is_build(path):
        return build_packages(path, read_manifest(path)["prefill"])
    if path.suffix == ".mlmodelc":
        raise InputError(f"{path} is compiled for one device; give the .mlpackage that it was made from")
    if path.is_dir() and not (path / "Manifest.json").is_file():
        raise InputError(f"{path} is neither a build (no manifest.json) nor an .mlpackage (no Manifest.json)")
    return [path]


def build_packages(build: Path, prefill: dict[str, Any]) -> list[Path]:
    """The packages that the `prefill` section of a manifest names: one, or one for each part of the model.

    Raises:
        InputError: a name is missing, or does not stay inside the build.
    """
    parts = prefill.get("parts", [prefill])
    paths = []
    for part in parts if isinstance(parts, list) else [parts]:
        name = part.get("package") if isinstance(part, dict) else None
        if not isinstance(name, str) or not (build / name).resolve().is_relative_to(build.resolve()):
            raise InputError(
                f"{build / 'manifest.json'}: prefill names the package {name!r}, not one inside the build; "
                "build it again"
            )
        paths.append(build / name)
    return paths
