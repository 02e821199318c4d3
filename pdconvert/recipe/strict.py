"""The base of every part of a recipe, and the wording of its errors."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from pdconvert.errors import InputError

_EXPECTED = {
    "string_type": "expected a string",
    "int_type": "expected a whole number",
    "float_type": "expected a number",
    "bool_type": "expected true or false",
    "dict_type": "expected a mapping",
    "model_type": "expected a mapping",
    "model_attributes_type": "expected a mapping",
    "tuple_type": "expected a list",
    "list_type": "expected a list",
    "string_pattern_mismatch": "expected letters, digits, dots, dashes and underscores, a letter or digit first",
    "finite_number": "expected a finite number",
    "missing": "required, but absent",
}
"""pydantic's error types whose own words speak of Python instead of YAML."""


class Strict(BaseModel):
    """A frozen model: no unknown key, no conversion between types, no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key, value in data.items():
                if key not in cls.model_fields:
                    fail(f"unknown key{near_miss(str(key), cls.model_fields)}", path=[key])
                _check_literal(key, value, cls.model_fields[key].annotation)
        return data


def fail(message: str, *, path: Sequence[str | int] = (), shown: Any = None) -> NoReturn:
    """Stop a validation with our own wording.

    Args:
        message: what was expected.
        path: where, below the value that is being validated.
        shown: the value to show; None shows none.
    """
    raise PydanticCustomError(
        "recipe",
        "{message}",
        {"message": message, "path": tuple(path), "shown": shown if shown is None else repr(shown)},
    )


def near_miss(word: str, known: Iterable[str]) -> str:
    """A suggestion to append to an error: the nearest known word, else all of them."""
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(sorted(names))}" if names else ""


def literal_values(annotation: Any) -> tuple[Any, ...]:
    """The values that an annotation such as `Literal[8, 16] | None` lists; () if it lists none."""
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return tuple(v for part in typing.get_args(annotation) for v in literal_values(part))
    return ()


def _check_literal(key: str, value: Any, annotation: Any) -> None:
    """Refuse `true` for 1 and `8.0` for 8, which compare equal; suggest the near miss of a word."""
    values = literal_values(annotation)
    if not values or value is None or isinstance(value, dict | list):
        return
    if any(value == known and type(value) is type(known) for known in values):
        return
    if isinstance(value, int | float) and not isinstance(value, bool) and _takes_numbers(annotation):
        return
    choices = ", ".join(str(v) for v in values)
    close = difflib.get_close_matches(str(value), [v for v in values if isinstance(v, str)], n=1, cutoff=0.6)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    fail(f"expected {'one of ' if len(values) > 1 else ''}{choices}{hint}", path=[key], shown=value)


def _takes_numbers(annotation: Any) -> bool:
    """Whether a number of any value may stand beside the literals."""
    return bool({int, float} & set(typing.get_args(annotation)))


def first_error(error: ValidationError) -> tuple[tuple[str | int, ...], str]:
    """The path and the wording of the first error of a validation."""
    item = error.errors(include_url=False)[0]
    context = item.get("ctx", {})
    path = (*item["loc"], *context.get("path", ()))
    if item["type"] == "recipe":
        shown = context.get("shown")
        text = f"{shown}: {context['message']}" if shown is not None else context["message"]
        return path, text
    expected = _EXPECTED.get(
        item["type"], item["msg"][0].lower() + item["msg"][1:].replace("input should be", "expected")
    )
    expected = expected.replace("input should be", "expected")
    if item["type"] == "missing":
        return path, expected
    return path, f"{item['input']!r}: {expected}{_hint(item['input'], item['type'])}"


def _hint(value: Any, kind: str) -> str:
    """What to do about a value of the wrong type."""
    if isinstance(value, str) and kind in ("int_type", "float_type", "bool_type"):
        return ", not a string: leave out the quotes"
    if isinstance(value, int | float) and kind == "string_type":
        return ": put it in quotes"
    return ""


def dotted(path: Sequence[str | int]) -> str:
    """`("prefill", "functions", 0)` as `prefill.functions.0`."""
    return ".".join(str(part) for part in path)


def input_error(error: ValidationError, where: str) -> InputError:
    """One line for a failed validation: file, dotted path, value, expectation."""
    path, text = first_error(error)
    more = error.error_count() - 1
    rest = f" (and {more} more)" if more else ""
    place = f"{dotted(path)}: " if path else ""
    return InputError(f"{where}: {place}{text}{rest}")
