"""`pdconvert export onnx`: the package of a build as ONNX models, checked against the package itself.

DIR/
  export.json                       what lies here, from which build, checks, verdict
  FUNCTION.onnx                     one model per function
  weights.data                      their weights, each once
  FUNCTION.encodings-1.0.0.json     AIMET-style
  FUNCTION.encodings-2.0.0.json
  FUNCTION.fold.onnx …              after each step of optimization that was asked for
  test_vectors/                     the build's
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pdconvert import schema
from pdconvert.checks import Check, verdict
from pdconvert.emit.vectors import Case, read_vectors
from pdconvert.errors import InputError
from pdconvert.executors.mil import MilSession, Package
from pdconvert.executors.mil.view import FunctionView, view_package
from pdconvert.executors.mil.weights import WeightCache, default_cache_bytes
from pdconvert.export.data import WeightData
from pdconvert.export.encodings import encodings_1, encodings_2
from pdconvert.export.graph import translate
from pdconvert.export.optimize import optimize
from pdconvert.export.ranges import observe
from pdconvert.export.session import feed, open_session, run_case
from pdconvert.measure import sqnr_db
from pdconvert.process import output_folder
from pdconvert.runtime.manifest import Manifest, read_manifest
from pdconvert.verify import logits_db, per_layer_db

if TYPE_CHECKING:
    from pdconvert.export.weights import QuantizedWeight

FLOOR_DB = 55.0
"""Least SQNR of every output against the package in fp32 arithmetic."""
WEIGHTS = "weights.data"
VECTORS = "test_vectors"


@dataclass(frozen=True)
class Outputs:
    """What a function gives on a test vector: outputs and states after the call, by name."""

    values: Mapping[str, np.ndarray]
    states: Mapping[str, np.ndarray]


def export_onnx(
    build: Path, out: Path, functions: Sequence[str] = (), steps: Sequence[str] = ()
) -> dict[str, Any]:
    """Write the ONNX models of a build into a new folder.

    Args:
        build: a finished build.
        out: a folder that is not there yet, or is empty.
        functions: names of functions; all where empty.
        steps: of optimization, from `optimize.STEPS`, in order.

    Returns:
        The content of export.json: `verdict`, `functions`, `checks` and where they come from.

    Raises:
        InputError: no build, no such function, a model in parts, or an op that is not translated; nothing is written.
        CheckFailed: a step of optimization broke the model's form; nothing is written.
    """
    manifest = read_manifest(build)
    if len(manifest.packages) != 1:
        raise InputError(
            f"{build}: its model is in {len(manifest.packages)} parts; build it without split_model"
        )
    names = list(functions) or list(manifest.functions)
    for name in names:
        manifest.parts_of(name)
    cases = read_vectors(build / VECTORS)[0]
    package = Package.open(manifest.packages[0][0])
    views = {view.name: view for view in view_package(package).functions}
    with output_folder(out, force=False) as folder:
        weights = _write_models(folder, [views[name] for name in names])
        cache, checks, entries = WeightCache(default_cache_bytes()), [], {}
        for name in names:
            own = [case for case in cases if case.function == name]
            expected = [_package_outputs(MilSession(package, name, cache=cache), case) for case in own]
            found, files = _finish(folder, manifest, name, own, expected, steps, weights[name])
            checks += found
            ports = {kind: _ports(manifest, name, kind) for kind in ("inputs", "outputs", "states")}
            entries[name] = {**files, **ports}
        shutil.copytree(build / VECTORS, folder / VECTORS)
        content = {
            "schema": schema.SCHEMA,
            "build": schema.read_manifest(build)["name"],
            "store": schema.read_manifest(build).get("hash", {}).get("store"),
            "verdict": verdict(checks),
            "functions": entries,
            "checks": [check.to_json() for check in checks],
        }
        (folder / "export.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return content


def _write_models(folder: Path, views: Sequence[FunctionView]) -> dict[str, dict[str, QuantizedWeight]]:
    """Write all models and their weights; returns the quantized weights of each."""
    import onnx

    data, weights = WeightData(folder / WEIGHTS), {}
    try:
        for view in views:
            model, writer = translate(view, data)
            onnx.save(model, folder / f"{view.name}.onnx")
            weights[view.name] = writer.quantized
    finally:
        data.close()
    return weights


def _finish(
    folder: Path,
    manifest: Manifest,
    name: str,
    cases: Sequence[Case],
    expected: Sequence[Outputs],
    steps: Sequence[str],
    weights: Mapping[str, QuantizedWeight],
) -> tuple[list[Check], dict[str, Any]]:
    """Check one model, write its encodings, optimize it and check each step."""
    model = folder / f"{name}.onnx"
    checks = _check(model, manifest, cases, expected)
    ranges = observe(model, [feed(case) for case in cases])
    files = {}
    for content in (encodings_1(weights, ranges), encodings_2(weights, ranges)):
        path = folder / f"{name}.encodings-{content['version']}.json"
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")
        files[content["version"]] = path.name
    optimized = []
    for step in steps:
        model = optimize(model, step)
        optimized.append(model.name)
        checks += _check(model, manifest, cases, expected)
    return checks, {"model": f"{name}.onnx", "encodings": files, "optimized": optimized}


def _ports(manifest: Manifest, name: str, kind: str) -> list[str]:
    return [port.name for port in getattr(manifest.functions[name], kind)]


def _package_outputs(session: MilSession, case: Case) -> Outputs:
    """What the package gives in fp32 arithmetic."""
    state = session.make_state()
    for name, held in case.states.items():
        session.write_state(state, name, held)
    values = session.run(case.inputs, state)
    arrays = {name: value.numpy() for name, value in values.items()}
    return Outputs(arrays, {name: session.read_state(state, name).copy() for name in case.states})


def _check(
    model: Path, manifest: Manifest, cases: Sequence[Case], expected: Sequence[Outputs]
) -> list[Check]:
    """SQNR of every output of a model against the package's, on the real columns of each test vector."""
    session, checks = open_session(model), []
    for case, wanted in zip(cases, expected, strict=True):
        values, states = run_case(session, case)
        function, layers = manifest.functions[case.function], manifest.layers
        found = {
            f"{side} worst layer": per_layer_db(
                wanted.values[side], torch.from_numpy(values[side]), layers, case.tokens
            ).worst_db
            for side in ("k", "v")
        }
        if any(port.role == "logits" for port in function.outputs):
            found["logits"] = logits_db(function.logits(wanted.values), function.logits(values), case.tokens)
        for name, held in wanted.states.items():
            found[name] = sqnr_db(torch.from_numpy(held), torch.from_numpy(states[name]))
        checks += [
            Check(f"{model.stem}: {name}", "sqnr_db", value, FLOOR_DB, hint="against the package in fp32")
            for name, value in found.items()
        ]
    return checks
