"""One `pytorch_model.bin` file, through torch's restricted unpickler.

`weights_only` allows tensors and plain containers and runs nothing else, so a file that carries code is
refused instead of executed.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdconvert.errors import InputError
from pdconvert.sources.base import TensorInfo
from pdconvert.sources.files import check_content

if TYPE_CHECKING:
    import torch

_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class BinFile:
    """A pickled state dict. Its values are mapped into memory while the object lives, not read.

    Args:
        path: the file.

    Raises:
        InputError: the file is missing, empty, a git-lfs pointer, truncated, of the format before torch
            1.6, holds anything but tensors, or would need code to be run.
    """

    def __init__(self, path: Path) -> None:
        check_content(path)
        self.path = path
        self._state = _load(path)

    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor in the order of the file."""
        return {name: TensorInfo(tuple(value.shape), _dtype(value)) for name, value in self._state.items()}

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor in fp32."""
        import torch

        return self._state[name].detach().to(torch.float32, copy=True).contiguous()

    def read_rows(self, name: str, ids: Sequence[int]) -> torch.Tensor:
        """Rows of a 2-D tensor: (len(ids), columns) fp32."""
        import torch

        return self._state[name].detach()[torch.tensor(ids, dtype=torch.long)].float()


def _dtype(tensor: torch.Tensor) -> str:
    """The stored type in the words of safetensors, so that one check serves both."""
    name = str(tensor.dtype).removeprefix("torch.")
    return _DTYPES.get(name, "F8" if name.startswith("float8") else name.upper())


def _load(path: Path) -> dict[str, torch.Tensor]:
    """The state dict of a file, mapped."""
    import torch

    if not zipfile.is_zipfile(path):
        raise InputError(
            f"{path}: truncated, or written by torch before 1.6; download it again, or save it as safetensors"
        )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path}: holds pickled code besides tensors, which was not run; "
            "ask its author for a safetensors file, or convert it on a machine that may run it"
        ) from error
    except (RuntimeError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{path}: damaged ({' '.join(str(error).split())[:120]}); download it again"
        ) from error
    if not isinstance(state, dict):
        raise InputError(f"{path}: expected a state dict, found {type(state).__name__}")
    for name, value in state.items():
        if not isinstance(name, str):
            raise InputError(
                f"{path}: a tensor is named {name!r}, not by a text; expected a plain state dict"
            )
        if not isinstance(value, torch.Tensor):
            raise InputError(
                f"{path}: {name} is {type(value).__name__}, not a tensor; expected a plain state dict"
            )
        if value.layout is not torch.strided:
            raise InputError(
                f"{path}: {name} is sparse ({value.layout}); save the checkpoint with dense tensors"
            )
    return state
