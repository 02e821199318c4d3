"""`pdconvert init`: a commented recipe for a checkpoint, or the reason why there can be none."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from pdconvert import families
from pdconvert.errors import InputError
from pdconvert.inventory import expected_tensors
from pdconvert.model import ModelSpec
from pdconvert.prepare import make_plan
from pdconvert.process import is_plain_text
from pdconvert.recipe import SourceSpec, parse_source, recipe_from_data
from pdconvert.recipe.yaml_loader import parse_yaml
from pdconvert.sources import Source, open_source

CHUNK = 128
"""Tokens of one call: enough to keep the engine busy, few enough that padding costs little."""

PASTS = (512, 1024, 2048)
"""Lengths of the past for which a function is written by default."""

KEEP_FP16_BYTES = 600 * 10**6
"""Layers up to this size stay in fp16: small models lose most by quantization and gain least."""

PART_BYTES = 950 * 10**6
"""Apple names 1 GB a model on iOS; beyond it engines are reported to refuse or to leave work to the GPU."""


TEMPLATE = """\
# {name}: written by `pdconvert init`; docs/recipes.md describes every field.
version: 1
name: {name}
source: {source}
prefill:
  target: iOS18            # oldest system that loads the package; macOS 15 is the same
  outputs: kv              # keys and values; `logits` keeps the head, for decoding with the package
  embedding: host          # the table is in the decode half; `graph` puts it into the package too
  kv: {{rope: rotated}}      # ready for MLX's cache; `raw` blocks can be placed at any position
{split}  # The model has {positions} positions. A prompt that is longer than one call goes through in
  # several, on the keys and values of those before; all functions share one copy of the weights.
  functions:
{functions}
passes:                    # in this order; any can be taken out, and the build says what that costs
  - linear_to_conv2d       # projections as 1x1 convolutions
  - eager_gqa_attention    # grouped attention without repeated keys and values
  - safe_rms_norm:         # squares that fit fp16, where the measured ranges ask for it
      method: auto
  - rope_as_input          # cos and sin as inputs
{quantize}  - scale_residual:        # a residual stream that fits fp16, where it would not
      factor: auto
decode: {{grid: shared}}     # embedding and head: 8 bits where the layers are quantized, else 16
gates: {{}}                  # what the build must reach; the defaults are good ones
"""

SPLIT = f"""\
  split_model:             # packages beyond 1 GB are reported to leave the engine
    limit_mb: {PART_BYTES // 10**6}
"""

QUANTIZED = """\
  - quantize_weights:      # 8 bits, one scale per output channel; for 4 bits see docs/quantization.md
      scheme: w8a16
"""

NOT_QUANTIZED = """\
  # A model of this size stays in fp16; for 8 bits:
  # - quantize_weights: {scheme: w8a16}
"""


@dataclass(frozen=True)
class Starter:
    """A recipe to begin with.

    Attributes:
        name: of the recipe.
        text: its YAML, with comments.
        about: what was found, in a line.
        checked: whether the checkpoint's tensors were there to be compared with its config.
    """

    name: str
    text: str
    about: str
    checked: bool


def starter(text: str, folder: Path) -> Starter:
    """Look at a checkpoint and write a recipe for it.

    A model of the hub is looked at in the cache; where its weights are not there, its config is enough.

    Args:
        text: a folder, a `.gguf` file, a hub id, or `package:NAME`.
        folder: what a relative path is relative to.

    Raises:
        InputError: there is no such checkpoint, or it cannot be converted; the message says why.
    """
    try:
        spec = parse_source(text, folder)
    except InputError as error:
        raise InputError(str(error).replace("--source", "SRC", 1)) from error
    source, checked = _open(spec)
    family = families.get(source.config)
    model = family.read_config(source.config)
    weights = {name: math.prod(shape) for name, shape in expected_tensors(family, model).items()}
    layers = sum(count for name, count in weights.items() if ".layers." in name)
    recipe = _recipe(_name(spec, source), spec, model, layers)
    data = parse_yaml(recipe, "the recipe")
    make_plan(recipe_from_data(data, where="the recipe", folder=folder), source, complete=checked)
    about = (
        f"{source.label}: {model.model_type}, {len(model.layers)} layers, {sum(weights.values()) / 1e6:,.1f} M "
        f"weights, {model.max_positions:,} positions"
    )
    return Starter(data["name"], recipe, about, checked)


def _open(spec: SourceSpec) -> tuple[Source, bool]:
    """The source, and whether its tensors are there."""
    if spec.hub is None:
        return open_source(spec), True
    from pdconvert.sources.hub import open_cached

    cached = open_cached(spec.hub, spec.revision)
    return (cached, True) if cached is not None else (open_source(spec, weights=False), False)


def _name(spec: SourceSpec, source: Source) -> str:
    """A recipe name from what the checkpoint is called."""
    given = spec.hub or spec.gguf or spec.path or source.label.removeprefix("package:")
    stem = Path(given).name.removesuffix(".gguf")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._").lower() or "model"


def function_lines(positions: int) -> list[str]:
    """The recipe's functions for a context, as YAML."""
    chunk = CHUNK
    while chunk > 1 and 2 * chunk > positions:
        chunk //= 2
    pasts = [past for past in PASTS if past + chunk <= positions]
    if not pasts and positions >= 4 * chunk:
        pasts = [positions - chunk]
    return [f"{{tokens: {chunk}}}", *(f"{{tokens: {chunk}, past: {past}}}" for past in pasts)]


def _recipe(name: str, spec: SourceSpec, model: ModelSpec, layer_weights: int) -> str:
    """The recipe's text."""
    quantize = 2 * layer_weights > KEEP_FP16_BYTES
    package_bytes = layer_weights * (1 if quantize else 2)
    return TEMPLATE.format(
        name=name,
        source=_source(spec),
        positions=f"{model.max_positions:,}",
        split=SPLIT if package_bytes > PART_BYTES else "",
        functions="\n".join(f"    - {function}" for function in function_lines(model.max_positions)),
        quantize=QUANTIZED if quantize else NOT_QUANTIZED,
    )


def _source(spec: SourceSpec) -> str:
    """The source as YAML in one line; JSON strings are YAML."""
    given = spec.model_dump(exclude_none=True)
    pairs = (f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in given.items())
    return "{" + ", ".join(pairs) + "}"


def write_starter(found: Starter, out: Path, *, force: bool) -> None:
    """Write the recipe.

    Raises:
        InputError: the file is there already, or is no place for a file.
    """
    if not is_plain_text(out):
        raise InputError(f"--out {out!r}: holds a zero byte, or bytes that are not UTF-8")
    if out.exists() and not force:
        raise InputError(f"{out} is there already; give another --out, or --force")
    out.write_text(found.text, encoding="utf-8")
