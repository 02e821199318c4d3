"""Steps that stand for several ops: what is rewritten, what is not, and that the values stay the program's."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mil_programs import mb, save_program

from pdconvert.executors.mil import MilSession
from pdconvert.executors.mil.plan import Step
from pdconvert.executors.mil.trace import Tracer
from pdconvert.executors.mil.weights import WeightCache
from pdconvert.measure import sqnr_db

HIDDEN, DIM, TOKENS, WIDE = 96, 24, 64, 192
HEADS, GROUPS = 4, 2
Body = Callable[[Mapping[str, Any]], dict[str, Any]]


def draw(seed: int, *shape: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) / 8).astype(np.float16)


def conv(x: Any, seed: int, outputs: int, bias: bool = False, **params: Any) -> Any:
    weight = draw(seed, outputs, x.shape[1], 1, 1)
    more = {"bias": draw(seed + 1, outputs)} if bias else {}
    return mb.conv(x=x, weight=weight, **more, **params)


def norm(x: Any, *, epsilon: float = 0.0, axis: int = 1, floor: float = 1e-4, root: float = 3e-3) -> Any:
    peak = mb.reduce_max(x=mb.abs(x=x), axes=[axis], keep_dims=True)
    peak = mb.maximum(x=peak, y=np.float16(floor))
    scaled = mb.real_div(x=x, y=peak)
    scaled_root = mb.mul(x=mb.real_div(x=np.float16(1), y=peak), y=np.float16(root))
    mean = mb.reduce_mean(x=mb.mul(x=scaled, y=scaled), axes=[axis], keep_dims=True)
    total = mb.add(x=mean, y=mb.mul(x=scaled_root, y=scaled_root))
    normal = mb.mul(x=scaled, y=mb.rsqrt(x=total, epsilon=np.float16(epsilon)))
    return mb.mul(x=normal, y=draw(40, 1, HIDDEN, 1, 1))


def rotate(x: Any, v: Mapping[str, Any], *, swapped: bool = False) -> Any:
    count, half = x.shape[1], DIM // 2
    low = mb.slice_by_index(x=x, begin=[0, 0, 0, 0], end=[1, count, half, TOKENS])
    high = mb.slice_by_index(x=x, begin=[0, 0, half, 0], end=[1, count, DIM, TOKENS])
    first, second = (low, high) if swapped else (high, low)
    turned = mb.concat(values=[mb.mul(x=first, y=np.float16(-1)), second], axis=2)
    return mb.add(x=mb.mul(x=x, y=v["cos"]), y=mb.mul(x=turned, y=v["sin"]))


def block(v: Mapping[str, Any], bias: bool = False) -> dict[str, Any]:
    """A llama layer in the form that we emit."""
    x = norm(v["x"])
    k = mb.reshape(x=conv(x, 2, GROUPS * DIM, bias), shape=(1, GROUPS, DIM, TOKENS))
    value = mb.reshape(x=conv(x, 4, GROUPS * DIM, bias), shape=(GROUPS, 1, DIM, TOKENS))
    q = mb.reshape(x=conv(x, 6, HEADS * DIM, bias), shape=(1, HEADS, DIM, TOKENS))
    key = rotate(k, v)
    q = mb.reshape(x=rotate(q, v), shape=(GROUPS, HEADS // GROUPS, DIM, TOKENS))
    keys = mb.reshape(x=key, shape=(GROUPS, 1, DIM, TOKENS))
    scores = mb.add(x=mb.matmul(x=keys, y=q, transpose_x=True), y=v["mask"])
    seen = mb.matmul(x=value, y=mb.softmax(x=scores, axis=2))
    seen = mb.reshape(x=seen, shape=(1, HEADS * DIM, 1, TOKENS))
    x = mb.add(x=v["x"], y=conv(seen, 8, HIDDEN, bias))
    normed = norm(x)
    wide = mb.mul(x=mb.silu(x=conv(normed, 10, WIDE, bias)), y=conv(normed, 12, WIDE, bias))
    return {"out": mb.add(x=x, y=conv(wide, 14, HIDDEN, bias)), "k": key}


INPUTS = {
    "x": 40 * draw(0, 1, HIDDEN, 1, TOKENS),
    "cos": draw(20, 1, 1, DIM, TOKENS),
    "sin": draw(21, 1, 1, DIM, TOKENS),
    "mask": np.triu(np.zeros((TOKENS, TOKENS), np.float16) - 4e4, 1).T[None, None].astype(np.float16),
}


def save(path: Path, body: Body) -> MilSession:
    return MilSession(save_program(path / "p.mlpackage", INPUTS, body))


def name_of(step: Step) -> str:
    """Name of a function of `ops/fused.py`; of the op where another function computes it."""
    fused = getattr(step.fn, "__module__", "").endswith("ops.fused")
    return step.fn.__qualname__.partition(".")[0] if fused else step.info.op_type


def kinds(session: MilSession) -> Counter[str]:
    """How often each function of `ops/fused.py` stands in the program."""
    steps = session._fused.plan.steps
    return Counter(name_of(step) for step in steps if name_of(step) != step.info.op_type)


def by_op(session: MilSession, inputs: Mapping[str, np.ndarray] = INPUTS) -> dict[str, torch.Tensor]:
    outputs: dict[str, torch.Tensor] = {}
    for _ in session.steps(inputs, outputs=outputs):
        pass
    return outputs


def assert_equal_up_to_rounding(session: MilSession) -> None:
    wanted, got = by_op(session), session.run(INPUTS)
    assert wanted.keys() == got.keys()
    for name in wanted:
        assert got[name].is_contiguous()
        assert sqnr_db(wanted[name], got[name]) > 110, name


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer(tmp_path: Path, bias: bool) -> None:
    session = save(tmp_path, lambda v: block(v, bias))
    assert_equal_up_to_rounding(session)
    assert kinds(session) == {
        "products": 1,  # q, k, v
        "product": 4,  # o and the residual, gate and silu, up and the product with it, down and the residual
        "rms_norm": 2,
        "rotate": 2,
        "attend": 1,
        "channels_inside": 1,  # cos
        "signed_halves": 1,  # sin
        "finite_mask": 1,
    }
    norms = [step for step in session._fused.plan.steps if name_of(step) == "rms_norm"]
    assert [len(step.args) for step in norms] == [1, 1], "their gains went into the weights"


def test_caches_that_are_outputs_are_filled_layer_by_layer(tmp_path: Path) -> None:
    """What a layer's key is a view of is freed before the next layer runs, though the caches are joined at the end."""

    def layers(v: Mapping[str, Any]) -> dict[str, Any]:
        x, keys, flat = v["x"], [], []
        for _ in range(3):
            found = block({**v, "x": x})
            x = found["out"]
            keys.append(found["k"])
            flat.append(mb.reshape(x=found["k"], shape=(1, GROUPS * DIM, 1, TOKENS)))
        return {
            "out": x,
            "keys": mb.concat(values=keys, axis=1),
            "twice": mb.concat(values=[flat[2], flat[0], flat[2]], axis=-3),
            "woven": mb.concat(values=flat, axis=1, interleave=True),
        }

    session = save(tmp_path, layers)
    assert_equal_up_to_rounding(session)
    names = [name_of(step) for step in session._fused.plan.steps]
    assert [names.count(name) for name in ("empty", "place", "attend")] == [2, 6, 3]
    assert names.index("place") < names.index("attend")
    assert names.count("concat") == 1, "the interleaved one"


def test_every_op_is_seen_where_someone_looks(tmp_path: Path) -> None:
    session = save(tmp_path, block)
    traced = [row.op.op_type for row in Tracer(session.package).run(INPUTS).rows]
    seen: list[str] = []
    session.watch = lambda op, outputs: seen.append(op.op_type)
    watched = session.run(INPUTS)
    assert seen == traced == [step.info.op_type for step in session.plan.steps]
    assert len(session._fused.plan.steps) < len(traced) / 2
    for name, value in by_op(session).items():
        assert watched[name].equal(value)


def test_a_model_gives_the_same_bits_wherever_it_is_cut(tmp_path: Path) -> None:
    """The first half of the norms' inputs come from products, the second from outside, laid out another way."""

    def halves(v: Mapping[str, Any]) -> dict[str, Any]:
        x = mb.identity(x=block(v)["out"])
        return {"between": x, "out": norm(x), "k": block({**v, "x": x})["k"]}

    def second(v: Mapping[str, Any]) -> dict[str, Any]:
        return {"out": norm(v["x"]), "k": block(v)["k"]}

    whole = save(tmp_path, halves).run(INPUTS)
    (tmp_path / "cut").mkdir()
    cut = save(tmp_path / "cut", second).run({**INPUTS, "x": whole["between"]})
    assert cut["out"].equal(whole["out"]) and cut["k"].equal(whole["k"])


def test_rows_whose_squares_fp32_cannot_hold(tmp_path: Path) -> None:
    session = save(tmp_path, _normed())
    huge = {**INPUTS, "x": INPUTS["x"].astype(np.float32) * np.float32(1e20)}
    assert sqnr_db(by_op(session, huge)["out"], session.run(huge)["out"]) > 110
    assert kinds(session)["rms_norm"] == 1


def test_fp16_mode_runs_op_by_op(tmp_path: Path) -> None:
    session = MilSession(save(tmp_path, block).package, mode="fp16")
    for name, value in by_op(session).items():
        assert session.run(INPUTS)[name].equal(value)


def test_weights_that_are_not_kept_are_not_packed(tmp_path: Path) -> None:
    session = save(tmp_path, block)
    poor = MilSession(session.package, cache=WeightCache(1))
    for _ in range(2):
        for name, value in poor.run(INPUTS).items():
            assert sqnr_db(session.run(INPUTS)[name], value) > 110
    assert poor.cache.kept_bytes == 0
    sizes = (HIDDEN, WIDE, WIDE)
    assert session.cache.kept_bytes >= 4 * HIDDEN * sum(sizes)
    assert session.run(INPUTS)["out"].equal(session.run(INPUTS)["out"])


def test_a_session_that_keeps_nothing_runs_op_by_op(tmp_path: Path) -> None:
    session = MilSession(save(tmp_path, block).package, weight_cache_bytes=0)
    for name, value in by_op(session).items():
        assert session.run(INPUTS)[name].equal(value)


def test_a_query_that_sees_no_key_stays_nan(tmp_path: Path) -> None:
    session = save(tmp_path, block)
    blind = {**INPUTS, "mask": INPUTS["mask"].copy()}
    blind["mask"][..., 5] = -np.inf
    wanted, got = by_op(session, blind)["out"], session.run(blind)["out"]
    assert wanted[..., 5].isnan().all()
    assert got.isnan().equal(wanted.isnan())


def _mul(x: Any, y: Any) -> Any:
    return mb.mul(x=x, y=y)


def _norm_read_elsewhere(v: Mapping[str, Any]) -> dict[str, Any]:
    normed = norm(v["x"])
    return {"out": conv(normed, 2, WIDE), "root": mb.relu(x=normed)}


def _read_inside(v: Mapping[str, Any]) -> dict[str, Any]:
    gate = conv(v["x"], 2, WIDE)
    return {"gate": gate, "out": _mul(mb.silu(x=gate), conv(v["x"], 4, WIDE))}


def _both_sides(v: Mapping[str, Any]) -> dict[str, Any]:
    return {"out": mb.add(x=conv(v["x"], 2, WIDE), y=conv(v["x"], 4, WIDE))}


def _square(v: Mapping[str, Any]) -> dict[str, Any]:
    product = conv(v["x"], 2, WIDE)
    return {"out": _mul(product, product)}


def _normed(**how: Any) -> Body:
    return lambda v: {"out": conv(norm(v["x"], **how), 2, WIDE)}


def _rotated(**how: Any) -> Body:
    def body(v: Mapping[str, Any]) -> dict[str, Any]:
        x = mb.reshape(x=conv(v["x"], 2, HEADS * DIM), shape=(1, HEADS, DIM, TOKENS))
        return {"out": rotate(x, v, **how)}

    return body


KEPT: dict[str, tuple[Body, dict[str, int]]] = {
    "a result that is read elsewhere": (_read_inside, {"products": 0, "product": 2}),
    "two products added": (_both_sides, {"product": 2}),
    "a product squared": (_square, {"product": 1}),
    "strides": (lambda v: {"out": conv(v["x"], 2, WIDE, strides=[1, 2])}, {}),
    "groups": (
        lambda v: {"out": mb.conv(x=v["x"], weight=draw(2, WIDE, HIDDEN // 2, 1, 1), groups=2)},
        {},
    ),
    "padding": (lambda v: {"out": conv(v["x"], 2, WIDE, pad_type="custom", pad=[0, 0, 1, 1])}, {}),
    "a small product": (lambda v: {"out": conv(norm(v["x"]), 2, 4)}, {"rms_norm": 1}),
    "a norm that is read elsewhere": (_norm_read_elsewhere, {"product": 1, "rms_norm": 1}),
    "an output of inputs alone": (lambda v: {"out": mb.concat(values=[v["x"], v["x"]], axis=1)}, {}),
    "an epsilon at the wrong place": (_normed(epsilon=0.01), {"product": 1}),
    "a norm without an epsilon": (_normed(root=0.0), {"product": 1}),
    "a norm over positions": (_normed(axis=3), {"product": 1}),
    "halves in the wrong order": (_rotated(swapped=True), {"product": 1}),
    "halves in their order": (
        _rotated(),
        {"product": 1, "rotate": 1, "channels_inside": 1, "signed_halves": 1},
    ),
    "a plain norm": (_normed(), {"product": 1, "rms_norm": 1}),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_does_not_fit_stays_as_it_is(name: str, tmp_path: Path) -> None:
    body, expected = KEPT[name]
    session = save(tmp_path, body)
    assert_equal_up_to_rounding(session)
    found = kinds(session)
    assert {kind: found[kind] for kind in {*found, *expected}} == {
        kind: expected.get(kind, 0) for kind in {*found, *expected}
    }
