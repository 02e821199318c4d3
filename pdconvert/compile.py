"""Blocks stream: each is loaded, run as reference, rewritten, checked, quantized, stored and dropped.

    source tensors ─► Hugging Face's layer ─► reference outputs ─┐
          └────────► family's block ─► passes, each checked against them ─► stored tensors
                                                                              └─► next block's input

What goes from block to block are the activations of three streams, so that memory does not grow with depth.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pdconvert.basis import Basis, into
from pdconvert.cache import content_key
from pdconvert.calibrate import Flow
from pdconvert.fixed_values import SCALES, with_fixed
from pdconvert.forms import Forms, plain_head, plain_layer
from pdconvert.layer_tensors import by_checkpoint_name
from pdconvert.observe import Calls, histograms, projections, watch_linears
from pdconvert.program import Block, Pass, Probe, Step, check_family, run_passes
from pdconvert.quant.grid import quantize_symmetric
from pdconvert.quant.store import Stored, dequantized, load_block, save_block
from pdconvert.recipe.passes import quantizer_of
from pdconvert.reference import Reference
from pdconvert.sources.files import sha256_file

if TYPE_CHECKING:
    from pdconvert.cache import Cache
    from pdconvert.quant.calibration import Calibration


@dataclass(frozen=True)
class Streams:
    """Activations between two blocks.

    Attributes:
        reference: (1, T, H), the probe through the checkpoint's own weights.
        stored: (1, T, H), the probe through the weights that are shipped, in fp32.
        windows: (N, W, H), text to measure on through the checkpoint's own weights; N may be 0.
    """

    reference: Tensor
    stored: Tensor
    windows: Tensor


class StoredBlock(Protocol):
    """A named block of the quantized store."""

    @property
    def name(self) -> str: ...

    def tensors(self) -> dict[str, Stored]:
        """The stored tensors by name in the block."""


@dataclass(frozen=True)
class CompiledBlock:
    """A block as it lies in the cache: its stored tensors, its part of the ledger, and what flows on.

    Attributes:
        folder: holds tensors, streams and steps.json; of a layer scales, caches and observations.json too.
    """

    name: str
    folder: Path

    def tensors(self) -> dict[str, Stored]:
        """The stored tensors by name in the block, memory-mapped."""
        return load_block(self.folder / "tensors.safetensors")

    def streams(self) -> Streams:
        """The activations after the block."""
        values = load_file(self.folder / "streams.safetensors")
        return Streams(values["reference"], values["stored"], values["windows"])

    def caches(self) -> dict[str, Tensor]:
        """K and V of the probe, (kv_heads, T, D): `reference.k`, `reference.v`, `stored.k`, `stored.v`."""
        return load_file(self.folder / "caches.safetensors")

    def underflows(self) -> dict[str, int]:
        """Values of the checkpoint that are not zero and became zero in fp16, by tensor."""
        return json.loads((self.folder / "underflows.json").read_text())

    def steps(self) -> list[Step]:
        """The block's lines of the ledger."""
        return [step_from_json(line) for line in json.loads((self.folder / "steps.json").read_text())]

    def observations(self) -> dict[str, list[dict[str, Any]]]:
        """What the report shows of a layer: `projections` and `weights`, see `pdconvert.observe`; else nothing."""
        path = self.folder / "observations.json"
        return json.loads(path.read_text()) if path.exists() else {}


@dataclass(frozen=True)
class Compiler:
    """Everything that compiling a block depends on.

    Attributes:
        passes: the recipe's passes for layers, the quantizer among them.
        graph_passes: passes of the prefill graph alone, which follow those, by block name.
        raw_keys: whether k leaves the graph before RoPE.
        probe_ids, window_ids: token ids of the probe (T) and of windows to measure on (N, W): held-out text, then
            calibration text.
        fixed: by block, stored tensors that take the place of what the quantizer would compute, in files: those of
            an earlier compilation, then those that were learned from them.
        embedding_bits: of the stored embedding; 32 where only the MLX half holds it, on the checkpoint's own grid.
        calibration_ids: token ids of calibration text, by sequence; empty where no pass looks at it.
        device: where calibrated passes compute.
        basis: of the residual stream in the stored weights; None is the checkpoint's.
    """

    reference: Reference
    passes: tuple[Pass, ...]
    head_passes: tuple[Pass, ...]
    graph_passes: Mapping[str, tuple[Pass, ...]]
    embedding_bits: int
    embedding_group: int
    raw_keys: bool
    probe_ids: tuple[int, ...]
    window_ids: tuple[tuple[int, ...], ...]
    source_hashes: Mapping[str, str]
    calibration_ids: tuple[tuple[int, ...], ...] = ()
    device: str = "cpu"
    basis: Basis | None = None
    fixed: Mapping[str, tuple[Path, Path]] = field(default_factory=dict)

    def compile(self, cache: Cache) -> Iterator[CompiledBlock]:
        """Yield the embedding, every layer and the head, in order; what the cache has is not done again."""
        base = self._base_key()
        steps = [("embedding", self._embedding), *((f"layers.{i}", self._layer) for i in range(self.depth))]
        done: list[CompiledBlock] = []
        flow = Flow(
            self.reference,
            self.calibration_ids,
            lambda: dequantized(done[0].tensors()["weight"]),
            self.device,
            self.basis,
            quantizer_of(self.passes).nearest,
        )
        for index, (name, work) in enumerate([*steps, ("head", self._head)]):
            key = content_key(base, name)
            folder = cache.get(key)
            if folder is None:
                before = done[-1].streams() if done else None
                if work == self._layer and self.calibration_ids and not self.fixed:
                    work = partial(
                        work, calibration=flow.before(index - 1, lambda layer: done[layer + 1].tensors())
                    )
                folder = cache.put(key, partial(work, index=index - 1, streams=before))
            done.append(CompiledBlock(name, folder))
            yield done[-1]

    @property
    def depth(self) -> int:
        return len(self.reference.spec.layers)

    @property
    def forms(self) -> Forms:
        """The forms of its blocks."""
        return Forms(self.reference.spec, self.passes, self.head_passes, self.graph_passes, self.raw_keys)

    def skeletons(self, outputs: str) -> list[Block]:
        """Weightless blocks in their final form, for lowering: the layers, and the head for `logits`."""
        return self.forms.skeletons(outputs)

    def made_by(self) -> dict[str, dict[str, str]]:
        """Which pass each module of a block comes from, or "family"; blocks of equal form share one entry.

        Returns:
            "layers" and "head" → module path → name.
        """
        blocks = {block.name: block for block in self.skeletons("logits")}
        return {
            name: {path: _maker(part) for path, part in block.module.named_modules() if path}
            for name, block in (("layers", blocks["layers.0"]), ("head", blocks["head"]))
        }

    def _base_key(self) -> str:
        """A hash over all inputs of all blocks: the checkpoint, what is asked for, and this program itself."""
        passes = {name: [repr(p) for p in value] for name, value in sorted(self.graph_passes.items())}
        inputs = {
            "code": code_hash(),
            "versions": {
                name: metadata.version(name) for name in ("torch", "transformers", "numpy", "safetensors")
            },
            "source": dict(self.source_hashes),
            "config": self.reference.source.config,
            "passes": [[repr(p) for p in self.passes], [repr(p) for p in self.head_passes], passes],
            "embedding": [self.embedding_bits, self.embedding_group],
            "raw_keys": self.raw_keys,
            "basis": self.basis,
            "probe": self.probe_ids,
            "windows": self.window_ids,
            "calibration": [self.calibration_ids, self.device],
            "fixed": [sha256_file(path) for _, paths in sorted(self.fixed.items()) for path in paths],
        }
        return content_key(inputs)

    def _embedding(self, folder: Path, index: int, streams: Streams | None) -> None:
        reference = self.reference
        weight = reference.source.read("model.embed_tokens.weight")
        turned = into(weight, self.basis)
        stored = store_matrix(turned, self.embedding_bits, self.embedding_group, "model.embed_tokens.weight")
        save_block(folder / "tensors.safetensors", {"weight": stored})
        _save_underflows(folder, {"weight": turned}, {"weight": stored})
        values = dequantized(stored)
        scale, size = reference.spec.embedding_scale, reference.spec.hidden_size
        probe = torch.tensor(self.probe_ids)
        width = len(self.window_ids[0]) if self.window_ids else 0
        windows = torch.tensor(self.window_ids, dtype=torch.long).reshape(len(self.window_ids), width)
        flow = Streams((weight[probe] * scale)[None], (values[probe] * scale)[None], weight[windows] * scale)
        assert flow.reference.shape[2] == size
        _save_flow(folder, flow)
        _save_steps(folder, [])

    def _layer(
        self, folder: Path, index: int, streams: Streams | None, calibration: Calibration | None = None
    ) -> None:
        reference, spec = self.reference, self.reference.spec
        assert streams is not None
        tensors = reference.read_layer(index)
        original = reference.module(index, tensors)
        if reference.keeps_layers:
            reference.keep(index, original)
        hidden, cache = reference.run(original, streams.reference)
        windows = reference.run(original, streams.windows)[0] if len(streams.windows) else streams.windows
        probe = self.reference.probe(index, streams.reference)
        attention_factor = spec.rope_of(spec.layers[index]).attention_factor
        unturn = self.raw_keys and spec.layers[index].rotary
        keys = unrotate(cache.keys, probe, attention_factor) if unturn else cache.keys
        expected = {"hidden": hidden, "k": keys, "v": cache.values}

        block = plain_layer(spec, index, tensors, self.raw_keys)
        outputs, first = check_family(block, probe, expected)
        passes = self.passes if not self.fixed else with_fixed(self.passes, self.fixed[block.name])
        quantizer = next(i for i, item in enumerate(passes) if item.name == "quantize_weights")
        block, outputs, steps = run_passes(block, passes[:quantizer], probe, expected, outputs, calibration)
        with watch_linears(block.module) as clean:
            block.run(probe)
        block, outputs, rest = run_passes(block, passes[quantizer:], probe, expected, outputs, calibration)
        stored = stored_tensors(block)
        values = {name: dequantized(value) for name, value in stored.items()}
        _, _, more = run_passes(block, self.graph_passes[block.name], probe, expected, outputs)

        shipped = reference.module(
            index, {name: values[name].view(tensor.shape) for name, tensor in tensors.items()}
        )
        with watch_linears(shipped) as drifted:
            stored_hidden, stored_cache = reference.run(shipped, streams.stored)
        observed = {
            "projections": projections(clean, self._by_block_name(index, drifted, tensors), values),
            "weights": histograms(tensors, stored),
        }
        (folder / "observations.json").write_text(json.dumps(observed))
        stored_keys = unrotate(stored_cache.keys, probe, attention_factor) if unturn else stored_cache.keys
        save_block(folder / "tensors.safetensors", stored)
        save_file({name: value.contiguous() for name, value in block.scales.items()}, folder / SCALES)
        _save_underflows(folder, tensors, stored)
        _save_flow(folder, Streams(hidden, stored_hidden, windows))
        caches = {
            "reference.k": keys,
            "reference.v": cache.values,
            "stored.k": stored_keys,
            "stored.v": stored_cache.values,
        }
        save_file(
            {name: value[0].contiguous() for name, value in caches.items()}, folder / "caches.safetensors"
        )
        _save_steps(folder, [first, *steps, *rest, *more])

    def _by_block_name(self, index: int, calls: Calls, tensors: Mapping[str, Tensor]) -> Calls:
        """The calls of Hugging Face's linears as those of the block's."""
        names = by_checkpoint_name(self.reference.family, index, self.reference.spec)
        prefix = f"model.layers.{index}."
        fused = {name.removeprefix(prefix): parts for name, parts in names.items()}
        return calls.split(fused, {name: len(tensor) for name, tensor in tensors.items()})

    def _head(self, folder: Path, index: int, streams: Streams | None) -> None:
        assert streams is not None
        tensors = self.reference.head_tensors()
        probe = self.reference.probe(index - 1, streams.reference)
        expected = {"logits": self.reference.logits(streams.reference, tensors)}
        block = plain_head(self.reference.spec, tensors)
        outputs, first = check_family(block, probe, expected)
        block, outputs, steps = run_passes(block, self.head_passes, probe, expected, outputs)
        stored = stored_tensors(block)
        save_block(folder / "tensors.safetensors", stored)
        _save_underflows(folder, tensors, stored)
        _, _, more = run_passes(block, self.graph_passes["head"], probe, expected, outputs)
        _save_flow(folder, streams)
        _save_steps(folder, [first, *steps, *more])


def _maker(part: nn.Module) -> str:
    """The pass that a module's class belongs to, or "family"."""
    module = type(part).__module__
    if module.startswith("passes."):
        return module.removeprefix("passes.")
    return "linear_to_conv2d" if isinstance(part, nn.Conv2d) else "family"


def store_matrix(weight: Tensor, bits: int, group: int, name: str) -> Stored:
    """A matrix on a symmetric grid, in fp16 for 16 bits, or as it is for 32."""
    from passes.quantize_weights import to_fp16

    if bits == 32:
        return weight
    return to_fp16(weight, name) if bits == 16 else quantize_symmetric(weight, bits, name, group)


def stored_tensors(block: Block) -> dict[str, Stored]:
    """What the store keeps of a block: records of quantized weights, fp16 of everything else, matrices as (O, I)."""
    kept: dict[str, Stored] = {}
    for name, value in block.module.named_parameters():
        half = value.detach().half()
        kept[name] = half.flatten(1) if half.dim() > 2 else half
    return {**kept, **block.records}


def unrotate(keys: Tensor, probe: Probe, attention_factor: float) -> Tensor:
    """Keys (B, heads, S, D) before RoPE: rotation by the negative angle, divided by the squared factor."""
    from pdconvert.blocks import rotate

    cos, sin = (table.double()[None, None] / attention_factor**2 for table in (probe.cos, -probe.sin))
    turned = rotate(keys.double()[..., : cos.shape[-1]], cos, sin, axis=3).float()
    return torch.cat((turned, keys[..., cos.shape[-1] :]), -1)


def code_hash() -> str:
    """SHA-256 over the source files of this package and of the passes: a changed program shares no cache entry."""
    import passes
    import pdconvert

    total = hashlib.sha256()
    for package in (pdconvert, passes):
        root = Path(package.__path__[0])
        for path in sorted(root.rglob("*.py")):
            total.update(f"{path.relative_to(root.parent)}\n".encode() + path.read_bytes())
    return total.hexdigest()


def step_to_json(step: Step) -> dict[str, Any]:
    """A ledger line as JSON; a bit-equal result has the SQNR null and `equal` true."""
    line = asdict(step)
    line["equal"] = math.isinf(step.previous_db) and step.previous_db > 0
    for name in ("original_db", "previous_db"):
        line[name] = getattr(step, name) if math.isfinite(getattr(step, name)) else str(getattr(step, name))
    return {**line, "passed": step.passed}


def step_from_json(line: Mapping[str, Any]) -> Step:
    """The reverse of `step_to_json`."""
    numbers = {name: float(line[name]) for name in ("original_db", "previous_db", "floor_db", "seconds")}
    return Step(line["block"], line["step"], **numbers)


def _save_flow(folder: Path, streams: Streams) -> None:
    values = {"reference": streams.reference, "stored": streams.stored, "windows": streams.windows}
    save_file({name: value.contiguous() for name, value in values.items()}, folder / "streams.safetensors")


def _save_underflows(folder: Path, tensors: Mapping[str, Tensor], stored: Mapping[str, Stored]) -> None:
    """Count what fp16 lost; weights on a grid have their SQNR instead."""
    counts = {}
    for name, value in stored.items():
        if isinstance(value, Tensor) and name in tensors:
            lost = (tensors[name].view(value.shape) != 0) & (value == 0)
            counts[name] = int(lost.sum())
    content = {name: count for name, count in counts.items() if count}
    (folder / "underflows.json").write_text(json.dumps(content))


def _save_steps(folder: Path, steps: Sequence[Step]) -> None:
    (folder / "steps.json").write_text(json.dumps([step_to_json(step) for step in steps]))
