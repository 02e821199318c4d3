"""Rewrite a plan's steps so that a run in fp32 mode makes fewer and faster calls.

What the program says stays what is computed, rounding in fp32 apart; a traced run, a watched one and fp16 mode
take the plan as it was, as does a session that keeps no weights. Whether a rule applies depends on the ops that
it names alone, so a model gives the same bits wherever it is cut into parts. Before and after:

    concat of what several layers made      ->  each piece goes to its place when it is made, so that the larger
                                                tensor of which it is a view is free for the next layer
    conv(x, a), conv(x, b), conv(x, c)      ->  one product with the weights joined and packed for oneDNN
    conv(x, a) then silu, add y or mul y    ->  one product that does this to its result
    abs, reduce_max, maximum, ... , mul     ->  one RMSNorm (the form scaled by the row maximum), whose gain goes
                                                into the weights where only products read it
    mul, slices, negate, concat, mul, add   ->  one rotation (RoPE)
    matmul, add, softmax, matmul            ->  torch's attention, which holds no whole matrix of scores

Products give their results with channels innermost in memory. Torch carries that layout through what follows,
so it costs nothing; cosine, sine and mask are prepared and laid out the same way, once a run.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pdconvert.executors.mil import dtypes
from pdconvert.executors.mil.ops import fused
from pdconvert.executors.mil.ops.products import LINEAR, SMALL
from pdconvert.executors.mil.ops.row import OpRow
from pdconvert.executors.mil.plan import Step
from pdconvert.executors.mil.values import ValueInfo
from pdconvert.executors.mil.weights import Folded, Joined, Static

MIN_COLUMNS = 16
"""Positions from which a packed product is the faster one."""

_C = ("maximum:floor", ("reduce_max:peak", ("abs", "x")), "#floor")
_D = ("real_div", "x", _C)
_E = ("mul", ("real_div", "#one", _C), "#eps")
_SCALED = ("mul", _D, ("rsqrt:root", ("add", ("reduce_mean:mean", ("mul", _D, _D)), ("mul", _E, _E))))
NORM = ("mul", _SCALED, "#gain")
"""x / c · rsqrt(mean((x / c)²) + (s / c)²) · gain with c = max(max |x|, floor)."""

_HALVES = ("concat:joined", ("mul", ("slice_by_index:high", "x"), "#minus"), ("slice_by_index:low", "x"))
ROPE = ("add", ("mul", _HALVES, "sin"), ("mul", "x", "cos"))
"""x · cos + concat(−high half, low half) · sin."""

ATTENTION = ("matmul:out", "v", ("softmax:shares", ("add", ("matmul:scores", "k", "q"), "mask")))
"""v · softmax(kᵀ · q + mask) over the keys, which are axis 2."""

_COMMUTES = frozenset({"add", "mul"})
_POST = {"silu": "swish", "add": "add", "mul": "mul"}
_FLOATS = frozenset({"fp16", "fp32"})
_Pattern = str | tuple[Any, ...]


@dataclass
class Parts:
    """What the rules read and write.

    Attributes:
        steps: of the plan.
        infos: types by slot; new slots are added.
        statics: constants by slot; new ones are added.
        outputs: slots of the function's outputs.
    """

    steps: list[Step]
    infos: dict[int, ValueInfo]
    statics: dict[int, Static]
    outputs: set[int]

    def __post_init__(self) -> None:
        """Index the steps."""
        self.maker = {slot: index for index, step in enumerate(self.steps) for slot in step.outs}
        self.users: dict[int, list[int]] = {}
        for index, step in enumerate(self.steps):
            for slot in step.reads():
                self.users.setdefault(slot, []).append(index)

    def new_slot(self, info: ValueInfo) -> int:
        """Add a slot."""
        slot = len(self.infos)
        self.infos[slot] = info
        return slot

    def add_static(self, value: Static) -> int:
        """Add a constant."""
        slot = self.new_slot(value.info)
        self.statics[slot] = value
        return slot

    def number(self, slot: int) -> float | None:
        """A scalar constant; None for anything else."""
        static = self.statics.get(slot)
        return float(static.tensor({}).item()) if static and math.prod(static.info.shape) == 1 else None

    def step(self, like: Step, fn: Callable[..., Any], args: Sequence[int], *, view: bool = False) -> Step:
        """A step that stands for others and gives the outputs of `like`."""
        return replace(
            like,
            fn=fn,
            into=fn,
            args=tuple(args),
            rounds=(False,) * len(like.outs),
            row=OpRow(fn, (), view=view),
            params={},
            loads=sorted({slot for slot in args if slot in self.statics}),
        )

    def rewritten(self, changed: Mapping[int, Sequence[Step]]) -> "Parts":
        """The parts with steps replaced by others (by none where the sequence is empty)."""
        steps = [new for index, step in enumerate(self.steps) for new in changed.get(index, (step,))]
        return Parts(steps, self.infos, self.statics, self.outputs)


def fuse(parts: Parts) -> list[Step]:
    """Return the steps rewritten; unchanged where torch has no oneDNN."""
    if LINEAR is None:
        return parts.steps
    for rule in (_placed, _norms, _rotations, _attention, _post_operations, _joined_products):
        parts = parts.rewritten(rule(parts))
    return parts.steps


def match(parts: Parts, slot: int, pattern: _Pattern, found: dict[str, int], inner: set[int]) -> bool:
    """Whether a value is made as `pattern` says; fills `found` (name: slot) and `inner` (steps).

    A pattern is a name, which stands for one value wherever it occurs (a constant where it begins with `#`), or
    a tuple of an op type, with `:label` to find its output again, and the patterns of its inputs.
    """
    if isinstance(pattern, str):
        known = pattern.startswith("#") == (slot in parts.statics)
        return known and found.setdefault(pattern, slot) == slot
    op_type, _, label = pattern[0].partition(":")
    index = parts.maker.get(slot)
    step = parts.steps[index] if index is not None else None
    if index is None or step is None or step.kind != "op" or step.info.op_type != op_type or step.dynamic:
        return False
    args = step.reads()
    if len(args) != len(pattern) - 1 or len(step.outs) != 1:
        return False
    for order in (args, args[::-1]) if op_type in _COMMUTES else (args,):
        trial, seen = dict(found), set(inner)
        if all(match(parts, arg, part, trial, seen) for arg, part in zip(order, pattern[1:], strict=True)):
            found.update(trial, **({label: slot} if label else {}))
            inner.update(seen, {index})
            return True
    return False


def _groups(parts: Parts, pattern: _Pattern) -> list[tuple[int, dict[str, int], set[int]]]:
    """Each place where a pattern occurs and nothing else reads what lies inside: root, values, steps."""
    groups = []
    for index, step in enumerate(parts.steps):
        if step.kind != "op" or len(step.outs) != 1:
            continue
        found: dict[str, int] = {}
        inner: set[int] = set()
        if not match(parts, step.outs[0], pattern, found, inner):
            continue
        hidden = [parts.steps[place].outs[0] for place in inner - {index}]
        if all(slot not in parts.outputs and set(parts.users[slot]) <= inner for slot in hidden):
            groups.append((index, found, inner))
    return groups


def _placed(parts: Parts) -> dict[int, list[Step]]:
    """A join of what several layers made: an empty tensor before the first piece, and a copy after each."""
    changed: dict[int, list[Step]] = {}
    for index, step in enumerate(parts.steps):
        if (
            step.kind != "op"
            or step.info.op_type != "concat"
            or step.dynamic
            or step.params.get("interleave")
        ):
            continue
        pieces, whole = step.args[0], step.outs[0]
        if not all(slot in parts.maker and parts.infos[slot].is_static for slot in (*pieces, whole)):
            continue
        first = min(parts.maker[slot] for slot in pieces)
        if not any(_columns(parts, between) for between in parts.steps[first + 1 : index]):
            continue
        info = parts.infos[whole]
        axis = step.params["axis"] % len(info.shape)
        make = parts.step(step, fused.empty(info.shape, getattr(torch, dtypes.BY_NAME[info.dtype].torch)), ())
        changed[first] = [make, *changed.get(first, [parts.steps[first]])]
        start = 0
        for slot in pieces:
            copy = parts.step(step, fused.place(axis, start), (whole, slot))
            maker = parts.maker[slot]
            done = replace(copy, outs=(parts.new_slot(info),))
            changed.setdefault(maker, [parts.steps[maker]]).append(done)
            start += parts.infos[slot].shape[axis]
        changed[index] = []
    return changed


def _norms(parts: Parts) -> dict[int, list[Step]]:
    """RMSNorm over the channels, scaled by the row maximum: one op."""
    changed: dict[int, list[Step]] = {}
    for index, found, inner in _groups(parts, NORM):
        over = [_params(parts, found[name]) for name in ("peak", "mean")]
        shape, gain = parts.infos[found["x"]].shape, parts.infos[found["#gain"]].shape
        eps, floor = (parts.number(found[name]) or 0.0 for name in ("#eps", "#floor"))
        fits = (
            all(p.get("axes") == [1] and p.get("keep_dims") is True for p in over)
            and _params(parts, found["root"]).get("epsilon") == 0
            and parts.number(found["#one"]) == 1
            and shape[0] == 1
            and gain == (1, shape[1], 1, 1)
            and eps >= fused.SMALLEST_ROOT_EPSILON
            and floor > 0
        )
        if fits:
            fn = fused.rms_norm(shape[1], eps)
            changed.update({place: [] for place in inner})
            scaled = _scaled_products(parts, parts.steps[index].outs[0], found["#gain"])
            changed.update({place: [step] for place, step in scaled.items()})
            args = (found["x"],) if scaled else (found["x"], found["#gain"])
            changed[index] = [parts.step(parts.steps[index], fn, args)]
    return changed


def _scaled_products(parts: Parts, slot: int, gain: int) -> dict[int, Step]:
    """The products of a normed x, for x without its gain; none where anything else reads it."""
    users = parts.users.get(slot, [])
    if slot in parts.outputs or not all(_columns(parts, parts.steps[user]) for user in users):
        return {}
    scaled = {}
    for user in users:
        step = parts.steps[user]
        x, weight, *bias = step.args
        held = [parts.statics[weight], parts.statics[gain]]
        key = ("scaled inputs", *(static.key for static in held))
        static = Folded(held[0].info, fused.scale_inputs, held, 0, f"gain of {step.info}", False, key)
        args = (x, parts.add_static(static), *bias)
        scaled[user] = replace(step, args=args, loads=[slot for slot in args if slot in parts.statics])
    return scaled


def _rotations(parts: Parts) -> dict[int, list[Step]]:
    """RoPE on x (1, heads, D, S) with cos and sin (1, 1, D, S): one op, and one to prepare each of the two."""
    changed: dict[int, list[Step]] = {}
    prepared = _Prepared()
    for index, found, inner in _groups(parts, ROPE):
        shape = parts.infos[found["x"]].shape
        flat = len(shape) == 4 and parts.infos[found["x"]].is_static
        if not flat or shape[2] % 2 or parts.number(found["#minus"]) != -1:
            continue
        size = (1, 1, *shape[2:])
        halves = (_halves(parts, found["low"], shape, 0), _halves(parts, found["high"], shape, shape[2] // 2))
        tables = [found["cos"], found["sin"]]
        if (
            not all(halves)
            or _params(parts, found["joined"]).get("axis") not in (2, -2)
            or any(parts.infos[slot].shape != size for slot in tables)
        ):
            continue
        step = parts.steps[index]
        cos, before = prepared.once(parts, step, fused.channels_inside, found["cos"])
        sin, more = prepared.once(parts, step, fused.signed_halves, found["sin"])
        changed.update({place: [] for place in inner})
        changed[index] = [*before, *more, parts.step(step, fused.rotate, (found["x"], cos, sin))]
    return changed


class _Prepared(dict[tuple[int, Callable[..., Any]], int]):
    """What is made of a tensor (1, 1, D, S) once a run and read by many steps: slots by tensor and function."""

    def once(self, parts: Parts, step: Step, fn: Callable[..., Any], slot: int) -> tuple[int, list[Step]]:
        """The slot of fn(tensor), and the step before `step` that makes it, if none does yet."""
        if (slot, fn) in self:
            return self[slot, fn], []
        made = self[slot, fn] = parts.new_slot(parts.infos[slot])
        return made, [replace(parts.step(step, fn, (slot,), view=True), outs=(made,))]


def _attention(parts: Parts) -> dict[int, list[Step]]:
    """Grouped attention with heads as (G, R, D, S), one key and value (G, 1, D, S) for each group: one op."""
    changed: dict[int, list[Step]] = {}
    prepared = _Prepared()
    for index, found, inner in _groups(parts, ATTENTION):
        key, value, query, mask = (parts.infos[found[name]] for name in ("k", "v", "q", "mask"))
        scores, out = _params(parts, found["scores"]), _params(parts, found["out"])
        fits = (
            all(info.is_static and len(info.shape) == 4 for info in (key, query))
            and key == value
            and (key.shape[0], 1, key.shape[2]) == (query.shape[0], key.shape[1], query.shape[2])
            and mask.shape == (1, 1, key.shape[3], query.shape[3])
            and scores.get("transpose_x") is True
            and not any((scores.get("transpose_y"), out.get("transpose_x"), out.get("transpose_y")))
            and _params(parts, found["shares"]).get("axis") in (2, -2)
        )
        if fits:
            checked, before = prepared.once(parts, parts.steps[index], fused.finite_mask, found["mask"])
            changed.update({place: [] for place in inner})
            args = (found["v"], found["k"], found["q"], checked)
            changed[index] = [*before, parts.step(parts.steps[index], fused.attend, args)]
    return changed


def _halves(parts: Parts, slot: int, shape: tuple[int, ...], begin: int) -> bool:
    """Whether a slice takes half of axis 2, from `begin`, and all of the others."""
    params = _params(parts, slot)
    half = (*shape[:2], shape[2] // 2, shape[3])
    starts = [0 if masked else start for start, masked in zip(params["begin"], _mask(params), strict=True)]
    plain = set(params.get("stride") or (1,)) == {1} and not any(params.get("squeeze_mask") or ())
    return plain and parts.infos[slot].shape == half and starts == [0, 0, begin, 0]


def _mask(params: Mapping[str, Any]) -> Sequence[bool]:
    return params.get("begin_mask") or (False,) * len(params["begin"])


def _params(parts: Parts, slot: int) -> Mapping[str, Any]:
    return parts.steps[parts.maker[slot]].params


def _columns(parts: Parts, step: Step) -> int:
    """Positions of a large pointwise convolution with constant weights; 0 for anything else."""
    if step.kind != "op" or step.info.op_type != "conv" or step.dynamic:
        return 0
    x, weight, *bias = step.args
    if weight not in parts.statics or any(slot not in parts.statics for slot in bias):
        return 0
    x_info, w_info, params = parts.infos[x], parts.infos[weight], step.params
    pointwise = (
        set(w_info.shape[2:]) == {1}
        and set(params.get("strides") or (1,)) == {1}
        and params.get("groups", 1) == 1
        and not (params.get("pad_type") == "custom" and any(params.get("pad") or ()))
    )
    if not pointwise or not x_info.is_static or x_info.shape[0] != 1 or x_info.dtype not in _FLOATS:
        return 0
    columns = math.prod(x_info.shape[2:])
    large = columns >= MIN_COLUMNS and columns * math.prod(w_info.shape) > SMALL and 1 not in w_info.shape[:2]
    return columns if large else 0


def _post_operations(parts: Parts) -> dict[int, list[Step]]:
    """A product and the one op that takes its result: a product that does both, in the place of that op."""
    changed: dict[int, list[Step]] = {}
    for index, product in enumerate(parts.steps):
        columns = _columns(parts, product)
        result = product.outs[0] if columns else -1
        users = parts.users.get(result, [])
        if not columns or result in parts.outputs or len(users) != 1 or users[0] in changed:
            continue
        after = parts.steps[users[0]]
        others = [slot for slot in after.reads() if slot != result]
        binary = after.info.op_type in _COMMUTES and len(others) == 1
        if after.kind != "op" or not (binary or after.info.op_type == "silu"):
            continue
        if any(slot in parts.statics or parts.infos[slot] != parts.infos[result] for slot in others):
            continue
        kind = _POST[after.info.op_type]
        x, weight, *bias = product.args
        packed = parts.add_static(Joined.of([parts.statics[weight]], columns))
        fn = fused.product(parts.infos[result].shape, kind, bool(bias))
        changed[index] = []
        changed[users[0]] = [parts.step(after, fn, (x, packed, *bias, *others))]
    return changed


def _joined_products(parts: Parts) -> dict[int, list[Step]]:
    """Products of one input: one product whose result is cut into theirs, in the place of the first."""
    groups: dict[tuple[int, bool], list[int]] = {}
    for index, step in enumerate(parts.steps):
        if _columns(parts, step):
            groups.setdefault((step.args[0], len(step.args) > 2), []).append(index)
    changed: dict[int, list[Step]] = {}
    for (x, biased), places in groups.items():
        steps = [parts.steps[place] for place in places]
        first, columns = steps[0], _columns(parts, steps[0])
        weights = [parts.statics[step.args[1]] for step in steps]
        args = [x, parts.add_static(Joined.of(weights, columns))]
        if biased:
            args.append(parts.add_static(Joined.of([parts.statics[step.args[2]] for step in steps], 0)))
        info = replace(
            first.info,
            outputs=tuple(name for step in steps for name in step.info.outputs),
            types=tuple(kind for step in steps for kind in step.info.types),
        )
        like = replace(first, info=info, outs=tuple(slot for step in steps for slot in step.outs))
        shapes = [parts.infos[slot].shape for slot in like.outs]
        fn = fused.product(shapes[0], "", biased) if len(shapes) == 1 else fused.products(shapes)
        changed.update({place: [] for place in places})
        changed[places[0]] = [parts.step(like, fn, args)]
    return changed
