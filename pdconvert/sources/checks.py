"""What a checkpoint must not be, found before any weight is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from pdconvert.errors import InputError
from pdconvert.sources.base import TensorInfo

FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
"""Stored types that hold weights as they are."""

_QUANTIZED_SUFFIXES = (
    ".qweight",
    ".qzeros",
    ".g_idx",
    ".scales",
    ".biases",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_packed",
    ".weight_zero_point",
    ".input_scale",
    ".absmax",
    ".SCB",
    ".quant_map",
)
"""Endings of the tensors that GPTQ, AWQ, fp8, compressed-tensors, bitsandbytes and MLX add to a weight."""

_QUANTIZED_PARTS = (".quant_state.",)
_ADAPTER_PARTS = (".lora_A.", ".lora_B.", ".lora_embedding_A", ".lora_embedding_B", ".lora_magnitude_vector")
_ADAPTER_PREFIX = "base_model.model."
_IGNORED_SUFFIX = ".rotary_emb.inv_freq"


def is_ignored(name: str) -> bool:
    """Whether a tensor is a buffer of older checkpoints that the config decides anyway."""
    return name.endswith(_IGNORED_SUFFIX)


def refuse_quantized_config(label: str, config: Mapping[str, Any]) -> None:
    """Refuse a config that announces quantized weights.

    Raises:
        InputError: `quantization_config` (GPTQ, AWQ, fp8, ...), `compression_config` or MLX's
            `quantization` is present.
    """
    if config.get("quantization"):
        _refuse_quantized(label, "MLX", "config.json has 'quantization'")
    for key in ("quantization_config", "compression_config"):
        block = config.get(key)
        if block:
            named = block.get("quant_method") if isinstance(block, Mapping) else None
            _refuse_quantized(label, named or "method not named", f"config.json has {key!r}")


def refuse_quantized_tensors(label: str, tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse tensors that only a quantized checkpoint has.

    Raises:
        InputError: a tensor of an 8- or 4-bit float type, of a whole-number type, or with the name of a
            scale or of packed values.
    """
    for name, info in tensors.items():
        if info.dtype.startswith("F8"):
            _refuse_quantized(label, "fp8", f"{name} is {info.dtype}")
        if name.endswith(_QUANTIZED_SUFFIXES) or any(part in name for part in _QUANTIZED_PARTS):
            _refuse_quantized(label, "by its tensors", f"it has {name}")
        if info.dtype not in FLOAT_DTYPES:
            _refuse_quantized(label, "by its tensors", f"{name} is {info.dtype}")


def refuse_adapter(label: str, names: Iterable[str]) -> None:
    """Refuse the weights of an adapter.

    Raises:
        InputError: a LoRA tensor, or a name below `base_model.model.`.
    """
    for name in names:
        if name.startswith(_ADAPTER_PREFIX) or any(part in f"{name}." for part in _ADAPTER_PARTS):
            raise InputError(
                f"{label}: holds an adapter (tensor {name}), not a whole model; "
                "merge it into its base (peft: merge_and_unload) and save that"
            )


def _refuse_quantized(label: str, method: str, evidence: str) -> NoReturn:
    raise InputError(
        f"{label}: the checkpoint is already quantized ({method}: {evidence}); "
        "give the original checkpoint in bf16, fp16 or fp32"
    )
