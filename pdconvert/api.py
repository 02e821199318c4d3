"""The Python interface: `pdconvert.build` and `pdconvert.load`. Importing it is cheap, calling it is not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pdconvert.errors import InputError

if TYPE_CHECKING:
    from pdconvert.forecast.plan import Forecast
    from pdconvert.pipeline import BuildResult
    from pdconvert.progress import Progress
    from pdconvert.recipe import Recipe
    from pdconvert.runtime.run import Pair

DEFAULT_FOLDER = Path("build")
"""Where builds go that were given no place."""


def build(
    recipe: str | os.PathLike[str] | Recipe,
    out: str | os.PathLike[str] | None = None,
    *,
    source: str | None = None,
    overrides: Sequence[str] = (),
    force: bool = False,
    use_cache: bool = True,
    progress: Progress | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
) -> BuildResult:
    """Compile a recipe, verify what was written by running it, and report: `pdconvert build`.

    Args:
        recipe: the name of a shipped recipe, a recipe file, or a loaded recipe.
        out: the build folder; `build/<recipe name>` by default.
        source: replaces the recipe's source: a folder, a `.gguf` file, a hub id, or `package:NAME`.
        overrides: `a.b=value`, one scalar of the recipe each, such as `prefill.kv.rope=raw`.
        force: replace an earlier build in the output folder.
        use_cache: reuse and keep work of other builds.
        progress: shows the stages; silent by default.
        device: where calibrated quantization computes.

    Returns:
        Path, verdict ("pass" or "fail") and summary. A failed check is a verdict, not an exception.

    Raises:
        InputError: the recipe or the checkpoint cannot be built, or the folder not be written; nothing is
            left behind. Or `device` is "cuda" and torch sees none.
        ValueError: `source` or `overrides` with a recipe that is loaded already.
    """
    from pdconvert.process import check_output

    recipe = _loaded(recipe, source, overrides)
    folder = DEFAULT_FOLDER / recipe.name if out is None else Path(out)
    check_output(folder, force=force)  # before the seconds that the import below takes

    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise InputError(
                "device cuda: torch sees no CUDA device here; leave it out, or install torch for CUDA"
            )
    from pdconvert.pipeline import build as compile_pair

    return compile_pair(recipe, folder, force=force, use_cache=use_cache, progress=progress, device=device)


def plan(
    recipe: str | os.PathLike[str] | Recipe,
    *,
    source: str | None = None,
    overrides: Sequence[str] = (),
    chips: Sequence[str] = (),
) -> Forecast:
    """Compute what a build would take and give, without reading weights: `pdconvert plan`.

    Args:
        recipe, source, overrides: as of `build`.
        chips: names of chips to predict times for; all known ones by default.

    Returns:
        Sizes of both halves, peak memory of the build, work of each function, and predicted times.

    Raises:
        InputError: the recipe, or the model's config, cannot be built, or a chip is unknown.
        ValueError: as of `build`.
    """
    from pdconvert.forecast.chips import chosen_chips

    chosen = chosen_chips(chips)
    loaded = _loaded(recipe, source, overrides)
    from pdconvert.forecast.plan import forecast

    return forecast(loaded, chosen)


def load(
    build: str | os.PathLike[str],
    *,
    executor: Literal["auto", "mil", "coreml"] = "auto",
    mode: Literal["fp32", "fp16"] = "fp32",
    compute_units: Literal["all", "cpu_and_ne", "cpu_and_gpu", "cpu_only"] = "cpu_and_ne",
    decode: Literal["mlx", "package"] = "mlx",
    prefix_cache: str | os.PathLike[str] | None = None,
    prefix_cache_bytes: int | None = None,
) -> Pair:
    """Load both halves of a build; `.generate(prompt)` continues a prompt, `.prefill(ids)` gives its K and V.

    Args:
        build: a build folder; one with the verdict "fail" is loaded too.
        executor: what runs the package: Core ML (macOS only), or the MIL executor.
        mode: arithmetic of the MIL executor.
        compute_units: where Core ML may run the package.
        decode: what decodes: the MLX weights, or one-token functions of the package.
        prefix_cache: a folder that keeps prefilled blocks between prompts.
        prefix_cache_bytes: what that folder may take; 4 GB by default.

    Raises:
        InputError: not a build, a part of it is missing or damaged, or its package cannot decode.
    """
    from pdconvert.runtime.prefix_cache import DEFAULT_DISK_BYTES
    from pdconvert.runtime.run import PackageOptions, Pair, disk_stores

    limit = DEFAULT_DISK_BYTES if prefix_cache_bytes is None else prefix_cache_bytes
    return Pair.open(
        Path(build),
        PackageOptions(executor, mode, compute_units),
        decode=decode,
        stores=disk_stores(None if prefix_cache is None else Path(prefix_cache), limit),
    )


def _loaded(recipe: str | os.PathLike[str] | Recipe, source: str | None, overrides: Sequence[str]) -> Recipe:
    """The recipe itself, or what its name or file holds."""
    from pdconvert.recipe import Recipe, load_recipe

    if not isinstance(recipe, Recipe):
        return load_recipe(os.fspath(recipe), source=source, overrides=overrides)
    if source is not None or overrides:
        raise ValueError("source and overrides change a recipe when it is loaded; give them to load_recipe")
    return recipe
