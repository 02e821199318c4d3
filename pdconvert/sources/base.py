"""What every source offers: a config, named tensors read one at a time, a tokenizer, hashes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pdconvert.errors import InputError

if TYPE_CHECKING:
    import torch

    from pdconvert.quant.grid import AffineLinear


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of the checkpoint, unread.

    Attributes:
        shape: as Hugging Face has it, output dimension first.
        dtype: as stored, such as `BF16` or `Q4_1`.
    """

    shape: tuple[int, ...]
    dtype: str


class Source(ABC):
    """A checkpoint, opened but unread.

    Attributes:
        label: names the source in errors, reports and the manifest.
        config: the content of `config.json`.
        generation_config: the content of `generation_config.json`; {} where there is none.
        license: `{"tag": the model card's licence or None, "files": names of licence files}`.
        random: whether the weights are seeded random numbers.
        has_tokenizer: whether `write_tokenizer` can write one.
        no_tokenizer: what to say and do where there is none.
        grids: stored types of matrices that MLX can hold as they are, in groups of 32 columns → bits; 16 for fp16.
    """

    label: str
    config: dict[str, Any]
    generation_config: dict[str, Any]
    license: dict[str, Any]
    random: bool = False
    has_tokenizer: bool = False
    no_tokenizer: str = "no tokenizer; add its files"
    grids: Mapping[str, int] = MappingProxyType({})

    @abstractmethod
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by its Hugging Face name, without reading values."""

    @abstractmethod
    def _read(self, name: str, info: TensorInfo) -> torch.Tensor:
        """A whole tensor in fp32."""

    @abstractmethod
    def _read_rows(self, name: str, info: TensorInfo, ids: Sequence[int]) -> torch.Tensor:
        """Rows of a tensor in fp32."""

    def read_grid(self, name: str) -> AffineLinear | torch.Tensor:
        """A matrix of one of `grids` on the grid that the checkpoint has, or in fp16 where it is stored so.

        Raises:
            InputError: MLX cannot hold it exactly.
        """
        raise NotImplementedError(f"{type(self).__name__} names no grids")

    @abstractmethod
    def hashes(self) -> dict[str, str]:
        """SHA-256 of everything that decides the result, by file name."""

    @abstractmethod
    def write_tokenizer(self, folder: Path) -> None:
        """Write tokenizer, chat template, generation config and licence files.

        Args:
            folder: an existing folder.

        Raises:
            InputError: the source has no tokenizer, or one that cannot be written.
        """

    @abstractmethod
    def tokenizer_size(self) -> int | None:
        """One more than the highest token id, added tokens included; None without a tokenizer."""

    def require_tokenizer(self) -> None:
        """Ask for a tokenizer before the work, since the decode folder cannot be written without.

        Raises:
            InputError: the source has none.
        """
        if not self.has_tokenizer:
            raise InputError(f"{self.label}: {self.no_tokenizer}")

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in fp32 on the CPU, every value finite.

        Raises:
            InputError: no such tensor, an unreadable file, or NaN or infinity among the values.
        """
        return self._finite(name, self._read(name, self._info(name)))

    def read_rows(self, name: str, ids: Sequence[int]) -> torch.Tensor:
        """Rows of a 2-D tensor, such as embeddings, without the rest of it.

        Args:
            name: the tensor.
            ids: row numbers, in any order, repeats allowed.

        Returns:
            (len(ids), columns) fp32.

        Raises:
            InputError: no such tensor, not 2-D, a row out of range, or a value that is not finite.
        """
        info = self._info(name)
        rows = [int(i) for i in ids]
        if len(info.shape) != 2:
            raise InputError(f"{self.label}: {name} has shape {info.shape}; expected two dimensions")
        outside = [i for i in rows if not 0 <= i < info.shape[0]]
        if outside:
            raise InputError(
                f"{self.label}: {name} has {info.shape[0]} rows, and row {outside[0]} was asked for"
            )
        return self._finite(name, self._read_rows(name, info, rows))

    def _info(self, name: str) -> TensorInfo:
        info = self.tensors().get(name)
        if info is None:
            raise InputError(f"{self.label}: the checkpoint has no tensor {name}")
        return info

    def _finite(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself.

        Raises:
            InputError: it holds NaN or infinity, whose number is told.
        """
        import numpy as np

        values = tensor.numpy()
        if values.size and not (np.isfinite(values.min()) and np.isfinite(values.max())):
            bad = values.size - int(np.isfinite(values).sum())
            raise InputError(
                f"{self.label}: {name} holds {bad} values that are NaN or infinite; the checkpoint is damaged"
            )
        return tensor
