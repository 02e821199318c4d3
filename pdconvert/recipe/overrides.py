"""`--set a.b=value`: put scalars into recipe data by dotted path."""

from __future__ import annotations

import types
import typing
from typing import Any

from pydantic import BaseModel

from pdconvert.errors import InputError
from pdconvert.recipe.model import FunctionSpec, Recipe
from pdconvert.recipe.passes import entry_name, option_names, pass_classes
from pdconvert.recipe.strict import near_miss
from pdconvert.recipe.yaml_loader import parse_scalar


def apply_override(data: dict[str, Any], text: str) -> None:
    """Set one scalar of recipe data, in place.

    Args:
        data: a recipe as plain data, before validation.
        text: `dotted.path=value`, the value read as a YAML scalar; a pass is addressed by its name
            (`passes.quantize_weights.scheme=none`), a function by its number.

    Raises:
        InputError: no `=`, a path that the recipe format does not have, or a value that is not a scalar.
    """
    path, equals, raw = text.partition("=")
    where = f"--set {text}"
    if not equals or not path:
        raise InputError(f"{where}: expected a.b=value")
    value = parse_scalar(raw, where)
    parts = path.strip().split(".")
    _set_field(data, Recipe, parts, value, where)


def _set_field(data: Any, model: type[BaseModel], parts: list[str], value: Any, where: str) -> None:
    """Set a value below a part of the recipe that is a model."""
    if not isinstance(data, dict):
        raise InputError(f"{where}: the recipe has no mapping there to set {parts[0]!r} in")
    key, rest = parts[0], parts[1:]
    if key not in model.model_fields:
        raise InputError(f"{where}: unknown key {key!r}{near_miss(key, model.model_fields)}")
    annotation = model.model_fields[key].annotation
    inner = _inner_model(annotation)
    if model is Recipe and key == "passes":
        _set_pass(data, rest, value, where)
    elif key == "functions":
        _set_function(data, rest, value, where)
    elif inner is not None and rest:
        _set_field(_child(data, key), inner, rest, value, where)
    elif inner is not None:
        raise InputError(f"{where}: {key!r} is a group; set one of {', '.join(inner.model_fields)} in it")
    elif typing.get_origin(annotation) is dict:
        _set_free(_child(data, key), key, rest, value, where)
    elif rest:
        raise InputError(f"{where}: {key!r} is a single value and has no {rest[0]!r}")
    else:
        data[key] = value


def _set_pass(data: dict[str, Any], parts: list[str], value: Any, where: str) -> None:
    """Set an option of a pass that the recipe lists."""
    entries = data.get("passes")
    if not isinstance(entries, list):
        raise InputError(f"{where}: the recipe has no list of passes")
    names = [name for name in map(entry_name, entries) if name is not None]
    if len(parts) != 2:
        raise InputError(f"{where}: expected passes.NAME.OPTION=value; passes here: {', '.join(names)}")
    name, option = parts
    if name not in names:
        known = "; add it to the recipe's passes" if name in pass_classes() else near_miss(name, names)
        raise InputError(f"{where}: the recipe lists no pass {name!r}{known}")
    if name in pass_classes() and option not in option_names(name):
        hint = near_miss(option, option_names(name)) or "; it has none"
        raise InputError(f"{where}: {name} has no option {option!r}{hint}")
    index = names.index(name)
    entry = entries[index]
    options = dict(entry[name] or {}) if isinstance(entry, dict) else {}
    entries[index] = {name: {**options, option: value}}


def _set_function(data: dict[str, Any], parts: list[str], value: Any, where: str) -> None:
    """Set a number of a function that the recipe lists."""
    entries = data.setdefault("functions", [{"tokens": 128}])
    count = len(entries) if isinstance(entries, list) else 0
    if len(parts) != 2 or not parts[0].isdecimal() or int(parts[0]) >= count:
        raise InputError(
            f"{where}: expected functions.N.tokens or functions.N.past with N from 0 to {count - 1}"
        )
    _set_field(entries[int(parts[0])], FunctionSpec, parts[1:], value, where)


def _set_free(data: Any, key: str, parts: list[str], value: Any, where: str) -> None:
    """Set a key of a free mapping (a model's config), which may be new."""
    if not isinstance(data, dict) or len(parts) != 1 or not parts[0]:
        raise InputError(f"{where}: expected {key}.NAME=value")
    if isinstance(data.get(parts[0]), dict | list):
        raise InputError(f"{where}: {parts[0]!r} is not a scalar; change it in the recipe file")
    data[parts[0]] = value


def _child(data: dict[str, Any], key: str) -> Any:
    """The part below a key, created where the recipe leaves it out."""
    if data.get(key) is None:
        data[key] = {}
    return data[key]


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    """The model in an annotation such as `Prefill` or `RandomSpec | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next((m for m in map(_inner_model, typing.get_args(annotation)) if m is not None), None)
    return None
