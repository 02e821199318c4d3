"""Weights as coremltools' compression leaves them, for `other_quantizers.py`.

A compressor of coremltools looks at the weights of a program and at nothing else. So each layer's matrices go into a
program of their own, as the fp16 constants that `coremltools.convert` makes of them; the compressed package is saved
and read by pdconvert's executor: the product of a compressed matrix with the identity is its de-quantized values.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdconvert.quiet import quiet_coremltools

TARGET = "iOS18"
"""The first with tables per group of channels and scales per block."""

Compress = Callable[[Any], Any]
"""An `MLModel` to an `MLModel`."""


def palettize(group: int, bits: int = 4) -> Compress:
    """`palettize_weights` by k-means: one table per `group` output channels, 0 for one per matrix."""

    def compress(model: Any) -> Any:
        import coremltools.optimize.coreml as cto

        extent = (
            {"granularity": "per_grouped_channel", "group_size": group}
            if group
            else {"granularity": "per_tensor"}
        )
        config = cto.OpPalettizerConfig(mode="kmeans", nbits=bits, weight_threshold=0, **extent)
        return cto.palettize_weights(model, cto.OptimizationConfig(global_config=config))

    return compress


def linear(bits: int, block: int = 0) -> Compress:
    """`linear_quantize_weights`, symmetric: a scale per output channel, or per `block` of its inputs."""

    def compress(model: Any) -> Any:
        import coremltools.optimize.coreml as cto

        extent = (
            {"granularity": "per_block", "block_size": block} if block else {"granularity": "per_channel"}
        )
        config = cto.OpLinearQuantizerConfig(
            mode="linear_symmetric", dtype=f"int{bits}", weight_threshold=0, **extent
        )
        return cto.linear_quantize_weights(model, cto.OptimizationConfig(global_config=config))

    return compress


def compressed(weights: Mapping[str, Tensor], compress: Compress) -> tuple[dict[str, Tensor], int]:
    """Matrices (O, I) as a compressor of coremltools leaves them.

    Returns:
        The de-quantized fp32 matrices by name, and the bits that the package stores for all of them.

    Raises:
        ValueError: the compressor left a matrix as it was.
    """
    ct = quiet_coremltools()
    from pdconvert.emit.coreml import write_package
    from pdconvert.executors.mil import MilSession
    from pdconvert.inspect_package import inspect_package

    with tempfile.TemporaryDirectory() as temporary:
        plain, small = Path(temporary) / "plain.mlpackage", Path(temporary) / "small.mlpackage"
        write_package(plain, _program(list(weights.values())), TARGET, {})
        compress(ct.models.MLModel(str(plain), skip_model_load=True)).save(str(small))
        groups = inspect_package(small)["functions"]["main"]["weights"]
        left = sum(group["tensors"] for group in groups if group["dtype"] == "fp16")
        if left:
            raise ValueError(f"{left} of {len(weights)} matrices are not compressed")
        session = MilSession(small)
        inputs = {
            name: torch.eye(info.shape[1]).half().view(info.shape)
            for name, info in session.function.inputs.items()
        }
        outputs = session.run(inputs)
    tensors = {
        name: outputs[f"y{index}"].view(value.shape) for index, (name, value) in enumerate(weights.items())
    }
    return tensors, 8 * sum(group["bytes"] for group in groups)


def _program(matrices: list[Tensor]) -> Any:
    """y0 = conv(W0, x), y1 = …, 1×1, with an input x (1, I, 1, I) for each width I."""
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import Function, Program, types

    widths = sorted({matrix.shape[1] for matrix in matrices})
    inputs = {f"x{width}": mb.placeholder(shape=(1, width, 1, width), dtype=types.fp16) for width in widths}
    program = Program()
    with Function(inputs, opset_version=getattr(ct.target, TARGET)) as function:
        outputs = [
            mb.conv(
                x=function.inputs[f"x{matrix.shape[1]}"],
                weight=matrix.half()[:, :, None, None].numpy(),
                name=f"y{index}",
            )
            for index, matrix in enumerate(matrices)
        ]
        function.set_outputs(outputs)
    program.add_function("main", function)
    return program
