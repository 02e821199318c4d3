"""Bytes of both halves of a build, as its writers would write them.

Weights are counted record by record in the layouts of their files. The text of the MIL program, about 30 kB a
layer, is measured: a copy of the model that is two or three layers deep and as narrow as its numbers stay of equal
length is lowered and serialized, and its layers are counted up.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pdconvert.emit.mlx import fp16_reason, mlx_group, quantization_config
from pdconvert.emit.shards import DTYPES, index_text, plan_shards
from pdconvert.forecast.weightless import Store, on_source_grid, raw_bytes, weightless_blocks
from pdconvert.lowering.contract import Part
from pdconvert.model import ModelSpec
from pdconvert.prepare import Plan, make_forms
from pdconvert.quant.grid import QuantizedLinear
from pdconvert.quant.store import DecodeStored, Stored
from pdconvert.source_grid import keeps_grid

BLOB_ALIGNMENT = 64
NARROW = 256
"""A size above it is shortened to it: it takes two bytes in a protobuf, as do all up to 16,383."""

PACKAGE_MANIFEST_BYTES = 617


@dataclass(frozen=True)
class Sizes:
    """Bytes of what a build leaves for the two halves.

    Attributes:
        package_weights: of the weight files of all parts, their last tensors aligned as the others.
        package_program: of the programs and manifests of all parts.
        decode_weights: of the safetensors files and their index.
        decode_files: config, tokenizer and licence files; None for a source that does not hold its tokenizer.
        bits_per_weight: of the decoder's linears, scales included.
    """

    package_weights: int
    package_program: int
    decode_weights: int
    decode_files: int | None
    bits_per_weight: float

    @property
    def package(self) -> int:
        return self.package_weights + self.package_program

    @property
    def decode(self) -> int:
        return self.decode_weights + (self.decode_files or 0)


def forecast_sizes(plan: Plan, store: Store, parts: Sequence[Part]) -> Sizes:
    """Sizes of a plan's halves; takes a second or two, most of it for lowering the small copy."""
    target, matrices = plan.recipe.prefill.target, store.layer_matrices
    weights, files = decode_bytes(plan, store)
    bits = 8 * sum(sum(raw_bytes(stored)) for stored in matrices)
    return Sizes(
        package_weights=len(parts) * BLOB_ALIGNMENT
        + sum(blob_bytes(stored, target) for stored in store.held.values()),
        package_program=program_bytes(plan, parts),
        decode_weights=weights,
        decode_files=files,
        bits_per_weight=bits / sum(math.prod(stored.shape) for stored in matrices),
    )


def blob_bytes(stored: Stored, target: str) -> int:
    """Bytes of a stored tensor in a package's weight file, metadata and alignment included."""
    sizes = raw_bytes(stored)
    if isinstance(stored, QuantizedLinear) and target != "iOS18" and stored.zero_points is None:
        sizes.append(stored.shape[0])  # zero points, which the op of older systems takes
    return sum(BLOB_ALIGNMENT + math.ceil(size / BLOB_ALIGNMENT) * BLOB_ALIGNMENT for size in sizes)


def decode_stored(plan: Plan, store: Store) -> Iterator[tuple[str, DecodeStored]]:
    """The tensors of the decode folder, without their values; with decode.grid source, in the checkpoint's types."""
    from pdconvert.pipeline import decode_tensors

    infos = plan.source.tensors()
    for name, stored in decode_tensors(plan, store.decode_blocks):
        kept = keeps_grid(plan, name)
        yield name, on_source_grid(stored, plan.source.grids[infos[name].dtype]) if kept else stored


def fp16_reasons(plan: Plan, store: Store) -> dict[str, str]:
    """Records whose values the decode folder holds in fp16, and why."""
    reasons = {name: fp16_reason(stored) for name, stored in decode_stored(plan, store)}
    return {name: why for name, why in reasons.items() if why}


def decode_entries(
    plan: Plan, store: Store
) -> tuple[list[tuple[str, str, tuple[int, ...]]], dict[str, tuple[int, int]]]:
    """Name, dtype and shape of every tensor of the decode folder, and MLX's grid (group, bits) of each module."""
    entries: list[tuple[str, str, tuple[int, ...]]] = []
    grids: dict[str, tuple[int, int]] = {}
    for name, stored in decode_stored(plan, store):
        group = mlx_group(stored.shape[1], stored.group) if isinstance(stored, QuantizedLinear) else None
        if group is None or not isinstance(stored, QuantizedLinear):
            entries.append((name, "F16", tuple(stored.shape)))
            continue
        module, (outputs, inputs) = name.removesuffix(".weight"), stored.shape
        grids[module] = (group, stored.bits)
        entries.append((name, "U32", (outputs, inputs * stored.bits // 32)))
        entries += [(f"{module}.{part}", "F16", (outputs, inputs // group)) for part in ("scales", "biases")]
    return entries, grids


def decode_read_bytes(plan: Plan, store: Store) -> int:
    """Bytes of weights that a decoded token reads: all but the embedding, unless that is the head too."""
    return sum(
        DTYPES[dtype].itemsize * math.prod(shape)
        for name, dtype, shape in decode_entries(plan, store)[0]
        if plan.tied or not name.startswith("model.embed_tokens.")
    )


def decode_bytes(plan: Plan, store: Store) -> tuple[int, int | None]:
    """Bytes of the decode folder: weight files with their index, and all other files."""
    entries, grids = decode_entries(plan, store)
    parameters = sum(math.prod(stored.shape) for _, stored in decode_stored(plan, store))
    shards = plan_shards(entries)
    content = sum(DTYPES[dtype].itemsize * math.prod(shape) for _, dtype, shape in entries)
    index = index_text(
        [names for names, _ in shards], {"total_size": content, "total_parameters": parameters}
    )
    weights = sum(size for _, size in shards) + len(index.encode())
    quantization = quantization_config(grids)
    config = {**plan.decode_config, "quantization": quantization} if quantization else plan.decode_config
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)
    files = _tokenizer_bytes(plan)
    return weights, None if files is None else files + len(text.encode()) + 1


def _tokenizer_bytes(plan: Plan) -> int | None:
    if not plan.source.has_tokenizer:
        return None
    with tempfile.TemporaryDirectory() as name:
        plan.source.write_tokenizer(Path(name))
        return sum(path.stat().st_size for path in Path(name).rglob("*") if path.is_file())


def program_bytes(plan: Plan, parts: Sequence[Part]) -> int:
    """Bytes of the serialized programs and the manifests of all parts."""
    small = _narrow(plan.spec)
    *middle, last = small.layers
    kinds = list(Counter(middle))
    shallow = replace(small, layers=(*kinds, last))
    base = _lowered_bytes(plan, shallow)
    total = base
    if len(parts) > 1:  # every further part has inputs, outputs and constants of its own
        cut = [Part(0, 1, ends=False), Part(1, len(shallow.layers), starts=False)]
        total += (len(parts) - 1) * (_lowered_bytes(plan, shallow, cut) - base)
    for kind, count in Counter(middle).items():
        if count > 1:
            deeper = _lowered_bytes(plan, replace(small, layers=(kind, *kinds, last)))
            total += (count - 1) * (deeper - base)
    return total + len(parts) * PACKAGE_MANIFEST_BYTES


def _narrow(spec: ModelSpec) -> ModelSpec:
    """The model with every width cut that numbers in a protobuf do not show, and that no part depends on."""

    def cut(size: int) -> int:
        return min(size, NARROW)

    layers = tuple(
        replace(layer, hidden_size=cut(layer.hidden_size), intermediate_size=cut(layer.intermediate_size))
        for layer in spec.layers
    )
    return replace(spec, hidden_size=cut(spec.hidden_size), vocab_size=cut(spec.vocab_size), layers=layers)


def _lowered_bytes(plan: Plan, spec: ModelSpec, parts: Sequence[Part] = ()) -> int:
    """Bytes of the serialized programs of a model with all-zero weights, in one part if not given others."""
    from pdconvert.quiet import quiet_coremltools

    quiet_coremltools()
    from pdconvert.emit.coreml import MODEL, write_package
    from pdconvert.lowering.assemble import Lowering

    small = replace(plan, spec=spec)
    blocks = {block.name: block for block in weightless_blocks(small, "cpu")}
    skeletons = make_forms(small).skeletons(plan.interface.outputs)
    target = plan.recipe.prefill.target
    lowering = Lowering(spec, skeletons, lambda name: blocks[name].tensors(), target, plan.interface)
    total = 0
    for part in parts or [Part.whole(spec)]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "small.mlpackage"
            program = lowering.program(plan.shapes, part)
            write_package(folder, program, target, {"pdconvert.recipe": plan.recipe.name})
            total += (folder / MODEL).stat().st_size
    return total
