"""A function of a package as text, one line for each operation that is not a plain constant."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from pdconvert.executors.mil import Package
from pdconvert.executors.mil.values import FileValue, read_value, value_info


def op_text(opened: Package, function: str) -> str:
    """Operations in order, as `name: type [shape] = op(argument=value, …)`, constants written in their place."""
    info = opened.function(function)
    lines = [f"{name}: {value.dtype} {list(value.shape)}" for name, value in info.inputs.items()]
    known: dict[str, str] = {}
    for operation in opened.block(function).operations:
        if operation.type == "const":
            known[operation.outputs[0].name] = _constant(operation.attributes["val"], opened)
            continue
        arguments = ", ".join(
            f"{name}={value}" for name, value in sorted(_arguments(operation, known, opened))
        )
        outputs = ", ".join(f"{output.name}: {_type(output.type)}" for output in operation.outputs)
        lines.append(f"{outputs} = {operation.type}({arguments})")
    return "\n".join([*lines, f"return {', '.join(info.outputs)}"]) + "\n"


def _arguments(operation: Any, known: Mapping[str, str], opened: Package) -> Iterator[tuple[str, str]]:
    for name, argument in operation.inputs.items():
        bound = [
            known.get(part.name, part.name)
            if part.WhichOneof("binding") == "name"
            else _constant(part.value, opened)
            for part in argument.arguments
        ]
        yield name, bound[0] if len(bound) == 1 else f"({', '.join(bound)})"
    for name, value in operation.attributes.items():
        if name != "name":
            yield name, _constant(value, opened)


def _type(proto: Any) -> str:
    value = value_info(proto)
    return f"{value.dtype} {list(value.shape)}"


def _constant(proto: Any, opened: Package) -> str:
    """The value itself; for what lies in the weight file, its type and shape."""
    value = read_value(proto, opened.blobs)
    if isinstance(value, FileValue):
        return f"<{value.dtype.name} {list(value.shape)}>"
    if isinstance(value, np.ndarray):
        plain = value.tolist()
        return f"{plain:.6g}" if isinstance(plain, float) else str(plain)
    return repr(value)
