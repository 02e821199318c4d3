"""A Hugging Face model id: the local cache first, then the network if it may be used."""

from __future__ import annotations

import sys
from pathlib import Path

from pdconvert.errors import InputError
from pdconvert.sources.files import MissingFile
from pdconvert.sources.hf_dir import HfDirSource

_COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model", "LICEN[SC]E*", "NOTICE*", "USE_POLICY*", "README.md")
"""What is downloaded beside the weights; no code among it."""


def open_hub(name: str, revision: str | None, *, weights: bool = True) -> HfDirSource:
    """Open a model of the hub.

    A snapshot in the cache is used if it is complete; otherwise it is downloaded, which continues an
    interrupted download. Code in the repository is neither downloaded nor run.

    Args:
        name: `org/name`.
        revision: branch, tag or commit; None is the main branch.
        weights: whether the weights are wanted; without, config and tokenizer are enough.

    Raises:
        InputError: offline without a complete copy in the cache, no such model, or no access to it; or
            anything that `HfDirSource` refuses.
    """
    problem = "it is not in the cache"
    snapshot = cached(name, revision)
    if snapshot is not None:
        try:
            return _opened(name, snapshot, weights)
        except MissingFile as error:
            problem = f"its copy is incomplete ({error})"
    for pattern in ("*.safetensors", "*.bin") if weights else ("config.json",):
        snapshot = _downloaded(name, revision, pattern, problem)
        try:
            return _opened(name, snapshot, weights)
        except MissingFile as error:
            problem = f"its copy is incomplete ({error})"
    raise InputError(f"hub:{name}: {problem}. {_advice(name)}")


def open_cached(name: str, revision: str | None) -> HfDirSource | None:
    """The model as the cache has it, or None where its copy is absent or incomplete; no network is used."""
    snapshot = cached(name, revision)
    if snapshot is None:
        return None
    try:
        return _opened(name, snapshot, weights=True)
    except MissingFile:
        return None


def _opened(name: str, snapshot: Path, weights: bool) -> HfDirSource:
    """The source of a snapshot; its folder is named after the commit."""
    return HfDirSource(snapshot, f"hub:{name}@{snapshot.name[:12]}", weights=weights)


def _advice(name: str) -> str:
    from huggingface_hub import constants

    return (
        f"Run `hf download {name}` where there is a network (the cache is {constants.HF_HUB_CACHE}), "
        "or give a folder with --source DIR"
    )


def cached(name: str, revision: str | None) -> Path | None:
    """The snapshot in the cache, complete or not."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, IncompleteSnapshotError, LocalEntryNotFoundError

    try:
        cache = constants.HF_HUB_CACHE
        return Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))
    except IncompleteSnapshotError as error:
        return Path(error.snapshot_path)
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise InputError(
            f"hub:{name}: not a hub id (org/name): {' '.join(str(error).split())[:160]}"
        ) from error


def _downloaded(name: str, revision: str | None, weights: str, problem: str) -> Path:
    """The snapshot after a download of one kind of weights and what belongs to them."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    patterns = [*_COMPANIONS, weights]
    try:
        return Path(
            snapshot_download(
                name, revision=revision, cache_dir=constants.HF_HUB_CACHE, allow_patterns=patterns
            )
        )
    except GatedRepoError as error:
        raise InputError(
            f"hub:{name}: access must be granted on its page first; then run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise InputError(
            f"hub:{name}: no such model, or it is private (`hf auth login`); check the id"
        ) from error
    except RevisionNotFoundError as error:
        raise InputError(f"hub:{name}: no revision {revision!r}; give a branch, tag or commit") from error
    except OSError as error:  # offline, unreachable, or a full disk; the hub's errors are kinds of OSError
        reason = " ".join(str(error).split())[:160]
        raise InputError(
            f"hub:{name}: {problem}, and the download failed ({reason}). {_advice(name)}"
        ) from error
