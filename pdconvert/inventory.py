"""Does the checkpoint hold exactly the tensors that its config promises? Asked before any weight is read."""

from __future__ import annotations

from types import ModuleType

import torch

from pdconvert.errors import InputError
from pdconvert.layer_tensors import expected_shapes
from pdconvert.model import ModelSpec
from pdconvert.sources.base import Source


def expected_tensors(family: ModuleType, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shapes by checkpoint name of everything that the model needs."""
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "model.norm.weight": (spec.hidden_size,),
    }
    if not spec.tied:
        expected["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    if spec.head_bias:
        expected["lm_head.bias"] = (spec.vocab_size,)
    for index in range(len(spec.layers)):
        expected |= expected_shapes(family, index, spec)
    return expected


def check_inventory(source: Source, family: ModuleType, spec: ModelSpec) -> list[str]:
    """Compare the checkpoint's tensors with the config, by name and shape.

    Returns:
        Notes on what was left out because it is provably redundant.

    Raises:
        InputError: a tensor is missing, left over or of another shape, or the tokenizer has more ids than
            the embedding has rows.
    """
    expected = expected_tensors(family, spec)
    found = dict(source.tensors())
    notes = _drop_tied_head(source, spec, found)
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing:
        near = [name for name in extra if any(want.endswith(name) or name.endswith(want) for want in missing)]
        hint = f"; {near[0]} is there under another name" if near else ""
        raise InputError(
            f"{source.label}: {_list(missing)} missing, as config.json describes the model{hint}"
        )
    if extra:
        raise InputError(
            f"{source.label}: {_list(extra)} left over; config.json does not account for it, so the result would "
            "differ from what the checkpoint computes"
        )
    for name, shape in expected.items():
        if tuple(found[name].shape) != shape:
            raise InputError(
                f"{source.label}: {name} has shape {tuple(found[name].shape)}, config.json asks for {shape}"
            )
    size = source.tokenizer_size()
    if size == 0:
        raise InputError(f"{source.label}: the tokenizer's vocabulary is empty; download its files again")
    if size is not None and size > spec.vocab_size:
        raise InputError(
            f"{source.label}: the tokenizer has {size} ids, the embedding {spec.vocab_size} rows; "
            "resize the embedding or use the tokenizer that belongs to the checkpoint"
        )
    return notes


def _drop_tied_head(source: Source, spec: ModelSpec, found: dict) -> list[str]:
    """A head tensor beside a tied embedding is redundant if equal, and a contradiction if not."""
    if not spec.tied or "lm_head.weight" not in found:
        return []
    embedding = source.read("model.embed_tokens.weight")
    if not torch.equal(source.read("lm_head.weight"), embedding):
        raise InputError(
            f"{source.label}: config.json says tie_word_embeddings, but lm_head.weight differs from "
            "model.embed_tokens.weight; set tie_word_embeddings to false to keep both"
        )
    del found["lm_head.weight"]
    return ["lm_head.weight equals the embedding it is tied to and was left out"]


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return f"tensor {shown} is" if len(names) == 1 else f"{len(names)} tensors ({shown}) are"
