"""What calibrated quantization needs before the first block: text, and the bits of each linear under a budget."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache as cache_results
from pathlib import Path
from typing import TYPE_CHECKING

from pdconvert import calibrate, text
from pdconvert.cache import content_key
from pdconvert.compile import code_hash
from pdconvert.errors import InputError
from pdconvert.layer_tensors import block_shapes
from pdconvert.quant.store import save_block
from pdconvert.recipe.passes import calibrated, quantizer_of
from pdconvert.reference import Reference
from pdconvert.self_writing import write_sequences
from pdconvert.sources.files import sha256_file

if TYPE_CHECKING:
    from pdconvert.cache import Cache
    from pdconvert.compile import CompiledBlock, Compiler
    from pdconvert.prepare import Plan
    from pdconvert.runtime.tokenizer import Tokenizer


def calibration_tokens(
    plan: Plan,
    tokenizer: Tokenizer | None,
    cache: Cache,
    hashes: dict[str, str],
    device: str,
    track: Callable[[Iterable[int]], Iterable[int]] = lambda items: items,
) -> tuple[tuple[int, ...], ...]:
    """Token ids of the calibration text, longest sequence first; () where no pass looks at it.

    What the model wrote is kept.

    Args:
        track: wraps the loop over the tokens that the model writes, for a progress bar.
    """
    if not calibrated(plan.passes):
        return ()
    wanted, vocab = plan.recipe.calibration, plan.spec.vocab_size
    lengths = calibrate.sequence_lengths(wanted, plan.spec.max_positions)
    if plan.source.random or tokenizer is None:
        found = calibrate.random_sequences(vocab, lengths, wanted.seed)
    elif wanted.file is not None:
        path = Path(wanted.file)
        found = calibrate.read_sequences(path, tokenizer, lengths)
        calibrate.refuse_held_out(path, found, tokenizer.encode(text.held_out()[0]))
    else:
        reference = Reference(plan.source, plan.family, plan.spec)
        key = content_key(code_hash(), hashes, plan.source.config, lengths, wanted.seed, device)

        def write(folder: Path) -> None:
            ids = write_sequences(reference, lengths, wanted.seed, device, track)
            (folder / "sequences.json").write_text(json.dumps(ids))

        folder = cache.get(key) or cache.put(key, write)
        found = json.loads((folder / "sequences.json").read_text())
    return tuple(map(tuple, found))


def allocate_bits(
    plan: Plan,
    sequences: Sequence[Sequence[int]],
    cache: Cache,
    hashes: dict[str, str],
    device: str,
    track: Callable[[Iterator[int]], Iterator[int]] = lambda items: items,
) -> Plan:
    """Replace the budget of quantize_weights by bits for every linear; what was decided becomes a note.

    Raises:
        InputError: no choice of bits meets the budget.
    """
    from passes import QuantizeWeights
    from pdconvert.quant.allocation import Linear, allocate
    from pdconvert.sensitivity import measure_linears

    quantizer = next(
        (item for item in plan.passes if isinstance(item, QuantizeWeights) and item.budget), None
    )
    if quantizer is None:
        return plan
    plain = replace(quantizer, budget={})
    before = plan.shared_passes[: plan.shared_passes.index(quantizer)]
    key = content_key(code_hash(), hashes, plan.source.config, repr(before), repr(plain), sequences, device)

    def write(folder: Path) -> None:
        reference = Reference(plan.source, plan.family, plan.spec)
        found = measure_linears(reference, sequences, plain, before, plan.basis, device, track)
        (folder / "linears.json").write_text(json.dumps({name: vars(item) for name, item in found.items()}))

    folder = cache.get(key) or cache.put(key, write)
    linears = {
        name: Linear(**item) for name, item in json.loads((folder / "linears.json").read_text()).items()
    }
    shapes = {
        f"layers.{i}.{name}": shape
        for i in range(len(plan.spec.layers))
        for name, shape in block_shapes(plan.spec, i).items()
    }

    @cache_results
    def cost(name: str, width: int) -> float:
        rows, columns = shapes[f"{name}.weight"]
        form = replace(plain, bits={name: width})
        return form.blank(f"{name}.weight", (rows, columns), "meta").stored_bits

    chosen = allocate(linears, plain.widths, cost, **quantizer.budget)
    wanted = ", ".join(f"{name} {value:g}" for name, value in quantizer.budget.items())
    if chosen is None:
        raise InputError(f"recipe: quantize_weights.budget: no choice of {plain.widths} bits meets {wanted}")
    counts = ", ".join(f"{list(chosen.bits.values()).count(width)} at {width}" for width in plain.widths)
    note = (
        f"quantize_weights: budget {wanted}: {counts} bits, {chosen.bits_per_weight:.3f} bits per weight, "
        f"predicted KLD {chosen.predicted_kld:.3f}"
    )
    passes = tuple(
        replace(plain, bits=dict(chosen.bits)) if item is quantizer else item for item in plan.passes
    )
    return replace(plan, passes=passes, notes=(*plan.notes, note))


def learned_layers(
    compiler: Compiler,
    blocks: Sequence[CompiledBlock],
    cache: Cache,
    track: Callable[[Iterator[int]], Iterator[int]],
) -> Path:
    """A folder with the layers' stored tensors after learning, one file each, kept by what they are from."""
    from pdconvert.learn import learn

    quantizer = quantizer_of(compiler.passes)
    files = [sha256_file(block.folder / "tensors.safetensors") for block in blocks]
    folded = compiler.forms.folded_gains()
    key = content_key(
        code_hash(),
        compiler.source_hashes,
        files,
        repr(quantizer),
        compiler.calibration_ids,
        compiler.device,
        sorted(folded),
    )

    def write(folder: Path) -> None:
        embedding, *layers, head = blocks
        learned = learn(
            compiler.reference,
            embedding.tensors()["weight"],
            [block.tensors() for block in layers],
            head.tensors(),
            compiler.calibration_ids,
            steps=quantizer.learning_steps,
            rate=quantizer.learning_rate,
            folded=folded,
            device=compiler.device,
            track=track,
        )
        for block, tensors in zip(layers, learned, strict=True):
            save_block(folder / f"{block.name}.safetensors", tensors)

    return cache.get(key) or cache.put(key, write)
