"""Write docs/families.md: what every family has, how exactly it is computed, and what is refused."""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "families")]

from drawing import Measured, draw_config, measure, refusal  # noqa: E402

from pdconvert import families  # noqa: E402
from pdconvert.model import ModelSpec  # noqa: E402

TARGET = ROOT / "docs" / "families.md"
CASES = 40
HEADER = """# Model families

Written by `scripts/families_table.py`; [adding_a_family.md](adding_a_family.md) says how to add one.

For each family {cases} configs that it does not refuse were drawn with a seeded generator over everything that it
knows (heads, KV heads down to 1, head sizes, biases, RoPE kinds, multipliers, layer patterns, …), with random weights;
figures are the worst case, rounded down. *Plain*: the family's blocks against Hugging Face's own modules in fp32.
*Adapted*: the same after all passes, in fp32, with rotated or raw keys. *MLX*: logits of stock mlx-lm on the decode
config, in float32, against Hugging Face. What fp16 and quantized weights cost is measured in every build.

| family | what it is | features | plain, dB | adapted, dB | MLX logits, dB |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Row:
    """One family's line, and what it refused: message with its numbers replaced → number of draws."""

    line: str
    refused: dict[str, int]


def accepts(family: ModuleType, key: str, value: object) -> bool:
    """Whether the family takes a value that its tiny config does not have."""
    return key in family.KNOWN and refusal(family, {**family.TINY, key: value}) is None


def features(family: ModuleType, spec: ModelSpec) -> list[str]:
    """What a family has beyond pre-norm attention with grouped heads and a gated MLP."""
    layer, known = spec.layers[0], family.KNOWN
    fused = len(set(family.layer_tensors(0, spec).values())) < len(family.layer_tensors(0, spec))
    found = {
        "free head_dim": accepts(family, "head_dim", 2),
        "q/k/v biases": layer.attention_bias and "attention_bias" not in known,
        "biases by config": accepts(family, "attention_bias", True),
        "MLP biases by config": accepts(family, "mlp_bias", True),
        "q/k norm per head": layer.qk_norm == "head",
        "q/k norm over the projection": layer.qk_norm == "projection",
        "post-norms": layer.norms == "behind",
        "norms on both sides": layer.norms == "both",
        "multipliers": "residual_multiplier" in known,
        "layers without RoPE": bool(spec.unrotated_layers),
        "partial rotation": spec.rope.dims < spec.head_dim,
        "window layers": bool(spec.window),
        "a RoPE of their own in window layers": spec.local_rope is not None,
        "capped scores and logits": layer.score_cap is not None,
        "fused qkv and gate-up": fused,
    }
    return [name for name, there in found.items() if there]


def measure_family(name: str) -> Row:
    """Draw until enough cases were accepted; measure those and count the others."""
    family = families.get({"model_type": name})
    draw, refused = random.Random(f"families/{name}"), Counter[str]()
    worst: Measured | None = None
    accepted = 0
    while accepted < CASES:
        config = draw_config(family, draw.choice)
        reason = refusal(family, config)
        if reason is not None:
            refused[re.sub(r"(?<!\w)\d+(\.\d+)?\b", "N", reason.removeprefix("config.json: "))] += 1
            continue
        accepted += 1
        found = measure(config, draw.choice)
        worst = found if worst is None else worst.worst(found)
    assert worst is not None
    about = (family.__doc__ or "").partition(":")[2].partition(";")[0].strip().rstrip(".")
    figures = [int(value) for value in vars(worst).values()]
    has = ", ".join(features(family, family.read_config(family.TINY))) or "–"
    return Row(f"| `{name}` | {about} | {has} | {' | '.join(map(str, figures))} |", dict(refused))


def document() -> str:
    """The whole page."""
    rows = {name: measure_family(name) for name in families.names()}
    parts = [HEADER.format(cases=CASES), "\n".join(row.line for row in rows.values())]
    parts.append(
        "\n\nEvery family decodes with stock mlx-lm.\n\n## Refused within a family\n\n"
        "Found by the same draws; N stands for a number. Unknown keys and unknown RoPE kinds are refused in every "
        "family. A window counts where it is shorter than the context.\n"
    )
    for name, row in rows.items():
        if row.refused:
            parts.append(f"\n- `{name}`")
            parts += [f"\n  - {reason}" for reason in sorted(row.refused)]
    parts.append("\n\n## Refused architectures\n\n| model types | why |\n|---|---|\n")
    by_reason: dict[str, list[str]] = {}
    for name, reason in families.UNSUPPORTED.items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    parts += [f"| {', '.join(sorted(names))} | {reason} |\n" for reason, names in by_reason.items()]
    return "".join(parts)


def main() -> int:
    """Write the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    TARGET.write_text(document(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
