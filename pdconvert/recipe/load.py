"""Load a recipe from a file or by the name of a shipped one."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pdconvert import families
from pdconvert.errors import InputError
from pdconvert.recipe.model import Recipe
from pdconvert.recipe.overrides import apply_override
from pdconvert.recipe.source import SourceSpec, parse_source
from pdconvert.recipe.strict import input_error, near_miss
from pdconvert.recipe.yaml_loader import parse_yaml
from pdconvert.sources.files import read_json
from pdconvert.sources.gguf_config import refuse_architecture
from pdconvert.sources.gguf_header import read_architecture
from pdconvert.sources.pieces import Pieces


def shipped_recipes() -> tuple[str, ...]:
    """The names of the recipes that come with pdconvert, sorted."""
    found = (entry.name for entry in files("recipes").iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in found if name.endswith(".yaml")))


def load_recipe(name_or_path: str, *, source: str | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """Load, override and check a recipe.

    Args:
        name_or_path: the name of a shipped recipe, or a recipe file.
        source: replaces the recipe's source; see `parse_source`.
        overrides: `a.b=value`, applied in order, after the source.

    Raises:
        InputError: no such recipe, or anything in it that is unknown, of the wrong type or out of range.
    """
    text, where, folder = _read(name_or_path)
    data = parse_yaml(text, where)
    if not isinstance(data, dict):
        raise InputError(f"{where}: expected a mapping with version, name, source and passes")
    if source is not None:
        data["source"] = parse_source(source, Path.cwd()).model_dump(exclude_none=True)
    for override in overrides:
        apply_override(data, override)
    _refuse_early(data.get("source"), folder)
    return recipe_from_data(data, where=where, folder=folder)


def _refuse_early(source: Any, folder: Path) -> None:
    """Name an unsupported architecture before the imports that take seconds.

    It looks at a config, or at the first lines of a GGUF file's metadata; what is malformed or lies elsewhere is
    for the recipe's and the source's own checks.
    """
    if not isinstance(source, dict):
        return
    try:
        spec = SourceSpec(**source).anchored(folder)
        config, metadata = _look(spec)
    except (InputError, ValidationError, OSError, TypeError):
        return  # the recipe's or the source's check says what is wrong with it
    if metadata:
        refuse_architecture(str(spec.gguf), metadata)
    families.refuse_unsupported(config.get("model_type"))


def _look(spec: SourceSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config of a source that is at hand, and the architecture's metadata of a GGUF file."""
    if spec.random is not None:
        return spec.random.config, {}
    if spec.gguf is not None:
        path = Path(spec.gguf)
        return {}, read_architecture(Pieces((path,), path.name))
    if spec.path is not None:
        return read_json(Path(spec.path) / "config.json"), {}
    if spec.hub is not None:
        from pdconvert.sources.hub import cached

        snapshot = cached(spec.hub, spec.revision)
        return read_json(snapshot / "config.json") if snapshot else {}, {}
    return {}, {}


def recipe_from_data(data: Any, *, where: str, folder: Path | None = None) -> Recipe:
    """A recipe from plain data, such as `Recipe.resolved()` gives.

    Args:
        data: the recipe.
        where: the name to show in errors.
        folder: what relative source paths are relative to; the working directory by default.

    Raises:
        InputError: the data is not a recipe.
    """
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        raise input_error(error, where) from error
    return recipe.model_copy(update={"source": recipe.source.anchored(folder or Path.cwd())})


def _read(name_or_path: str) -> tuple[str, str, Path]:
    """The text of a recipe, its name in errors, and the folder of its relative paths."""
    shipped = shipped_recipes()
    if name_or_path in shipped:
        text = files("recipes").joinpath(f"{name_or_path}.yaml").read_text(encoding="utf-8")
        return text, f"recipe {name_or_path}", Path.cwd()
    path = Path(name_or_path)
    try:
        if path.is_dir():
            raise InputError(f"{path}: is a folder; give a recipe file or one of {', '.join(shipped)}")
        return path.read_text(encoding="utf-8"), str(path), path.absolute().parent
    except FileNotFoundError as error:
        looks_like_file = path.suffix in (".yaml", ".yml") or len(path.parts) > 1
        hint = "; check the path" if looks_like_file else near_miss(name_or_path, shipped)
        raise InputError(f"{path}: no such recipe{' file' if looks_like_file else ''}{hint}") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: not a text file in UTF-8 (byte {error.start}); a recipe is YAML"
        ) from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
