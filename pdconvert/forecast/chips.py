"""Published figures of Apple chips, each with its source. None was measured by this project.

Apple's operations per second of the Neural Engine mean what Apple counts (8-bit operations from A17 and M4 on), so
measured fp16 throughput is taken where somebody published it. A GPU's fp16 rate is its fp32 rate from M1 to M4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from pdconvert.errors import InputError
from pdconvert.lint.targets import CHIPS as LINT_CHIPS
from pdconvert.lint.targets import Fact

APPLE = "Apple, specifications"
ANEMLL = "Anemll-Bench, Results.MD: weights of one large matrix, through Core ML"
ANEFORGE = "arXiv 2606.22283 (ANEForge): measured by its own route, not Core ML"
MADERIX = "maderix, Inside the M4 Apple Neural Engine, part 2: measured by a private route"
MADERIX_M3 = "maderix/ANE, community_results.json: M3 Pro by a private route, the same engine"
ANEMLL_M5 = "Anemll, gist on 8-bit activations of March 2026: 18.0 TFLOP/s through Core ML"
NOMINAL = "Apple's operations per second, taken as fp16: an upper bound"
CLOCK = "shader cores and clock as listed by hmc-tech.com, 256 operations a core and cycle"

CALL_S = 0.00023
"""Least time of one call of the engine, measured on M1 (ANEForge); taken for every chip."""


@dataclass(frozen=True)
class ChipFigures:
    """What a prediction needs of a chip, in GB/s and TFLOP/s.

    Attributes:
        name: on the command line.
        generation: its name in `pdconvert lint --target`.
        memory: bandwidth of the memory, which the GPU can use whole.
        ane_memory: weights that the Neural Engine reads.
        ane: fp16 products of the Neural Engine.
        gpu: fp16 products of the largest GPU of this name.
    """

    name: str
    generation: str
    memory: Fact[float]
    ane_memory: Fact[float]
    ane: Fact[float]
    gpu: Fact[float]

    @property
    def expands_int8(self) -> bool:
        """Whether the Neural Engine expands 8-bit weights to fp16 before they cross memory."""
        found = next(chip for chip in LINT_CHIPS if chip.name == self.generation)
        return found.int8.value == "folds"


CHIPS: tuple[ChipFigures, ...] = (
    ChipFigures("m1", "m1", Fact(68, APPLE), Fact(60.9, ANEMLL), Fact(12.0, ANEFORGE), Fact(2.6, APPLE)),
    ChipFigures("m2", "m2", Fact(100, APPLE), Fact(60.5, ANEMLL), Fact(15.8, NOMINAL), Fact(3.6, APPLE)),
    ChipFigures("m3", "m3", Fact(100, APPLE), Fact(63.1, ANEMLL), Fact(16.8, MADERIX_M3), Fact(3.6, CLOCK)),
    ChipFigures(
        "m3-max", "m3", Fact(400, APPLE), Fact(120.2, ANEMLL), Fact(16.8, MADERIX_M3), Fact(14.3, CLOCK)
    ),
    ChipFigures("m4", "m4", Fact(120, APPLE), Fact(64.2, ANEMLL), Fact(19.0, MADERIX), Fact(3.8, CLOCK)),
    ChipFigures(
        "m4-max", "m4", Fact(546, APPLE), Fact(118.9, ANEMLL), Fact(19.0, MADERIX), Fact(17.2, CLOCK)
    ),
    ChipFigures(
        "m5",
        "m5",
        Fact(153, APPLE),
        Fact(70.2, ANEMLL),
        Fact(18.0, ANEMLL_M5),
        Fact(15.0, "Apple: over four times the M4's GPU compute; four times the figure of m4"),
    ),
)
"""Chips for which every figure is published, oldest first."""

CHIP_NAMES: tuple[str, ...] = tuple(chip.name for chip in CHIPS)


def chosen_chips(names: Sequence[str]) -> tuple[ChipFigures, ...]:
    """The chips of these names, in any case; all where none is named.

    Raises:
        InputError: a name is unknown.
    """
    wanted = {name.lower() for name in names}
    for name in sorted(wanted - set(CHIP_NAMES)):
        near = get_close_matches(name, CHIP_NAMES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"no chip {name!r}{hint} (known: {', '.join(CHIP_NAMES)})")
    return tuple(chip for chip in CHIPS if not wanted or chip.name in wanted)
