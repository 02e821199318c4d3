"""A GGUF file: tensors de-quantized one at a time, under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdconvert.errors import InputError
from pdconvert.model import is_gain
from pdconvert.sources.base import Source, TensorInfo
from pdconvert.sources.files import copy_files, write_json
from pdconvert.sources.gguf_config import architecture_of, build_config, build_generation_config
from pdconvert.sources.gguf_grid import GRIDS, affine
from pdconvert.sources.gguf_header import GgufTensor, read_header
from pdconvert.sources.gguf_tokenizer import check_tokenizer, save_tokenizer
from pdconvert.sources.pieces import Pieces

if TYPE_CHECKING:
    import numpy as np
    import torch

    from pdconvert.quant.grid import AffineLinear

_ROPE_DIVISORS = "rope_freqs.weight"
_IGNORED_PART = ".attn_rot_embd."
_CHUNK_ELEMENTS = 1 << 19
"""Values de-quantized at once: enough to keep numpy busy, few enough for the processor's cache."""

_OUTER_MODULES = ("model.embed_tokens", "model.norm", "lm_head")
_LAYER_MODULES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


class GgufSource(Source):
    """A GGUF file.

    Args:
        path: the file, or its pieces.
        label: names the source in errors; the path by default.
        licenses: licence files that belong to it.

    Raises:
        InputError: the file is missing, damaged or truncated, its architecture, a metadata key or a type
            is not supported, or a tensor has no Hugging Face name.
    """

    no_tokenizer = "no tokenizer in its metadata; take a file that carries one"
    grids = GRIDS

    def __init__(self, path: Path | Pieces, label: str | None = None, licenses: Sequence[Path] = ()) -> None:
        self.file = path if isinstance(path, Pieces) else Pieces((path,), path.name)
        self.label = label or str(self.file)
        header = read_header(self.file)
        self._metadata = header.metadata
        _check_types(self.label, header.tensors)
        self._arch_name, self._architecture = architecture_of(self.label, header.metadata)
        divisors = header.tensors.get(_ROPE_DIVISORS)
        values = self._dequantized(divisors, range(1)).flatten().tolist() if divisors else None
        self.config = build_config(self.label, header.metadata, header.tensors, values)
        self.generation_config = build_generation_config(header.metadata)
        self._licenses = list(licenses)
        self.license = {
            "tag": header.metadata.get("general.license"),
            "files": [license_path.name for license_path in self._licenses],
        }
        self.has_tokenizer = bool(header.metadata.get("tokenizer.ggml.tokens"))
        if self.has_tokenizer:
            check_tokenizer(self.label, header.metadata)
        self._stored = self._named(header.tensors)
        self._infos = {
            name: TensorInfo(tensor.shape, tensor.type_name) for name, tensor in self._stored.items()
        }

    def tensors(self) -> dict[str, TensorInfo]:
        return self._infos

    def hashes(self) -> dict[str, str]:
        return {self.file.name: self.file.sha256()}

    def write_tokenizer(self, folder: Path) -> None:
        self.require_tokenizer()
        with self.file.joined() as path:
            save_tokenizer(path, self._metadata, folder)
        write_json(folder / "generation_config.json", self.generation_config)
        copy_files(self._licenses, folder)

    def tokenizer_size(self) -> int | None:
        return len(self._metadata["tokenizer.ggml.tokens"]) if self.has_tokenizer else None

    def _read(self, name: str, info: TensorInfo) -> torch.Tensor:
        import numpy as np
        import torch

        tensor = self._stored[name]
        values = self._dequantized(tensor, range(tensor.rows))
        heads = self._interleaved_heads(name)
        if heads:
            values = values.reshape(heads, tensor.shape[0] // heads // 2, 2, -1).swapaxes(1, 2)
        if self._architecture.stored_gains and is_gain(name):
            values = values - 1
        return torch.from_numpy(np.ascontiguousarray(values.reshape(tensor.shape)))

    def _read_rows(self, name: str, info: TensorInfo, ids: Sequence[int]) -> torch.Tensor:
        import torch

        return torch.from_numpy(self._dequantized(self._stored[name], self._stored_rows(name, info, ids)))

    def _stored_rows(self, name: str, info: TensorInfo, ids: Sequence[int]) -> Sequence[int]:
        """Where rows of the Hugging Face tensor lie in the file."""
        heads = self._interleaved_heads(name)
        if not heads:
            return ids
        half = info.shape[0] // heads // 2
        return [row - row % (2 * half) + 2 * (row % half) + row % (2 * half) // half for row in ids]

    def read_grid(self, name: str) -> AffineLinear | torch.Tensor:
        import torch

        tensor, info = self._stored[name], self._info(name)
        value = self.read(name)
        if tensor.type_name == "F16":
            return value.half()
        ids = self._stored_rows(name, info, range(info.shape[0]))
        record = affine(b"".join(self._raw(tensor, ids)), tensor)
        if not torch.equal(record.dequantize(), value):
            raise InputError(
                f"{self.label}: {name}: fp16 does not hold the scales and biases that MLX needs for its "
                f"{tensor.type_name} blocks; set decode.grid to own"
            )
        return record

    def _interleaved_heads(self, name: str) -> int:
        """Heads of a tensor whose rows llama.cpp stores with RoPE pairs side by side; 0 for all others."""
        if not self._architecture.interleaved:
            return 0
        if ".self_attn.q_proj." in name:
            return int(self.config["num_attention_heads"])
        return int(self.config["num_key_value_heads"]) if ".self_attn.k_proj." in name else 0

    def _dequantized(self, tensor: GgufTensor, rows: Sequence[int]) -> np.ndarray:
        """Stored rows in fp32, as (len(rows), values per row); a vector is one row.

        All of it in numpy: its one thread is not slowed down by other work on the machine.
        """
        import numpy as np
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        width = tensor.shape[-1]
        result = np.empty((len(rows), width), dtype=np.float32)
        first = 0
        for raw in self._raw(tensor, rows):
            blocks = np.frombuffer(raw, dtype=np.uint8).reshape(1, -1)
            values = dequantize(blocks, GGMLQuantizationType[tensor.type_name]).reshape(-1, width)
            result[first : first + len(values)] = values
            first += len(values)
        return result

    def _raw(self, tensor: GgufTensor, rows: Sequence[int]) -> Iterator[bytearray]:
        """Stored rows as they are in the file, some at a time."""
        step = max(1, _CHUNK_ELEMENTS // tensor.shape[-1])
        with self.file.open() as file:
            for first in range(0, len(rows), step):
                raw = bytearray()
                for start, count in _runs(rows[first : first + step]):
                    file.seek(tensor.offset + start * tensor.row_bytes)
                    raw += file.read(count * tensor.row_bytes)
                if len(raw) != len(rows[first : first + step]) * tensor.row_bytes:
                    raise InputError(
                        f"{self.file}: the file became shorter while it was read; download it again"
                    )
                yield raw

    def _named(self, tensors: dict[str, GgufTensor]) -> dict[str, GgufTensor]:
        """The tensors by Hugging Face name, in the file's order."""
        modules = [*self._architecture.norms, *_LAYER_MODULES]
        names = _hugging_face_names(self._arch_name, self.config["num_hidden_layers"], modules)
        named = {}
        for gguf_name, tensor in tensors.items():
            if gguf_name == _ROPE_DIVISORS or _IGNORED_PART in gguf_name:
                continue
            module, dot, kind = gguf_name.rpartition(".")
            if module not in names or kind not in ("weight", "bias"):
                raise InputError(
                    f"{self.label}: tensor {gguf_name} is left over: {self._architecture.model_type} with "
                    f"{self.config['num_hidden_layers']} layers has no place for it"
                )
            named[names[module] + dot + kind] = tensor
        return named


def _hugging_face_names(arch_name: str, layers: int, layer_modules: Sequence[str]) -> dict[str, str]:
    """GGUF module name -> Hugging Face module name, by the table of the `gguf` package."""
    from gguf import get_tensor_name_map
    from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES

    arch = next(key for key, value in MODEL_ARCH_NAMES.items() if value == arch_name)
    assert isinstance(arch, MODEL_ARCH)
    table = get_tensor_name_map(arch, layers)
    modules = [
        *_OUTER_MODULES,
        *(f"model.layers.{i}.{name}" for i in range(layers) for name in layer_modules),
    ]
    found = ((table.get_name(module), module) for module in modules)
    return {gguf_name: module for gguf_name, module in found if gguf_name is not None}


def _check_types(label: str, tensors: dict[str, GgufTensor]) -> None:
    """Refuse types that the `gguf` package cannot de-quantize, by trying one block of each."""
    import numpy as np
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    first_of = {tensor.type_name: name for name, tensor in reversed(tensors.items())}
    for type_name, name in first_of.items():
        ggml_type = GGMLQuantizationType[type_name]
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[ggml_type][1]), dtype=np.uint8), ggml_type)
        except NotImplementedError as error:
            raise InputError(
                f"{label}: {name} has type {type_name}, which the gguf package cannot de-quantize; "
                "take another quantization of the model"
            ) from error


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Consecutive row numbers as (first, count), in order."""
    start = count = 0
    for row in rows:
        if count and row == start + count:
            count += 1
            continue
        if count:
            yield start, count
        start, count = row, 1
    if count:
        yield start, count
