"""`pdconvert inspect`: what is in a package or a build."""

from pathlib import Path
from typing import Any

import click

from pdconvert.cli.params import UserPath, echo_json, examples, json_option, table
from pdconvert.sizes import size_text


@click.command(
    "inspect",
    short_help="Show what a package or a build holds.",
    epilog=examples(
        "pdconvert inspect build/smollm2-135m",
        "pdconvert inspect some.mlpackage --json",
    ),
)
@click.argument("path", type=UserPath())
@json_option
def command(path: Path, as_json: bool) -> None:
    """Show the functions, tensors, operations and weights of PATH, a .mlpackage or a build folder."""
    from pdconvert.inspect_package import inspect_path

    report = inspect_path(path)
    if as_json:
        echo_json(report)
        return
    if report["kind"] == "build":
        click.echo(
            f"build {report['name']}: {report['verdict']}, {size_text(report['size_bytes'])}, {path}\n"
        )
        for package in report.get("parts") or [report["prefill"]]:
            click.echo(_package_text(package) + "\n")
        click.echo(_decode_text(report["decode"]))
    else:
        click.echo(_package_text(report))


def _package_text(report: dict[str, Any]) -> str:
    sharing = report["sharing"]
    parts = [
        f"package {report['path']}: {size_text(report['size_bytes'])}, "
        f"specification {report['spec_version']}, default function {report['default_function']}"
    ]
    parts += [_function_text(name, function) for name, function in report["functions"].items()]
    if len(report["functions"]) > 1:
        alone = ", ".join(f"{name} {size_text(size)}" for name, size in sharing["alone_bytes"].items())
        parts.append(
            f"sharing: {size_text(sharing['stored_bytes'])} stored for {size_text(sharing['named_bytes'])} "
            f"named; {size_text(sharing['shared_bytes'])} shared between functions; alone: {alone}"
        )
    return "\n\n".join(parts)


def _function_text(name: str, function: dict[str, Any]) -> str:
    tensors = [
        (role, value["name"], value["dtype"], _shape_text(value["shape"]))
        for role, values in (
            ("input", function["inputs"]),
            ("state", function["states"]),
            ("output", function["outputs"]),
        )
        for value in values
    ]
    weights = [
        (
            group["dtype"],
            group["granularity"],
            group["tensors"],
            group["elements"],
            size_text(group["bytes"]),
        )
        for group in function["weights"]
    ]
    operations = ", ".join(f"{op} {count}" for op, count in function["ops"].items())
    lines = [
        f"function {name} ({function['opset']}), {size_text(function['weight_bytes'])} of weights",
        _indent(table(tensors, ("role", "name", "type", "shape"))),
        _indent(
            table(weights, ("weights", "granularity", "tensors", "elements", "bytes"))
            if weights
            else "no weights"
        ),
        f"  operations: {operations}",
        f"  {_cost_text(function['cost'])}",
    ]
    return "\n".join(lines)


def _cost_text(cost: dict[str, Any]) -> str:
    moved = cost["weight_bytes"] + cost["activation_bytes"]
    unsized = f"; {cost['unsized_ops']} ops of run-time size not counted" if cost["unsized_ops"] else ""
    return (
        f"estimated work of one call: {cost['flops'] / 1e9:.3g} GFLOP; {size_text(moved)} moved, op by op "
        f"({size_text(cost['weight_bytes'])} weights as stored, {size_text(cost['activation_bytes'])} activations)"
        f"{unsized}"
    )


def _decode_text(decode: dict[str, Any]) -> str:
    rows = [(dtype, row["tensors"], size_text(row["bytes"])) for dtype, row in decode["tensors"].items()]
    quantization = decode["quantization"]
    form = (
        f"{quantization.get('bits')} bits, groups of {quantization.get('group_size')}"
        if isinstance(quantization, dict)
        else "not quantized"
    )
    title = f"decode weights ({decode['model_type']}): {size_text(decode['weight_bytes'])}, {form}"
    return f"{title}\n{_indent(table(rows, ('type', 'tensors', 'bytes')))}"


def _shape_text(shape: list[int]) -> str:
    return "(" + ", ".join("?" if size < 0 else str(size) for size in shape) + ")"


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
