"""Whether quantization fitted its calibration text rather than the model: the same loss on both kinds of text."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pdconvert import schema
from pdconvert.errors import InputError
from pdconvert.measure import mean_and_error

WINDOWS = Path("report") / "calibration.json"
"""Where a build keeps the windows of calibration text that it measured on."""

ALARM_RATIO = 1.5
"""How much larger the loss on held-out text may be; docs/quantization.md has the reason."""

LEAST_KLD = 0.01
"""Held-out loss, nats, below which nothing is said: what 8 bits may cost."""


@dataclass(frozen=True)
class Fit:
    """Mean KLD of MLX alone against the reference, with standard errors, nats.

    Attributes:
        calibration, calibration_error: on windows of the calibration text.
        held_out, held_out_error: on those of the held-out text, which no pass has seen.
    """

    calibration: float
    calibration_error: float
    held_out: float
    held_out_error: float

    @classmethod
    def of(cls, calibration: Tensor, held_out: Tensor) -> Fit:
        """From KLD of both, (windows, positions) each."""
        return cls(*mean_and_error(calibration), *mean_and_error(held_out))

    @property
    def ratio(self) -> float:
        """Held-out loss over that on the calibration text."""
        return self.held_out / self.calibration if self.calibration else math.inf

    @property
    def alarm(self) -> str | None:
        """What is wrong and what to do about it; None where the two agree."""
        if self.held_out < LEAST_KLD or self.ratio <= ALARM_RATIO:
            return None
        return (
            f"KLD {self.calibration:.3f} on the calibration text, {self.held_out:.3f} on held-out text: quantization "
            "fitted its text; give more of it (calibration.tokens, or calibration.file)"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "calibration_kld": self.calibration,
            "calibration_error": self.calibration_error,
            "held_out_kld": self.held_out,
            "held_out_error": self.held_out_error,
            "ratio": self.ratio,
            "alarm": self.alarm,
        }


def windows_of_calibration(sequences: Sequence[Sequence[int]], count: int, width: int) -> list[list[int]]:
    """Up to `count` windows of `width` tokens, the beginnings of sequences; short sequences are joined."""
    found: list[list[int]] = []
    joined: list[int] = []
    for ids in sequences:
        joined += ids
        if len(joined) >= width:
            found.append(joined[:width])
            joined = []
    step = max(1, len(found) // max(1, count))
    return found[::step][:count]


def write_calibration_windows(build: Path, windows: Sequence[Sequence[int]]) -> None:
    """Keep token ids for `pdconvert eval`."""
    path = build / WINDOWS
    path.parent.mkdir(exist_ok=True)
    content = {"schema": schema.SCHEMA, "windows": [list(ids) for ids in windows]}
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")


def read_calibration_windows(build: Path) -> list[list[int]]:
    """The token ids that a build kept; none where nothing was calibrated.

    Raises:
        InputError: the file is not what was written.
    """
    path = build / WINDOWS
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text("utf-8"))
        schema.check_schema(content, path)
        return [[int(token) for token in ids] for ids in content["windows"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged ({error}); build again with --force") from error
