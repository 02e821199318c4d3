"""One test case of a rule."""

from dataclasses import dataclass

from lint_programs import Example


@dataclass(frozen=True)
class Case:
    """A rule on two examples.

    Attributes:
        rule: its id.
        found: what it finds in `fires`.
        fires: an example in which it holds.
        silent: one in which it does not.
        count: how many places `fires` has.
    """

    rule: str
    found: str
    fires: Example
    silent: Example
    count: int = 1
