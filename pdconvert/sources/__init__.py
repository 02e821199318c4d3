"""Sources: where weights, config and tokenizer come from. All are lazy: one tensor at a time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pdconvert.errors import InputError
from pdconvert.sources.base import Source, TensorInfo

if TYPE_CHECKING:
    from pdconvert.recipe.source import SourceSpec

__all__ = ["Source", "TensorInfo", "open_source"]


def open_source(spec: SourceSpec, *, weights: bool = True) -> Source:
    """Open a checkpoint by looking at its metadata; no weight is read.

    Args:
        spec: the source of a recipe.
        weights: whether a folder's or a hub model's weights must be there; without, its config is enough, and
            it has no tensors.

    Raises:
        InputError: the source is missing, unreadable, incomplete, damaged, or already quantized.
    """
    try:
        return _open(spec, weights)
    except OSError as error:
        raise InputError(
            f"{error.filename or spec.kind}: cannot be read: {error.strerror or error}"
        ) from error


def _open(spec: SourceSpec, weights: bool) -> Source:
    if spec.random is not None:
        from pdconvert.sources.random import RandomSource

        return RandomSource(spec.random.config, spec.random.seed)
    if spec.gguf is not None:
        from pdconvert.sources.gguf import GgufSource

        return GgufSource(Path(spec.gguf))
    if spec.package is not None:
        from pdconvert.sources.package import open_package

        return open_package(spec.package, spec.file)
    if spec.hub is not None:
        from pdconvert.sources.hub import open_hub

        return open_hub(spec.hub, spec.revision, weights=weights)
    from pdconvert.sources.hf_dir import HfDirSource

    return HfDirSource(Path(str(spec.path)), weights=weights)
