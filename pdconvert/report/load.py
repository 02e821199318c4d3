"""A build's report.json and manifest.json, as the report page reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pdconvert import schema
from pdconvert.checks import Check
from pdconvert.errors import InputError
from pdconvert.ledger import Ledger, Step


@dataclass(frozen=True)
class BuildReport:
    """What a build says of itself. Sections that it has no data for are empty: random weights have no KLD.

    Attributes:
        report: report.json; the verdict and the cost are taken from here.
        manifest: manifest.json; recipe, source, tools, functions.
    """

    report: Mapping[str, Any]
    manifest: Mapping[str, Any]

    @classmethod
    def read(cls, build: Path) -> BuildReport:
        """Read both files of a build.

        Raises:
            InputError: not a build, or a file of it is missing, damaged or of a newer schema.
        """
        manifest = schema.read_manifest(build)
        path = build / "report" / "report.json"
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise InputError(f"{path} is missing; build again with --force") from None
        except ValueError as error:
            raise InputError(f"{path}: not JSON ({error}); build again with --force") from error
        schema.check_schema(report, path)
        found = cls(report, manifest)
        try:
            _ = found.name, found.passed, found.checks, found.ledger
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"{path}: {error} is missing or of another form; build again with --force"
            ) from error
        return found

    @property
    def name(self) -> str:
        return self.report["name"]

    @property
    def passed(self) -> bool:
        return self.report["verdict"] == "pass"

    @cached_property
    def checks(self) -> list[Check]:
        return [Check.from_json(line) for line in self.report["checks"]]

    @cached_property
    def ledger(self) -> Ledger:
        return Ledger(
            [
                Step(line["block"], line["step"], *(float(line[name]) for name in NUMBERS))
                for line in self.report["steps"]
            ]
        )

    def rows(self, key: str) -> list[dict[str, Any]]:
        """A section of rows; empty where the build has none, or was made before it was written."""
        return self.report.get(key) or []

    def section(self, key: str) -> dict[str, Any]:
        """A section of named values, likewise."""
        return self.report.get(key) or {}

    def check(self, name: str) -> Check | None:
        """A check by the start of its name."""
        return next((check for check in self.checks if check.name.startswith(name)), None)

    def caches(self, what: str, against: str) -> list[dict[str, Any]]:
        """Comparisons of K and V, those of the first function that has them: at most one `k` and one `v`."""
        found = [row for row in self.rows("caches") if (row["what"], row["against"]) == (what, against)]
        return [row for row in found if row["function"] == found[0]["function"]]

    @property
    def layers(self) -> int:
        return int(self.manifest["kv"]["layers"])


@contextmanager
def readable(*builds: Path) -> Iterator[None]:
    """While a page is made from files that somebody may have changed: what does not fit is their fault.

    Raises:
        InputError: a section of a report.json or manifest.json is not what docs/contracts.md says.
    """
    from jinja2 import UndefinedError

    try:
        yield
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        ArithmeticError,
        UndefinedError,
    ) as error:
        paths = " or ".join(str(build / "report" / "report.json") for build in builds)
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InputError(
            f"{paths}: a section is of another form ({reason}); build again with --force"
        ) from error


NUMBERS = ("original_db", "previous_db", "floor_db", "seconds")


def real(value: float | str | None) -> float:
    """A number of report.json, where one that is not finite is a text."""
    return math.nan if value is None else float(value)


def reals(values: Iterable[float | str]) -> list[float]:
    """Such numbers."""
    return [float(value) for value in values]


def worst(values: Sequence[float]) -> float:
    """The lowest; NaN where one is NaN."""
    return math.nan if any(map(math.isnan, values)) else min(values)


def decibel(value: float) -> str:
    """An SQNR in words: what is not finite says what that means."""
    if math.isnan(value):
        return "not finite"
    return "equal" if value == math.inf else f"{value:.1f} dB".replace("-", "−")
