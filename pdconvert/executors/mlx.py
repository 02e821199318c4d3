"""Runs a decode folder with MLX, in its own quantized products or with de-quantized weights.

MLX's CPU build multiplies with a reference BLAS: about 2.5 GFLOP/s in float32 on one core, quantized or
not, and 20 times slower in float16. For many rows (scoring a text) the weights are therefore
de-quantized, exactly, and multiplied by torch, and so is attention, which takes 1/40 of the time; all
else of the model, its caches included, stays MLX. Every replaced product is first compared with MLX's.
"""

from __future__ import annotations

import json
import logging
import resource
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pdconvert.errors import InputError

if TYPE_CHECKING:
    from pdconvert.runtime.clock import Clock
    from pdconvert.runtime.handoff import KeysValues

Products = Literal["quantized", "dequantized"]

KEEP_BYTES = 1 << 28
"""fp32 weights up to this size stay in memory; larger ones are de-quantized at each use."""

log = logging.getLogger(__name__)


class DecodeModel:
    """A loaded decode folder.

    Attributes:
        model: mlx-lm's model.
        dtype: MLX dtype of its activations and caches.
        device: "cpu" or "gpu".
        products: who multiplies: "quantized" (MLX) or "dequantized" (fp32 on the CPU).
        reason: why it runs there and in this dtype, in words.
    """

    def __init__(self, model: Any, dtype: Any, device: str, products: Products, reason: str):
        self.model = model
        self.dtype = dtype
        self.device = device
        self.products = products
        self.reason = reason

    @classmethod
    def load(
        cls, folder: Path, products: Products = "quantized", *, keep_bytes: int = KEEP_BYTES
    ) -> DecodeModel:
        """Loads a folder as stock mlx-lm does.

        Args:
            folder: a decode folder.
            products: "quantized" is what a user runs, and the faster one for a token at a time on a
                model whose fp32 weights exceed `keep_bytes`; "dequantized" is for verification and for
                many rows, and always runs on the CPU in float32.
            keep_bytes: with "dequantized", de-quantized weights that stay in memory if they are not larger.

        Raises:
            InputError: no such folder, or mlx-lm refuses it.
            CheckFailed: a replaced product differs from MLX's own.
        """
        from pdconvert.runtime.weights import DecodeWeights

        DecodeWeights(folder)
        import mlx.core as mx
        from mlx.utils import tree_flatten

        on_gpu = products == "quantized" and mx.default_device() == mx.gpu
        with mx.stream(mx.gpu if on_gpu else mx.cpu):
            model = _load_stock(folder)
            if products == "dequantized":
                from pdconvert.executors.mlx_products import replace_products

                replace_products(model, keep_bytes)
            if not on_gpu:
                model.set_dtype(mx.float32)
            mx.eval(model.parameters())
            parameters = (value for _, value in tree_flatten(model.parameters()))
            dtype = next(value.dtype for value in parameters if mx.issubdtype(value.dtype, mx.floating))
        if on_gpu:
            reason = "MLX has a GPU here"
        elif products == "dequantized":
            reason = "de-quantized weights run on the CPU in float32"
        else:
            reason = "MLX has no GPU here; on a CPU its float16 products are 20 times slower than float32"
        loaded = cls(model, dtype, "gpu" if on_gpu else "cpu", products, reason)
        log.debug("%s: %s", folder, loaded.describe())
        return loaded

    def describe(self) -> dict[str, str]:
        """Which executor runs, and why, for `run --json` and reports."""
        return {
            "executor": "mlx",
            "device": self.device,
            "dtype": str(self.dtype).removeprefix("mlx.core."),
            "products": self.products,
            "reason": self.reason,
        }

    def new_cache(
        self, kv: KeysValues | None = None, capacity: int = 0, clock: Clock | None = None
    ) -> list[Any]:
        """New caches, empty or with the keys and values of a prompt.

        Args:
            kv: what the prefill graph gave; the caches take copies.
            capacity: tokens that they shall hold without growing.
            clock: to which the phases `rotate_s` and `inject_s` are added.
        """
        from pdconvert.runtime.handoff import fill_caches

        return self._on_device(lambda: fill_caches(self.model, kv, self.dtype, capacity, clock))

    def logits(self, ids: Sequence[int], cache: list[Any]) -> np.ndarray:
        """Logits of new tokens after those in the caches, which take them up.

        Args:
            ids: n token ids, at least one.
            cache: from `new_cache`.

        Returns:
            (n, V) fp32.
        """
        return self._run(lambda: self._logits(ids, cache))

    def take_up(self, ids: Sequence[int], cache: list[Any]) -> None:
        """Put tokens into the caches whose logits nobody asks for: `logits` without the head.

        Args:
            ids: token ids; none are none.
            cache: from `new_cache`.
        """
        if ids:
            self._run(lambda: self._take_up(ids, cache))

    def _run(self, action: Callable[[], Any]) -> Any:
        if self.products == "quantized":
            return self._on_device(action)
        from pdconvert.executors.mlx_products import torch_attention

        with torch_attention(self.model):
            return self._on_device(action)

    def _take_up(self, ids: Sequence[int], cache: list[Any]) -> None:
        import mlx.core as mx

        body = getattr(self.model, "model", self.model)  # what comes before mlx-lm's head
        body(mx.array([list(ids)]), cache=cache)
        mx.eval([held.state for held in cache])

    def _logits(self, ids: Sequence[int], cache: list[Any]) -> np.ndarray:
        import mlx.core as mx

        return np.array(self.model(mx.array([list(ids)]), cache=cache)[0].astype(mx.float32))

    def _on_device(self, action: Callable[[], Any]) -> Any:
        import mlx.core as mx

        with mx.stream(mx.gpu if self.device == "gpu" else mx.cpu):
            return action()


def _load_stock(folder: Path) -> Any:
    """mlx-lm's model of a folder, its parameters not read yet."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        from mlx_lm.utils import load_model
    except ValueError as error:
        raise InputError(
            f"mlx-lm needs a limit of 4096 open files, and it is {limits[1]} here; "
            "raise it with `ulimit -Hn 4096`"
        ) from error
    finally:
        _restore_open_files(limits[0])
    try:
        with _path_without_wildcards(folder) as path:
            model, _ = load_model(path, lazy=True)
    except (ValueError, KeyError, TypeError, FileNotFoundError, json.JSONDecodeError) as error:
        raise InputError(f"{folder}: mlx-lm cannot load it: {textwrap.shorten(str(error), 300)}") from error
    return model


@contextmanager
def _path_without_wildcards(folder: Path) -> Iterator[Path]:
    """The folder itself, or a link to it: mlx-lm takes its path as a glob pattern, in which [x] means x."""
    if not set("*?[") & set(str(folder)):
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        link = Path(temporary) / "decode"
        link.symlink_to(folder.resolve(), target_is_directory=True)
        yield link


def _restore_open_files(soft: int) -> None:
    """Undo that importing mlx-lm lowers the process's limit of open files, as far as it can be undone."""
    now, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if soft == resource.RLIM_INFINITY or soft > hard >= 0 else soft
    if wanted != now:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
