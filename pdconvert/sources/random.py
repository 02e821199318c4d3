"""Seeded random weights with the names and shapes of a Hugging Face model."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdconvert import families
from pdconvert.errors import InputError
from pdconvert.sources.base import Source, TensorInfo
from pdconvert.sources.checks import refuse_quantized_config
from pdconvert.sources.files import write_json
from pdconvert.sources.tokenizer import BYTES_AND_SPECIALS, write_byte_tokenizer

if TYPE_CHECKING:
    import torch

_WEIGHT = (0.0, 0.02)
"""Mean and standard deviation of matrices and biases, as most families initialise them."""

_INTO_RESIDUAL = ("o_proj.weight", "down_proj.weight")
"""Matrices whose output is added to the residual stream."""

_EMBEDDING = (0.0, 1.0)
"""Mean and standard deviation of token embeddings."""

_GAIN = (1.0, 0.1)
"""Mean and standard deviation of norm gains; of the weights themselves where a family adds 1 to them, N(0, 0.1)."""

_CHUNK_ELEMENTS = 1 << 20
"""About how many values one seed gives: few enough to read single rows cheaply."""


class RandomSource(Source):
    """Random weights: embeddings N(0, 1), matrices and biases N(0, 0.02), norm gains N(1, 0.1).

    Matrices that write into the residual stream are divided by √(2 · layers), as GPT-2 initialises them
    (Radford et al. 2019). With that, and with unit embeddings, the stream keeps its token as a trained
    one does; without, a deep random model amplifies any error and its SQNR says nothing about a quantizer.

    Every run of rows has its own generator, seeded from (seed, tensor name, first row), so that the order
    of reading does not matter and rows can be read alone.

    Args:
        config: the content of a `config.json`.
        seed: of all tensors.

    Raises:
        InputError: transformers does not know the model type, or refuses the config.
    """

    random = True

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self.label = f"random:{config['model_type']}:{seed}"
        refuse_quantized_config(self.label, config)
        self.seed = seed
        self.config = copy.deepcopy(dict(config))
        self.license = {"tag": None, "files": []}
        self.generation_config = {}
        self._vocab_size = self._checked_vocab_size()
        self.has_tokenizer = self._vocab_size >= BYTES_AND_SPECIALS
        if self.has_tokenizer:
            self._set_special_ids()
        else:
            self.no_tokenizer = (
                f"vocab_size {self._vocab_size} is too small for a tokenizer of bytes; "
                f"give at least {BYTES_AND_SPECIALS}"
            )

    def tensors(self) -> dict[str, TensorInfo]:
        return self._shapes

    def hashes(self) -> dict[str, str]:
        content = json.dumps({"seed": self.seed, "config": self.config}, sort_keys=True)
        return {"random": hashlib.sha256(content.encode()).hexdigest()}

    def write_tokenizer(self, folder: Path) -> None:
        self.require_tokenizer()
        write_byte_tokenizer(
            folder, self._vocab_size, self.config["bos_token_id"], self.config["eos_token_id"]
        )
        write_json(folder / "generation_config.json", self.generation_config)

    def tokenizer_size(self) -> int | None:
        return self._vocab_size if self.has_tokenizer else None

    def _read(self, name: str, info: TensorInfo) -> torch.Tensor:
        import torch

        tensor = torch.empty(info.shape, dtype=torch.float32)
        rows = tensor.view(info.shape[0], -1)
        for first, last in _chunks(info.shape):
            self._draw(name, len(info.shape), first, rows[first:last])
        return tensor

    def _read_rows(self, name: str, info: TensorInfo, ids: Sequence[int]) -> torch.Tensor:
        import torch

        tensor = torch.empty((len(ids), info.shape[1]), dtype=torch.float32)
        for first, last in _chunks(info.shape):
            wanted = [(position, row - first) for position, row in enumerate(ids) if first <= row < last]
            if wanted:
                chunk = torch.empty((last - first, info.shape[1]), dtype=torch.float32)
                self._draw(name, 2, first, chunk)
                for position, row in wanted:
                    tensor[position] = chunk[row]
        return tensor

    def _draw(self, name: str, dimensions: int, first: int, rows: torch.Tensor) -> None:
        """Fill a run of rows, of which `first` is the number of the first one."""
        import torch

        digest = hashlib.sha256(f"{self.seed}/{name}/{first}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        mean, deviation = _EMBEDDING if "embed" in name else _WEIGHT
        if dimensions == 1 and name.endswith("weight"):
            mean, deviation = _GAIN[0] - self._gain_offset, _GAIN[1]
        rows.normal_(mean, deviation, generator=generator)
        if name.endswith(_INTO_RESIDUAL):
            rows.div_(math.sqrt(2 * self.config.get("num_hidden_layers", 1)))

    def _checked_vocab_size(self) -> int:
        size = self.config.get("vocab_size")
        if type(size) is not int or size < 1:
            raise InputError(f"{self.label}: config.vocab_size: {size!r}: expected a whole number above 0")
        return size

    def _set_special_ids(self) -> None:
        """Take the ids of `<s>` and `</s>` from the config; put them after the bytes by default."""
        for key, default in (("bos_token_id", 256), ("eos_token_id", 257)):
            value = self.config.setdefault(key, default)
            if type(value) is not int or not 0 <= value < self._vocab_size:
                raise InputError(
                    f"{self.label}: config.{key}: {value!r}: expected a token id below {self._vocab_size}"
                )
        bos, eos = self.config["bos_token_id"], self.config["eos_token_id"]
        if bos == eos:
            raise InputError(
                f"{self.label}: config.bos_token_id and eos_token_id are both {bos}; give two ids"
            )
        self.generation_config = {"bos_token_id": bos, "eos_token_id": eos}

    @cached_property
    def _gain_offset(self) -> float:
        """What the family adds to norm weights to make gains of them."""
        return families.get(self.config).read_config(self.config).gain_offset

    @cached_property
    def _shapes(self) -> dict[str, TensorInfo]:
        """Names and shapes of the Hugging Face class, built without memory for its weights."""
        import torch
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig, AutoModelForCausalLM

        model_type = self.config["model_type"]
        options = {key: value for key, value in self.config.items() if key not in ("model_type", "auto_map")}
        options.setdefault("pad_token_id", None)  # a class's own default may lie beyond a small vocabulary
        try:
            config = AutoConfig.for_model(model_type, **options)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        except (ValueError, KeyError, TypeError, StrictDataclassError) as error:
            reason = " ".join(str(error).split())[:300]
            raise InputError(f"{self.label}: transformers refuses this config: {reason}") from error
        tied = set(model._tied_weights_keys or {}) if config.tie_word_embeddings else set()
        return {
            name: TensorInfo(tuple(value.shape), "F32")
            for name, value in model.state_dict().items()
            if name not in tied
        }


def _chunks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Runs of rows (first, last) of about `_CHUNK_ELEMENTS` values."""
    rows = max(1, _CHUNK_ELEMENTS // max(1, math.prod(shape[1:])))
    for first in range(0, shape[0], rows):
        yield first, min(first + rows, shape[0])
