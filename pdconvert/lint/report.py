"""Run the rules over a package and group what they find."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pdconvert.errors import InputError
from pdconvert.executors.mil.package import Package
from pdconvert.executors.mil.values import OP_ERRORS, first_line
from pdconvert.executors.mil.view import PackageView, view_package
from pdconvert.lint.rule import FAILING, SEVERITIES, Found, Rule, Severity
from pdconvert.lint.rules import RULES
from pdconvert.lint.targets import CHIP_NAMES, SYSTEM_NAMES, Targets, read_targets
from pdconvert.packages import packages_of

NOTE = (
    "Rules name what is known to prevent or slow execution on the Neural Engine; none says that anything will run"
    " there."
)
SHOWN = 5


@dataclass(frozen=True)
class Place:
    """Where something was found: an op's output, an input, a state, an output or a file."""

    name: str
    op: str
    shape: tuple[int, ...] | None
    dtype: str | None


@dataclass
class Finding:
    """Equal findings of one rule in one function.

    Attributes:
        rule, severity, title, source, mend: the rule's.
        package: file name of the package.
        function: name of the function; None for the package.
        found: what was found.
        count: how many times.
        places: the first of them.
        chips: chips that it concerns.
        systems: systems that it concerns.
    """

    rule: str
    severity: Severity
    title: str
    source: str
    mend: str
    package: str
    function: str | None
    found: str
    chips: tuple[str, ...]
    systems: tuple[str, ...]
    count: int = 0
    places: list[Place] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """What the rules found.

    Attributes:
        path: the package or build.
        packages: the packages that were read.
        targets: what they were checked for.
        findings: in the order of the rules.
    """

    path: Path
    packages: list[Path]
    targets: Targets
    findings: list[Finding]

    @property
    def passed(self) -> bool:
        """Whether no finding is fatal or silent."""
        return not any(finding.severity in FAILING for finding in self.findings)

    def counts(self) -> dict[Severity, int]:
        """Number of places by severity, the worst first."""
        return {
            severity: sum(f.count for f in self.findings if f.severity == severity) for severity in SEVERITIES
        }

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "path": str(self.path),
            "packages": [str(package) for package in self.packages],
            "verdict": "pass" if self.passed else "fail",
            "chips": list(self.targets.chips),
            "systems": list(self.targets.systems),
            "counts": self.counts(),
            "findings": [asdict(finding) for finding in self.findings],
            "note": NOTE,
        }


def lint_path(path: Path, targets: Sequence[str] = (), rules: Sequence[Rule] = RULES) -> Report:
    """Check a `.mlpackage`, or the packages of a build folder.

    Args:
        path: the package or build.
        targets: names of chips and systems; see `read_targets`.
        rules: the rules to apply.

    Raises:
        InputError: neither lies there, a part is missing or damaged, or a target is unknown.
    """
    views = [view_package(Package.open(package)) for package in packages_of(path)]
    return lint_views(path, views, targets, rules)


def lint_views(
    path: Path, views: Sequence[PackageView], targets: Sequence[str] = (), rules: Sequence[Rule] = RULES
) -> Report:
    """Check the packages of a path that were read before; the rest as in `lint_path`."""
    chosen = read_targets(targets, max(view.system for view in views))
    return Report(path, [view.package.path for view in views], chosen, list(find(views, chosen, rules)))


def find(
    packages: Sequence[PackageView], targets: Targets, rules: Sequence[Rule] = RULES
) -> Iterator[Finding]:
    """Apply rules to packages; equal findings of a function are one, with a count."""
    for rule in rules:
        for package in packages:
            if rule.on_package is not None:
                yield from _grouped(rule, package, None, rule.on_package(package), targets)
            if rule.on_function is not None:
                for function in package.functions:
                    yield from _grouped(rule, package, function.name, rule.on_function(function), targets)


def _grouped(
    rule: Rule, package: PackageView, function: str | None, found: Iterator[Found], targets: Targets
) -> list[Finding]:
    """Equal findings joined.

    Raises:
        InputError: an op lacks what the rule looks at.
    """
    path = package.package.path
    groups: dict[Any, Finding] = {}
    try:
        every = list(found)
    except OP_ERRORS as error:
        where = f"{path}: function {function}" if function else f"{path}"
        raise InputError(
            f"{where}: rule {rule.id}: an op does not have the inputs that MIL gives it ({first_line(error)})"
        ) from error
    for one in every:
        chips = _both(_both(one.chips or CHIP_NAMES, rule.chips), targets.chips)
        systems = _both(_both(one.systems or SYSTEM_NAMES, rule.systems), targets.systems)
        if not chips or not systems:
            continue
        finding = groups.setdefault(
            (one.text, chips, systems),
            Finding(
                rule.id,
                rule.severity,
                rule.title,
                rule.source,
                rule.mend,
                path.name,
                function,
                one.text,
                chips,
                systems,
            ),
        )
        finding.count += 1
        if len(finding.places) < SHOWN:
            finding.places.append(_place(one))
    return list(groups.values())


def _place(found: Found) -> Place:
    value = found.value or (found.op.out if found.op is not None and found.op.outputs else None)
    return Place(
        name=found.name or (found.op.name if found.op is not None else ""),
        op=found.op.type if found.op is not None else "",
        shape=value.shape if value is not None else None,
        dtype=value.dtype if value is not None else None,
    )


def _both(names: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name in others)
