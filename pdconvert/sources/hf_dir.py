"""A Hugging Face checkpoint folder: `config.json`, safetensors or `.bin` weights, tokenizer files.

Which weights count, in this order: `model.safetensors` or its index, then `pytorch_model.bin` or its
index. A single file together with an index that names other files is refused: one of the two is stale.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pdconvert.errors import InputError
from pdconvert.sources.base import Source, TensorInfo
from pdconvert.sources.bin_file import BinFile
from pdconvert.sources.checks import (
    is_ignored,
    refuse_adapter,
    refuse_quantized_config,
    refuse_quantized_tensors,
)
from pdconvert.sources.files import (
    TOKENIZER_FILES,
    MissingFile,
    check_content,
    copy_files,
    license_files,
    license_tag,
    read_json,
    sha256_file,
)
from pdconvert.sources.safetensors_file import SafetensorsFile
from pdconvert.sources.tokenizer import highest_id

if TYPE_CHECKING:
    import torch

_LAYOUTS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_BASE_EMBEDDING = "embed_tokens.weight"
_PREFIX = "model."


class _WeightFile(Protocol):
    """What `SafetensorsFile` and `BinFile` have in common."""

    path: Path

    def tensors(self) -> dict[str, TensorInfo]: ...
    def read(self, name: str) -> torch.Tensor: ...
    def read_rows(self, name: str, ids: Sequence[int]) -> torch.Tensor: ...


class HfDirSource(Source):
    """A checkpoint folder; nothing is ever written into it.

    Args:
        folder: the folder.
        label: names the source in errors; the folder's path by default.
        weights: whether the weights must be there; without, none are looked at and there are no tensors.

    Raises:
        InputError: the folder, its config or its weights are missing, incomplete, damaged, already
            quantized, or an adapter's.
    """

    no_tokenizer = "no tokenizer (tokenizer.json or tokenizer.model); add its files"

    def __init__(self, folder: Path, label: str | None = None, *, weights: bool = True) -> None:
        if not folder.is_dir():
            missing = "not a folder" if folder.exists() else "no such folder"
            raise InputError(
                f"{folder}: {missing}; --source takes a checkpoint folder, a .gguf file or a hub id"
            )
        self.folder = folder
        self.label = label or str(folder)
        self.config = self._read_config()
        self._refuse_adapter_files()
        self._open: _WeightFile | None = None
        self._files, self._weight_map = self._find_weights() if weights else ([], None)
        self._table = self._checked_table()
        self._infos = {name: info for name, (_, _, info) in self._table.items()}
        generation = folder / "generation_config.json"
        self.generation_config = read_json(generation) if _is_there(generation) else {}
        self._licenses = license_files(folder)
        self.license = {
            "tag": license_tag(folder / "README.md"),
            "files": [path.name for path in self._licenses],
        }
        self._tokenizer_files = [folder / name for name in TOKENIZER_FILES if _is_there(folder / name)]
        names = {path.name for path in self._tokenizer_files}
        self.has_tokenizer = (
            bool(names & {"tokenizer.json", "tokenizer.model"}) or {"vocab.json", "merges.txt"} <= names
        )

    def tensors(self) -> dict[str, TensorInfo]:
        return self._infos

    def hashes(self) -> dict[str, str]:
        extra = [self.folder / name for name in ("config.json", "generation_config.json")]
        paths = [*self._files, *(path for path in extra if path.exists()), *self._tokenizer_files]
        return {path.name: sha256_file(path) for path in paths}

    def write_tokenizer(self, folder: Path) -> None:
        self.require_tokenizer()
        for path in self._tokenizer_files:
            check_content(path)
        generation = self.folder / "generation_config.json"
        copy_files(
            [*self._tokenizer_files, *([generation] if generation.exists() else []), *self._licenses], folder
        )
        templates = sorted(self.folder.glob("additional_chat_templates/*.jinja"))
        if templates:
            (folder / "additional_chat_templates").mkdir(exist_ok=True)
            copy_files(templates, folder / "additional_chat_templates")

    def tokenizer_size(self) -> int | None:
        return highest_id(self.folder) + 1 if self.has_tokenizer else None

    def _read(self, name: str, info: TensorInfo) -> torch.Tensor:
        path, stored, _ = self._table[name]
        return self._file(path).read(stored)

    def _read_rows(self, name: str, info: TensorInfo, ids: Sequence[int]) -> torch.Tensor:
        path, stored, _ = self._table[name]
        return self._file(path).read_rows(stored, ids)

    def _file(self, path: Path) -> _WeightFile:
        """A weight file; the last one stays open, since layers are read in order."""
        if self._open is None or self._open.path != path:
            self._open = BinFile(path) if path.suffix == ".bin" else SafetensorsFile(path)
        return self._open

    def _read_config(self) -> dict[str, Any]:
        path = self.folder / "config.json"
        if not _is_there(path):
            raise MissingFile(f"{self.folder}: no config.json{self._instead()}")
        config = read_json(path)
        if not isinstance(config.get("model_type"), str):
            raise InputError(f"{path}: no model_type; expected the config of a causal LM")
        refuse_quantized_config(self.label, config)
        return config

    def _refuse_adapter_files(self) -> None:
        """Refuse a folder with an adapter beside the model: compiling the model alone would drop it in silence."""
        for name in ADAPTER_FILES:
            if (self.folder / name).exists():
                raise InputError(
                    f"{self.folder}: holds an adapter ({name}) beside the model; merge the two (peft: "
                    "merge_and_unload) and save that, or remove the adapter's files to compile the model alone"
                )

    def _find_weights(self) -> tuple[list[Path], dict[str, str] | None]:
        """The weight files, and the index's map from tensor to file name if there is an index."""
        for single_name, index_name in _LAYOUTS:
            single, index = self.folder / single_name, self.folder / index_name
            if _is_there(index):
                return self._indexed(single, index)
            if single.exists() or single.is_symlink():
                check_content(single)
                return [single], None
        raise MissingFile(
            f"{self.folder}: no weights (model.safetensors or pytorch_model.bin){self._instead()}"
        )

    def _indexed(self, single: Path, index: Path) -> tuple[list[Path], dict[str, str]]:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InputError(f"{index}: no weight_map; expected tensor names and their files")
        for tensor, name in weight_map.items():
            if not isinstance(name, str) or Path(name).name != name or name in ("", "..") or "\\" in name:
                raise InputError(f"{index}: {tensor}: {name!r} is not the name of a file in this folder")
        names = sorted(set(weight_map.values()))
        if single.exists() and single.name not in names:
            raise InputError(
                f"{self.folder}: holds {single.name} and also {index.name}, which names other files "
                f"({names[0]}, ...); one of them is stale: remove it"
            )
        for name in names:
            if not (self.folder / name).exists():
                lost = [tensor for tensor, file in weight_map.items() if file == name]
                raise MissingFile(
                    f"{self.folder}: {name} is missing; {index.name} puts {len(lost)} tensors there "
                    f"({lost[0]}{', ...' if len(lost) > 1 else ''}); download it, or remove the stale index"
                )
            check_content(self.folder / name)
        return [self.folder / name for name in names], weight_map

    def _checked_table(self) -> dict[str, tuple[Path, str, TensorInfo]]:
        """Hugging Face name -> (file, name in the file, info), checked."""
        stored: dict[str, tuple[Path, TensorInfo]] = {}
        for path in self._files:
            for name, info in self._file(path).tensors().items():
                if is_ignored(name):
                    continue
                self._check_place(name, path)
                stored[name] = (path, info)
        for name, file in (self._weight_map or {}).items():
            if name not in stored and not is_ignored(name):
                raise InputError(f"{self.folder}: the index puts {name} into {file}, which does not hold it")
        refuse_adapter(self.label, stored)
        refuse_quantized_tensors(self.label, {name: info for name, (_, info) in stored.items()})
        prefix = _PREFIX if _BASE_EMBEDDING in stored and _PREFIX + _BASE_EMBEDDING not in stored else ""
        return {
            name if name.startswith("lm_head.") else prefix + name: (path, name, info)
            for name, (path, info) in stored.items()
        }

    def _check_place(self, name: str, path: Path) -> None:
        """Refuse a tensor in a shard to which the index does not map it."""
        if self._weight_map is None or self._weight_map.get(name) == path.name:
            return
        told = self._weight_map.get(name)
        place = f"puts it into {told}" if told else "does not name it"
        raise InputError(
            f"{path}: holds {name}, but the index {place}; shards and index do not belong together"
        )

    def _instead(self) -> str:
        """A hint from what the folder holds instead of a checkpoint."""
        names = sorted(path.name for path in self.folder.iterdir())
        ggufs = [name for name in names if name.lower().endswith(".gguf")]
        if ggufs:
            return f"; it holds {ggufs[0]}: give --source {self.folder / ggufs[0]}"
        if {"prefill.mlpackage", "Manifest.json"} & set(names):
            return "; it holds what pdconvert writes: give the checkpoint that it was made from"
        if "adapter_config.json" in names:
            return "; it holds an adapter: merge it into its base (peft: merge_and_unload) and save that"
        if any(name.startswith("consolidated.") for name in names):
            return "; it holds the original consolidated form: take the Hugging Face form of the model"
        weights = [name for name in names if name.endswith((".safetensors", ".bin", ".incomplete"))]
        if weights:
            return f"; it holds {', '.join(weights[:3])}, but no index: the download is incomplete"
        return "; download the whole checkpoint"


def _is_there(path: Path) -> bool:
    """Whether a file that a checkpoint may leave out is there.

    Raises:
        MissingFile: it is a link to a file that is gone, as an interrupted download leaves it.
    """
    if path.is_symlink() and not path.exists():
        check_content(path)
    return path.exists()
