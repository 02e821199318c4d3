"""Ways through a graph that several rules follow."""

from collections.abc import Iterator

from pdconvert.executors.mil.view import FunctionView, Op, Value

LAYOUT_OPS = frozenset(
    {
        "reshape",
        "transpose",
        "expand_dims",
        "squeeze",
        "identity",
        "cast",
        "slice_by_index",
        "slice_by_size",
        "split",
    }
)
"""Ops that move values and do not change them."""

_SCORE_OPS = LAYOUT_OPS | {"add", "sub", "mul", "real_div", "select", "maximum", "minimum", "concat", "clip"}
_PRODUCTS = ("matmul", "einsum")


def reaching_softmax(function: FunctionView) -> list[Op]:
    """Elementwise and layout ops between a product and a softmax, and fused attention itself; in no order."""
    edge = [op.input("x") for op in function.of_type("softmax")]
    found: dict[int, Op] = {id(op): op for op in function.of_type("scaled_dot_product_attention")}
    while edge:
        value = edge.pop()
        op = value.maker if value is not None else None
        if op is None or op.is_constant or id(op) in found or op.type not in _SCORE_OPS:
            continue
        found[id(op)] = op
        edge += op.computed()
    return list(found.values())


def attention_products(function: FunctionView) -> list[Op]:
    """The products of computed tensors whose result, or one operand, is what a softmax takes or gives."""
    inside = {id(op) for op in reaching_softmax(function)}
    softmaxes = {id(op) for op in function.of_type("softmax")}
    found = []
    for op in function.of_type(*_PRODUCTS):
        scores = any(id(user) in inside | softmaxes for user in op.out.users)
        weights = any(id(maker) in softmaxes for value in op.computed() for maker in _through_layout(value))
        if (scores or weights) and len(op.computed()) > 1:
            found.append(op)
    return found


def _through_layout(value: Value) -> Iterator[Op]:
    op = value.maker
    while op is not None:
        yield op
        if op.type not in LAYOUT_OPS or not op.computed():
            return
        op = op.computed()[0].maker


def feeds_product(value: Value) -> bool:
    """Whether a value is an operand of a product of tensors, directly or through layout ops."""
    edge, seen = [value], {id(value)}
    while edge:
        for op in edge.pop().users:
            if op.type in (*_PRODUCTS, "scaled_dot_product_attention"):
                return True
            if op.type in LAYOUT_OPS and id(op.out) not in seen:
                seen.add(id(op.out))
                edge.append(op.out)
    return False
