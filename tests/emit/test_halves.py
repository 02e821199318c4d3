"""Every integer form in both written halves: the same codes, and the same values to the bit."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pdconvert
from pdconvert.executors.mil import Package
from pdconvert.executors.mil.dtypes import BY_NAME
from pdconvert.executors.mil.view import Op, view_package
from pdconvert.inspect_package import inspect_package
from pdconvert.recipe import load_recipe, recipe_from_data

GROUPS = {"granularity": "per_group", "group_size": 32, "force": True}
FORMS: dict[str, tuple[dict[str, Any], Counter[str], tuple[str, str], float]] = {
    # options; types of constants by op; what inspect says; bits beside the codes, for 64 inputs
    "w4": ({"scheme": "w4a16"}, Counter(int4=1, fp16=1), ("int4", "per_channel"), 16),
    "w4 zero points": (
        {"scheme": "w4a16", "symmetric": False},
        Counter(uint4=2, fp16=1),
        ("uint4", "per_channel"),
        20,
    ),
    "w8 zero points, groups": (
        {"scheme": "w8a16", "symmetric": False, **GROUPS},
        Counter(uint8=2, fp16=1),
        ("uint8", "per_block 32"),
        2 * 24,
    ),
    "w4 zero points, groups": (
        {"scheme": "w4a16", "symmetric": False, **GROUPS},
        Counter(uint4=2, fp16=1),
        ("uint4", "per_block 32"),
        2 * 20,
    ),
    "lpbq": (
        {"scheme": "w4a16", "form": "lpbq", **GROUPS},
        Counter(int4=1, uint4=1, fp16=1),
        ("int4", "per_block 32"),
        16 + 2 * 4,
    ),
}


def expanded(part: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """One entry for every weight, float64."""
    for axis, size in enumerate(shape):
        part = part.repeat(size // part.shape[axis], axis)
    return part.astype(np.float64)


def materialised(op: Op) -> np.ndarray:
    """scale · (data − offset) in float64."""

    def part(name: str) -> np.ndarray:
        value = op.input(name)
        assert value is not None
        return materialised(value.maker) if value.maker is not None else value.array().reshape(value.shape)

    shape = op.out.shape
    steps = part("data").astype(np.float64)
    if op.input("offset") is not None:
        steps = steps - expanded(part("offset"), shape)
    return steps * expanded(part("scale"), shape)


def constants(op: Op) -> Counter[str]:
    """Types of the constants that an op and what makes its inputs hold."""
    found: Counter[str] = Counter()
    for value in op.values():
        found += constants(value.maker) if value.maker is not None else Counter([value.dtype])
    return found


@pytest.mark.parametrize("name", FORMS)
def test_both_halves_hold_the_same_values(name: str, tmp_path: Path) -> None:
    import mlx.core as mx

    options, types, inspected, beside = FORMS[name]
    data = load_recipe("tiny").resolved()
    data["passes"] = [item for item in data["passes"] if "quantize_weights" not in item]
    data["passes"].append({"quantize_weights": options})
    data["gates"] = {}
    build = tmp_path / "out"
    result = pdconvert.build(recipe_from_data(data, where="test", folder=tmp_path), build)
    assert result.verdict == "pass", result.summary

    decode: dict[str, Any] = mx.load(str(build / "decode" / "model.safetensors"))
    config = json.loads((build / "decode" / "config.json").read_text())["quantization"]
    (view,) = view_package(Package.open(build / "prefill.mlpackage")).functions
    weights = [op for op in view.ops if op.type.startswith("constexpr_") and op.name.endswith("_weight")]
    assert len(weights) >= 9
    for op in weights:
        layer, path = op.name.removeprefix("layers_")[0], op.name[len("layers_0_") : -len("_weight")]
        module = f"model.layers.{layer}.{path.replace('attn_', 'attn.').replace('mlp_', 'mlp.')}"
        grid = config.get(module, config)
        parts = [decode[f"{module}.{part}"].astype(mx.float32) for part in ("scales", "biases")]
        read = mx.dequantize(
            decode[f"{module}.weight"],
            *parts,
            group_size=grid["group_size"],
            bits=grid["bits"],
            stream=mx.cpu,
        )
        values = materialised(op).reshape(read.shape)
        assert np.array_equal(np.array(read).astype(np.float64), values), module
        assert constants(op) == types

    function = inspect_package(build / "prefill.mlpackage")["functions"]["prefill_128"]
    assert inspected in {(row["dtype"], row["granularity"]) for row in function["weights"]}
    q_proj = next(op for op in weights if op.name == "layers_0_self_attn_q_proj_weight")
    rows, columns = q_proj.out.shape[:2]
    bits = 4 if options["scheme"] == "w4a16" else 8
    assert stored_bits(q_proj) == rows * (columns * bits + beside)
    manifest = json.loads((build / "manifest.json").read_text())
    every = sum(map(stored_bits, weights)) / sum(op.out.elements for op in weights)
    assert manifest["quantization"]["bits_per_weight"] == pytest.approx(
        every, rel=0.02
    )  # o and MLP of the last layer


def stored_bits(op: Op) -> int:
    """Bits of the constants that a weight is made of."""
    return sum(
        stored_bits(value.maker) if value.maker is not None else value.elements * BY_NAME[value.dtype].bits
        for value in op.values()
    )
