"""Weights as mlx-lm's quantizers leave them, for `other_quantizers.py`.

The functions behind `mlx_lm.convert`, `mlx_lm.gptq`, `mlx_lm.awq` and `mlx_lm.dwq` run with the values that their
command lines default to, but on text that is at hand (the commands download theirs), and for the decoder's linears:
embedding and head are not taken from them. Scales and biases count and are used as fp16, in which a model is shipped.

MLX's CPU build computes in float32 here: in float16 its products are 20 times slower. Its quantized product runs at
about 1 GFLOP/s whatever BLAS there is. While a quantizer runs it is replaced by the plain product with the de-quantized
matrix, which is the same but for the order of its sums.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdconvert.errors import InputError

GROUP = 64
"""Input channels that share a scale and a bias: mlx-lm's default."""

SEED = 123
"""The seed that mlx-lm's commands default to."""

Sequences = Sequence[Sequence[int]]


def rounded(folder: Path, sequences: Sequences, bits: int = 4) -> Any:
    """`mlx_lm.convert --quantize --dtype float16`: rounding to nearest."""
    import mlx.core as mx
    from mlx_lm.utils import quantize_model

    model, config = _load(folder)
    model.set_dtype(mx.float16)
    quantize_model(model, config, GROUP, bits, quant_predicate=_in_decoder)
    return model


def gptq(folder: Path, sequences: Sequences) -> Any:
    """`mlx_lm.gptq`, all Hessians in one pass of the unquantized model."""
    import mlx.core as mx
    from mlx_lm.quant.gptq import gptq_quantize

    model, _ = _load(folder)
    gptq_quantize(model, mx.array(_needed(sequences)), 4, GROUP, fallback_bits=8, fallback_group_size=GROUP)
    return model


def awq(folder: Path, sequences: Sequences) -> Any:
    """`mlx_lm.awq`; what the layers see comes through the embedding in 8 bits, since it must be quantized."""
    import mlx.core as mx
    from mlx_lm.quant.awq import AWQ_MODEL_CONFIGS, awq_quantize

    model, config = _load(folder)
    if config["model_type"] not in AWQ_MODEL_CONFIGS:
        raise InputError(f"mlx_lm.awq knows no {config['model_type']} models")
    awq_quantize(
        model,
        mx.array(_needed(sequences)),
        AWQ_MODEL_CONFIGS[config["model_type"]],
        group_size=GROUP,
        bits=4,
        embed_group_size=GROUP,
        embed_bits=8,
    )
    return model


def dwq(folder: Path, sequences: Sequences, rate: float = 1e-6) -> Any:
    """`mlx_lm.dwq --batch-size 1`: scales, biases and norms learn from the unquantized model, one pass over the text.

    One sequence in 16 is kept for its validation.
    """
    import mlx.core as mx
    import mlx.optimizers as optimizers
    from mlx_lm.quant.dwq import dwq_quantize
    from mlx_lm.utils import quantize_model

    teacher, _ = _load(folder)
    student, config = _load(folder)
    quantize_model(student, config, GROUP, 4, quant_predicate=_in_decoder)
    for path, module in student.named_modules():
        if _is_table(path, module):
            module.freeze()
    data = [(list(ids), 0) for ids in _needed(sequences)]
    held = max(1, len(data) // 16)
    dwq_quantize(
        student,
        lambda batch, index, split: teacher(batch),
        optimizers.Adam(learning_rate=rate, bias_correction=True),
        data[held:],
        data[:held],
        batch_size=1,
        max_seq_length=max(map(len, sequences)),
        seed=SEED,
        dtype=mx.float32,
    )
    return student


def quantized(
    make: Callable[[Path, Sequences], Any], folder: Path, sequences: Sequences
) -> tuple[dict[str, Tensor], int]:
    """Run a quantizer of this module on a Hugging Face folder.

    Returns:
        All fp32 tensors but embedding and head by their names in the checkpoint (AWQ and DWQ change norms too), and
        the bits that its quantized matrices take.
    """
    import mlx.core as mx

    np.random.seed(SEED)
    mx.random.seed(SEED)
    with _plain_products():
        return _read(make(folder, sequences))


def _load(folder: Path) -> tuple[Any, dict[str, Any]]:
    """mlx-lm's model of a Hugging Face folder in float32, and its config."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, config = load_model(folder, lazy=True)
    model.set_dtype(mx.float32)
    return model, config


def _in_decoder(path: str, module: Any) -> bool:
    return ".layers." in path


def _is_table(path: str, module: Any) -> bool:
    """Whether it is the embedding or the head, which stay as they are."""
    import mlx.nn as nn

    return path.split(".")[-1] == "lm_head" or isinstance(module, nn.Embedding | nn.QuantizedEmbedding)


def _needed(sequences: Sequences) -> list[list[int]]:
    if not sequences:
        raise InputError("this quantizer needs text; give --calibration FILE")
    return [list(ids) for ids in sequences]


def _read(model: Any) -> tuple[dict[str, Tensor], int]:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    tensors, bits = {}, 0
    for path, module in model.named_modules():
        if module.children() or _is_table(path, module):
            continue
        found = dict(tree_flatten(module.parameters()))
        if "scales" in found:
            scales, biases = (found.pop(part).astype(mx.float16) for part in ("scales", "biases"))
            bits += 32 * found["weight"].size + 16 * (scales.size + biases.size)
            found["weight"] = mx.dequantize(
                found["weight"],
                scales.astype(mx.float32),
                biases.astype(mx.float32),
                group_size=module.group_size,
                bits=module.bits,
            )
        for name, value in found.items():
            tensors[f"{path}.{name}"] = torch.from_numpy(np.array(value.astype(mx.float32)))
    return tensors, bits


@contextmanager
def _plain_products() -> Iterator[None]:
    """`nn.QuantizedLinear` as x · Wᵀ with its de-quantized matrix."""
    import mlx.core as mx
    import mlx.nn as nn

    def product(self: Any, x: Any) -> Any:
        weight = mx.dequantize(
            self["weight"], self["scales"], self["biases"], group_size=self.group_size, bits=self.bits
        )
        y = x @ weight.T
        return y + self["bias"] if "bias" in self else y

    own = nn.QuantizedLinear.__call__
    nn.QuantizedLinear.__call__ = product
    try:
        yield
    finally:
        nn.QuantizedLinear.__call__ = own
