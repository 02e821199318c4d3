"""`pdconvert list`: the recipes, passes, families and executors there are, found without importing them."""

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from pdconvert.cli.params import echo_json, examples, json_option, table

EXECUTORS = (
    ("mil", "any system", "runs the package op by op, in fp32 or emulated fp16"),
    ("coreml", "macOS", "runs the package through Core ML, on the compute units asked for"),
    ("mlx", "any system", "runs the decode folder through mlx-lm, on the GPU of a Mac, else on the CPU"),
)


@click.command(
    "list",
    short_help="List recipes, passes, families, executors.",
    epilog=examples(
        "pdconvert list",
    ),
)
@json_option
def command(as_json: bool) -> None:
    """List shipped recipes, passes, model families and executors."""
    found: dict[str, list[dict[str, str]]] = {
        "recipes": recipes(),
        "passes": passes(),
        "families": families(),
        "executors": [{"name": name, "where": where, "about": about} for name, where, about in EXECUTORS],
    }
    if as_json:
        echo_json(found)
        return
    click.echo("\n\n".join(_section(title, rows) for title, rows in found.items()))


def _section(title: str, rows: list[dict[str, str]]) -> str:
    if not rows:
        return f"{title}: none"
    return f"{title}\n{table([tuple(row.values()) for row in rows], tuple(rows[0]))}"


def recipes() -> list[dict[str, str]]:
    """The shipped recipes: name, source, weights."""
    import yaml

    rows = []
    for path in _files_of("recipes", ".yaml"):
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
        rows.append(
            {
                "name": recipe["name"],
                "source": _source_text(recipe.get("source")),
                "weights": _weights(recipe),
            }
        )
    return sorted(rows, key=lambda row: row["name"])


def passes() -> list[dict[str, str]]:
    """The passes in their usual order, each with the first line of its docstring."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in _files_of("passes", ".py")]
    rows = {}
    order: list[str] = []
    for tree in trees:
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and (name := _string_attribute(node, "name")):
                rows[node.name] = {"name": name, "about": _first_line(node)}
        order += _tuple_of_names(tree, "PASSES")
    return [rows[class_name] for class_name in order if class_name in rows]


def families() -> list[dict[str, str]]:
    """The model families: one file per `model_type`, known by its `TINY` configuration."""
    rows = []
    for path in _files_of("pdconvert.families", ".py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if _assigned(tree, "TINY") is not None:
            rows.append({"name": path.stem, "about": _first_line(tree)})
    return rows


def _files_of(package: str, suffix: str) -> list[Path]:
    """The files of an installed package, which is not imported (`passes` would import torch)."""
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    return sorted(
        path for folder in folders or () for path in Path(folder).iterdir() if path.suffix == suffix
    )


def _source_text(source: Any) -> str:
    if not isinstance(source, dict):
        return "-" if source is None else str(source)
    return ", ".join(
        f"{key} {value}" if isinstance(value, str | int) else str(key) for key, value in source.items()
    )


def _weights(recipe: dict[str, Any]) -> str:
    """The weight scheme that a recipe's passes name; fp16 where no pass quantizes."""
    for item in recipe.get("passes", ()):
        if item == "quantize_weights":
            return "quantized"
        if isinstance(item, dict) and "quantize_weights" in item:
            return str((item["quantize_weights"] or {}).get("scheme", "quantized"))
    return "fp16"


def _first_line(node: ast.Module | ast.ClassDef) -> str:
    return (ast.get_docstring(node) or "-").splitlines()[0]


def _assigned(node: ast.Module | ast.ClassDef, name: str) -> ast.expr | None:
    """The expression assigned to `name` in a module's or class's body."""
    for statement in node.body:
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        else:
            continue
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return statement.value
    return None


def _string_attribute(node: ast.ClassDef, name: str) -> str | None:
    value = _assigned(node, name)
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _tuple_of_names(tree: ast.Module, name: str) -> list[str]:
    value = _assigned(tree, name)
    if not isinstance(value, ast.Tuple):
        return []
    return [item.attr if isinstance(item, ast.Attribute) else ast.unparse(item) for item in value.elts]
