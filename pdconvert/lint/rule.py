"""What a rule is, and what it finds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from pdconvert.executors.mil.view import FunctionView, Op, PackageView, Value
from pdconvert.lint.targets import CHIP_NAMES, SYSTEM_NAMES

Severity = Literal["fatal", "silent", "perf", "info"]

SEVERITIES: dict[Severity, str] = {
    "fatal": "known to be refused: the program, or the part with the finding, does not compile or load there",
    "silent": "known to run without an error, with wrong numbers or on another unit",
    "perf": "known to be slower or larger than it need be",
    "info": "worth knowing; nothing wrong by itself, or sources disagree",
}
"""What each severity means, the worst first."""

FAILING: tuple[Severity, ...] = ("fatal", "silent")
"""Severities that make `pdconvert lint` fail."""


@dataclass(frozen=True)
class Found:
    """One place where a rule holds.

    Attributes:
        text: what was found, without the op's name: equal texts are grouped.
        op: the op, where there is one.
        name: of the tensor or file; the op's name where empty.
        value: the tensor whose shape and type are reported; the op's first output where None.
        chips: chips that it concerns, if fewer than the rule's.
        systems: systems that it concerns, if fewer than the rule's.
    """

    text: str
    op: Op | None = None
    name: str = ""
    value: Value | None = None
    chips: tuple[str, ...] | None = None
    systems: tuple[str, ...] | None = None


FunctionCheck = Callable[[FunctionView], Iterator[Found]]
PackageCheck = Callable[[PackageView], Iterator[Found]]


@dataclass(frozen=True)
class Rule:
    """A fact about the Neural Engine that can be looked for in a program.

    Attributes:
        id: short name, words joined by hyphens.
        severity: see `SEVERITIES`.
        title: the fact, in one sentence.
        source: where it is from, and how it is known there.
        mend: what to do.
        what: what exactly is looked for.
        chips: chips that it applies to.
        systems: systems that it applies to.
        on_function: looks at one function; None for a rule on packages.
        on_package: looks at a package; None for a rule on functions.
    """

    id: str
    severity: Severity
    title: str
    source: str
    mend: str
    what: str
    chips: tuple[str, ...] = CHIP_NAMES
    systems: tuple[str, ...] = SYSTEM_NAMES
    on_function: FunctionCheck | None = None
    on_package: PackageCheck | None = None


def function_rule(
    id: str, severity: Severity, *, title: str, source: str, mend: str, chips: tuple[str, ...] = CHIP_NAMES
) -> Callable[[FunctionCheck], Rule]:
    """Make a rule of a function that looks at one function; its docstring says what is looked for."""

    def make(check: FunctionCheck) -> Rule:
        what = " ".join((check.__doc__ or "").split())
        return Rule(id, severity, title, source, mend, what, chips, on_function=check)

    return make


def package_rule(
    id: str, severity: Severity, *, title: str, source: str, mend: str, chips: tuple[str, ...] = CHIP_NAMES
) -> Callable[[PackageCheck], Rule]:
    """Make a rule of a function that looks at a package; its docstring says what is looked for."""

    def make(check: PackageCheck) -> Rule:
        what = " ".join((check.__doc__ or "").split())
        return Rule(id, severity, title, source, mend, what, chips, on_package=check)

    return make
