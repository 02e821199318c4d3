"""Strict YAML: the YAML 1.2 core scalars, no duplicate keys, no tags.

PyYAML follows YAML 1.1, in which `1e-5` is a string, `no` is a boolean, `010` is eight and `1:30` is
ninety; and it lets the last of two equal keys win. Here `1e-5` is a number, `no` a string, `010` ten,
and a repeated key is an error.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from pdconvert.errors import InputError

_SCALARS: tuple[tuple[str, str, str], ...] = (
    # tag, pattern, first characters that can start a match
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
)

_MAX_DIGITS = 100


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2 and no duplicate keys."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping whose keys are distinct strings."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is not a string", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=True)
        return mapping


for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), ["" if c == "\0" else c for c in _first]
    )


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    """A whole number in base ten, of any sensible length."""
    if len(node.value) > _MAX_DIGITS:
        raise yaml.constructor.ConstructorError(
            None, None, f"a number of {len(node.value)} digits", node.start_mark
        )
    return int(node.value)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def _load(text: str) -> Any:
    """One YAML document as plain data."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def parse_yaml(text: str, where: str, *, show_line: bool = True) -> Any:
    """Parse one YAML document.

    Args:
        text: the document.
        where: the name to show in errors, such as the file's path.
        show_line: whether errors tell the line.

    Raises:
        InputError: the text is not YAML, or has a duplicate or non-string key.
    """
    try:
        return _load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark and show_line else ""
        told = ", ".join(part for part in (error.context, error.problem) if part)
        raise InputError(f"{where}{line}: {told}") from error
    except RecursionError as error:
        raise InputError(f"{where}: nested too deeply; a recipe has a few levels only") from error
    except yaml.YAMLError as error:
        raise InputError(f"{where}: not YAML: {' '.join(str(error).split())}") from error


def parse_scalar(text: str, where: str) -> str | int | float | bool | None:
    """Parse the value of a `key=value` override: a single YAML scalar.

    Raises:
        InputError: the text is a list, a mapping or not YAML.
    """
    value: Any = parse_yaml(text, where, show_line=False)
    if isinstance(value, dict | list):
        raise InputError(f"{where}: {text!r} is not a scalar: write the list or mapping into the recipe file")
    return value
