"""The `passes` list of a recipe: names and options in, pass values out, and back."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError, create_model

from pdconvert.errors import InputError
from pdconvert.recipe.strict import Strict, fail, first_error, near_miss

if TYPE_CHECKING:
    from passes import QuantizeWeights


@cache
def pass_classes() -> dict[str, type]:
    """Recipe key -> pass class, in the usual order."""
    from passes import PASSES

    return {cls.name: cls for cls in PASSES}


@cache
def _options_model(cls: type) -> type[Strict]:
    """A strict model with the fields, types and defaults of a pass."""
    hints = typing.get_type_hints(cls)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        fields[field.name] = (hints[field.name], ... if default is dataclasses.MISSING else default)
    return create_model(f"{cls.__name__}Options", __base__=Strict, **fields)


def option_names(name: str) -> tuple[str, ...]:
    """The options that a pass takes."""
    return tuple(field.name for field in dataclasses.fields(pass_classes()[name]))


def entry_name(entry: Any) -> str | None:
    """The pass that a recipe entry names; None if it has not the form of one."""
    if isinstance(entry, str):
        return entry
    if isinstance(entry, dict) and len(entry) == 1:
        return str(next(iter(entry)))
    return None


def parse_passes(data: Any) -> tuple[Any, ...]:
    """The pass values of a recipe's `passes` list.

    Args:
        data: a list of `name`, `{name: {option: value}}` or pass values.

    Raises:
        PydanticCustomError: an entry of another form, an unknown pass or option, a wrong value, or a
            pass that is named twice.
    """
    if not isinstance(data, list | tuple):
        fail("expected a list of passes", shown=data)
    parsed = tuple(_parse_entry(index, entry) for index, entry in enumerate(data))
    seen: set[str] = set()
    for item in parsed:
        if item.name in seen:
            fail("this pass is listed twice; a pass runs once", path=[item.name])
        seen.add(item.name)
    return parsed


def _parse_entry(index: int, entry: Any) -> Any:
    if type(entry) in pass_classes().values():
        return entry
    name = entry_name(entry)
    if name is None:
        fail("expected a pass name or {name: {option: value}}", path=[index], shown=entry)
    if name not in pass_classes():
        fail(f"unknown pass{near_miss(name, pass_classes())}", path=[index], shown=name)
    options = entry[name] if isinstance(entry, dict) else {}
    if options is None:
        options = {}
    if not isinstance(options, dict):
        fail("expected options as {option: value}", path=[name], shown=options)
    return _build(pass_classes()[name], name, options)


def _build(cls: type, name: str, options: dict[str, Any]) -> Any:
    """The pass value, its options checked against the fields of its class."""
    try:
        checked = _options_model(cls).model_validate(options)
    except ValidationError as error:
        path, text = first_error(error)
        fail(text, path=[name, *path])
    values = {field: getattr(checked, field) for field in type(checked).model_fields}
    try:
        return cls(**values)
    except (ValueError, InputError) as error:
        fail(str(error), path=[name])


def dump_passes(values: Iterable[Any]) -> list[Any]:
    """The recipe entries of pass values, every option written out."""
    entries: list[Any] = []
    for value in values:
        options = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        entries.append({value.name: options} if options else value.name)
    return entries


def quantizes(values: Iterable[Any]) -> bool:
    """Whether the passes leave quantized weights."""
    return any(value.name == "quantize_weights" and value.scheme != "none" for value in values)


def quantizer_of(values: Iterable[Any]) -> QuantizeWeights:
    """The pass that quantizes weights, or leaves them in fp16, of a plan's passes, which have one."""
    from passes import QuantizeWeights

    return next(value for value in values if isinstance(value, QuantizeWeights))


def calibrated(values: Iterable[Any]) -> bool:
    """Whether a pass looks at calibration text."""
    return any(getattr(value, "calibrated", False) for value in values)


def fewest_bits(values: Iterable[Any]) -> int:
    """Bits of the narrowest weights that the passes leave."""
    from passes.quantize_weights import BITS

    chosen = [value for value in values if value.name == "quantize_weights" and value.scheme != "none"]
    return min(
        (width for value in chosen for width in (BITS[value.scheme], *value.bits.values())), default=16
    )
