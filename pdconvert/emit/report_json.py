"""report.json: the ledger, and everything that the report page shows; docs/contracts.md has its keys."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdconvert import schema
from pdconvert.compile import step_to_json
from pdconvert.executors.mil.package import Package
from pdconvert.executors.mil.view import PackageView, view_package
from pdconvert.forensics import block_and_scope
from pdconvert.inspect_package import folder_bytes
from pdconvert.lint.report import lint_views
from pdconvert.split import part_path

if TYPE_CHECKING:
    from pdconvert.emit.manifest import Cost, Emitted
    from pdconvert.ledger import Ledger
    from pdconvert.proof import Proof
    from pdconvert.verify import Scores

PARTS = ("embedding", "attention", "mlp", "norms", "head")


def report(
    folder: Path, emitted: Emitted, verdict: str, proof: Proof, ledger: Ledger, cost: Cost
) -> dict[str, Any]:
    """The content of report.json.

    Args:
        folder: the build, with both halves written.
        proof: what running them showed; its checks include the ledger's gates.
    """
    plan = emitted.plan
    seen = {block.name: block.observations() for block in emitted.blocks}
    paths = [folder / part_path(index, len(emitted.parts)) for index in range(len(emitted.parts))]
    packages = [view_package(Package.open(path)) for path in paths]
    positions = _positions(proof.scores, emitted.texts.split) if proof.scores else None
    return {
        "schema": schema.SCHEMA,
        "name": plan.recipe.name,
        "verdict": verdict,
        "checks": [check.to_json() for check in proof.checks],
        "fault": proof.fault.to_json() if proof.fault else None,
        "steps": [step_to_json(step) for step in ledger.steps],
        "caches": plain(proof.caches),
        "projections": plain(_rows(seen, "projections")),
        "headroom": plain(proof.headroom),
        "positions": plain(positions),
        "fit": plain(proof.fit.to_json()) if proof.fit else None,
        "weights": plain(_rows(seen, "weights")),
        "samples": plain(proof.samples),
        "sizes": _sizes(folder, emitted, packages),
        "lint": _lint(folder, packages),
        "cost": {
            "seconds": round(cost.seconds, 1),
            "peak_bytes": cost.peak_bytes,
            "stages": [stage.to_json() for stage in cost.stages],
        },
    }


def plain(value: Any) -> Any:
    """Strict JSON: floats to five digits, those that are not finite as text ("inf", "-inf", "nan")."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def _rows(seen: Mapping[str, Mapping[str, Sequence[Any]]], key: str) -> list[dict[str, Any]]:
    return [{"block": name, **row} for name, found in seen.items() for row in found.get(key, [])]


def _positions(scores: tuple[Scores, Scores], first: int) -> dict[str, Any]:
    """Per scored position, over all windows: the mean KLD in nats, and how many windows agree on the best token."""
    return {
        "first": first,
        "windows": len(scores[0].kld),
        **{
            name: {
                "kld": one.kld.mean(0).tolist(),
                "equal": one.equal.sum(0).tolist(),
            }
            for name, one in zip(("pair", "mlx_alone"), scores, strict=True)
        },
    }


def _lint(folder: Path, packages: Sequence[PackageView]) -> dict[str, Any]:
    found = lint_views(folder, packages).to_json()
    return {key: found[key] for key in ("verdict", "chips", "systems", "counts", "findings", "note")}


def _sizes(folder: Path, emitted: Emitted, packages: Sequence[PackageView]) -> dict[str, Any]:
    """Bytes on disk by half, and weights and bytes by part of the model."""
    weights: Counter[str] = Counter()
    for block in emitted.blocks:
        for name, value in block.tensors().items():
            weights[_part(f"{block.name}.{name}")] += math.prod(value.shape)
    if emitted.plan.tied:  # the head's weights are the embedding's
        del weights["head"]
    package, decode = _package_bytes(packages), _decode_bytes(folder / "decode")
    return {
        "package_bytes": sum(folder_bytes(view.package.path) for view in packages),
        "decode_bytes": folder_bytes(folder / "decode"),
        "test_vectors_bytes": folder_bytes(folder / "test_vectors"),
        "parts": [
            {
                "part": part,
                "weights": weights[part],
                "package_bytes": package[part],
                "decode_bytes": decode[part],
            }
            for part in PARTS
            if weights[part] or package[part] or decode[part]
        ],
    }


def _package_bytes(packages: Sequence[PackageView]) -> Counter[str]:
    """Bytes in the weight files by part; a record that several functions name counts once."""
    found: dict[tuple[int, str, int], tuple[str, int]] = {}
    for index, package in enumerate(packages):
        for function in package.functions:
            for op in function.ops:
                if op.is_constant:
                    continue
                block, scope = block_and_scope(op.name)
                for value in op.values():
                    for (file, offset), size in value.records().items():
                        found[index, file, offset] = _part(f"{block}.{scope}"), size
    sizes: Counter[str] = Counter()
    for part, size in found.values():
        sizes[part] += size
    return sizes


def _decode_bytes(folder: Path) -> Counter[str]:
    """Bytes of the decode folder's tensors by part."""
    from safetensors import safe_open

    sizes: Counter[str] = Counter()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                tensor = file.get_slice(name)
                sizes[_part(name)] += math.prod(tensor.get_shape()) * ITEM_BYTES[tensor.get_dtype()]
    return sizes


ITEM_BYTES = {"U32": 4, "F16": 2, "BF16": 2, "F32": 4}
"""Types that a decode folder holds."""


def _part(name: str) -> str:
    """The part of a model that a tensor belongs to."""
    if "norm" in name:
        return "norms"
    if "self_attn" in name:
        return "attention"
    if "mlp" in name:
        return "mlp"
    return "embedding" if "embed" in name else "head"
