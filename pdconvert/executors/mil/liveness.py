"""When memory is freed, and when an op may write into its input instead of making a new tensor.

A value's *root* is the tensor whose memory it shares (views share it with their input):

- an op may write into an input that no later op reads through any value of the same root, unless the
  root belongs to the caller, to a constant or to a state;
- an op that may, such as `slice_update`, may write into a state's own buffer if its result goes straight back to
  that state, through others of this kind or not. Small pieces of the old content that are read later are copied
  first. That is how a cache of 23 MB is updated 60 times a token without copying it.
"""

import math
from collections.abc import Mapping
from typing import Any

from pdconvert.executors.mil.plan import Step
from pdconvert.executors.mil.values import ValueInfo

Root = tuple[str, Any]
"""("fresh", slot) | ("kept", slot) for inputs and constants | ("state", name)."""


class Liveness:
    """Sets `frees`, `target`, `detaches` and `copies_data` of all steps."""

    def __init__(
        self,
        steps: list[Step],
        infos: Mapping[int, ValueInfo],
        inputs: Mapping[str, int],
        outputs: Mapping[str, int],
        statics: set[int],
    ) -> None:
        self._steps = steps
        self._infos = infos
        self._statics = statics
        self._end = len(steps)
        self._last: dict[int, int] = {}
        for index, step in enumerate(steps):
            for slot in (*step.outs, *step.reads()):
                self._last[slot] = index
        for slot in outputs.values():
            self._last[slot] = self._end
        self._root: dict[int, Root] = {slot: ("kept", slot) for slot in (*inputs.values(), *statics)}
        self._joined: dict[Root, Root] = {}
        self._members: dict[Root, list[int]] = {}

    def apply(self) -> None:
        """Fill in the steps."""
        freed: dict[int, list[int]] = {}
        for slot, last in self._last.items():
            if last < self._end and slot not in self._statics:
                freed.setdefault(last, []).append(slot)
        for index, step in enumerate(self._steps):
            step.frees = tuple(freed.get(index, ()))
            if step.kind == "read":
                self._join(step.outs[0], ("state", step.state))
            elif step.kind == "write":
                self._write(step)
            else:
                self._op(index, step)

    def _root_of(self, slot: int) -> Root:
        root = self._root.get(slot, ("fresh", slot))
        return self._joined.get(root, root)

    def _join(self, slot: int, root: Root) -> None:
        self._root[slot] = root
        self._members.setdefault(root, []).append(slot)

    def _read_after(self, index: int, root: Root) -> list[int]:
        """Slots that share memory with `root` and are read after step `index`."""
        return [slot for slot in self._members.get(root, ()) if self._last[slot] > index]

    def _write(self, step: Step) -> None:
        """The state takes the written tensor as its buffer, unless that belongs to something else."""
        root = self._root_of(step.args[0])
        state = ("state", step.state)
        step.copies_data = root != state and root[0] != "fresh"
        if root[0] == "fresh":
            self._joined[root] = state
            self._members.setdefault(state, []).extend(self._members.pop(root, ()))

    def _op(self, index: int, step: Step) -> None:
        assert step.row is not None
        if step.row.into is not None:
            for place in range(min(step.row.targets, len(step.args))):
                if self._may_write(index, step, place):
                    step.target = place
                    self._join(step.outs[0], self._root_of(step.args[place]))
                    return
        first = step.args[0] if step.args else None
        for slot in step.outs:
            shared = self._root_of(first) if step.row.view and isinstance(first, int) else None
            self._join(slot, shared or ("fresh", slot))

    def _may_write(self, index: int, step: Step, place: int) -> bool:
        slot, out = step.args[place], step.outs[0]
        if (
            not isinstance(slot, int)
            or self._infos[slot] != self._infos[out]
            or not self._infos[slot].is_static
        ):
            return False
        root = self._root_of(slot)
        others = [a for i, a in enumerate(step.args) if i != place and a is not None and a != slot]
        if root[0] == "kept" or any(self._root_of(other) == root for other in others):
            return False
        if root[0] == "fresh":
            return not self._read_after(index, root)
        return self._returns_to_state(index, out, root[1]) and self._detach(index, step, root)

    def _detach(self, index: int, step: Step, root: Root) -> bool:
        """Let the step copy what is read later of the old content, if that is less than the whole.

        Returns:
            Whether the step may write into the state's buffer.
        """
        later = self._read_after(index, root)
        infos = [self._infos[slot] for slot in later]
        whole = math.prod(self._infos[step.outs[0]].shape)
        if not all(info.is_static for info in infos) or 2 * sum(math.prod(i.shape) for i in infos) > whole:
            return False
        for slot in later:
            self._members[root].remove(slot)
            self._join(slot, ("fresh", ("copied", slot, index)))
        step.detaches = tuple(later)
        return True

    def _returns_to_state(self, index: int, slot: int, state: str) -> bool:
        """Whether the next step that touches `state` writes the value of `slot` to it."""
        carriers = {slot}
        for place in range(index + 1, self._end):
            step = self._steps[place]
            if step.state == state:
                return step.kind == "write" and step.args[0] in carriers
            if step.row is None or step.row.into is None:
                continue
            targets = [arg for arg in step.args[: step.row.targets] if isinstance(arg, int)]
            if any(arg in carriers and self._last[arg] == place for arg in targets):
                carriers.add(step.outs[0])
        return False
