"""Element by element: arithmetic, comparisons, logic, `select` and `cast`.

Arithmetic on int32 stays int32. `real_div`, `pow` and `floor_div` of integers follow numpy and are then
cut to integers, as coremltools' own value inference types them.
"""

import torch

from pdconvert.executors.mil import dtypes
from pdconvert.executors.mil.ops.row import OpRow, builtin, row

Tensor = torch.Tensor


def real_div(x: Tensor, y: Tensor) -> Tensor:
    """x / y with broadcasting; integers are cut towards zero."""
    if x.dtype.is_floating_point:
        return torch.div(x, y)
    return torch.div(x, y, rounding_mode="trunc")


def floor_div(x: Tensor, y: Tensor) -> Tensor:
    """x / y rounded towards minus infinity."""
    return torch.div(x, y, rounding_mode="floor")


def logical_not(x: Tensor) -> Tensor:
    """Boolean not."""
    return torch.logical_not(x)


def select(cond: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """a where cond is true, else b, with broadcasting."""
    return torch.where(cond, a, b)


def cast(x: Tensor, *, dtype: str) -> Tensor:
    """Change the element type. Floats become integers by cutting; non-zero becomes True; integers wrap around."""
    mil = dtypes.BY_NAME[dtype]
    if mil.kind == "uint" and mil.torch != mil.name:  # held in a wider type
        return (x.to(torch.int64) & (2**mil.bits - 1)).to(getattr(torch, mil.torch))
    return x.to(getattr(torch, mil.torch))


def sign(x: Tensor) -> Tensor:
    """-1, 0 or 1; NaN stays NaN."""
    return torch.where(x.isnan(), x, x.sign()) if x.dtype.is_floating_point else x.sign()


def clip(x: Tensor, *, alpha: float, beta: float) -> Tensor:
    """min(max(x, alpha), beta)."""
    return torch.clamp(torch.clamp(x, min=alpha), max=beta)


def threshold(x: Tensor, *, alpha: float) -> Tensor:
    """max(x, alpha)."""
    return torch.clamp(x, min=alpha)


def inverse(x: Tensor, *, epsilon: float = 1e-4) -> Tensor:
    """1 / (x + epsilon)."""
    return torch.reciprocal(x + epsilon)


def log(x: Tensor, *, epsilon: float = 1e-45) -> Tensor:
    """ln(x + epsilon)."""
    return torch.log(x + epsilon)


def rsqrt(x: Tensor, *, epsilon: float = 1e-12) -> Tensor:
    """1 / sqrt(x + epsilon)."""
    return (x + epsilon).rsqrt_() if epsilon else torch.rsqrt(x)


def exp2(x: Tensor) -> Tensor:
    """2 to the power x."""
    return torch.exp2(x).to(x.dtype)


def _mul_into(x: Tensor, y: Tensor, out: Tensor) -> Tensor:
    return torch.mul(x, y, out=out)


def _add_into(x: Tensor, y: Tensor, out: Tensor) -> Tensor:
    return torch.add(x, y, out=out)


def _sub_into(x: Tensor, y: Tensor, out: Tensor) -> Tensor:
    return torch.sub(x, y, out=out)


def _square_into(x: Tensor, out: Tensor) -> Tensor:
    return torch.mul(x, x, out=out)


def _real_div_into(x: Tensor, y: Tensor, out: Tensor) -> Tensor:
    return torch.div(x, y, out=out) if out.dtype.is_floating_point else real_div(x, y)


ROWS: dict[str, OpRow] = {
    "abs": builtin(torch.abs, copies=True),
    "acos": builtin(torch.acos),
    "asin": builtin(torch.asin),
    "atan": builtin(torch.atan),
    "atanh": builtin(torch.atanh),
    "ceil": builtin(torch.ceil, copies=True),
    "cos": builtin(torch.cos),
    "cosh": builtin(torch.cosh),
    "erf": builtin(torch.erf),
    "exp": builtin(torch.exp),
    "exp2": row(exp2),
    "floor": builtin(torch.floor, copies=True),
    "round": builtin(torch.round, copies=True),
    "sign": row(sign, copies=True),
    "sin": builtin(torch.sin),
    "sinh": builtin(torch.sinh),
    "sqrt": builtin(torch.sqrt),
    "square": builtin(torch.square, into=_square_into),
    "tan": builtin(torch.tan),
    "tanh": builtin(torch.tanh),
    "logical_not": row(logical_not),
    "clip": row(clip),
    "threshold": row(threshold),
    "inverse": row(inverse),
    "log": row(log),
    "rsqrt": row(rsqrt),
    "add": builtin(torch.add, "x y", into=_add_into),
    "sub": builtin(torch.sub, "x y", into=_sub_into),
    "mul": builtin(torch.mul, "x y", into=_mul_into),
    "real_div": row(real_div, into=_real_div_into),
    "floor_div": row(floor_div),
    "mod": builtin(torch.remainder, "x y"),
    "pow": builtin(torch.pow, "x y"),
    "maximum": builtin(torch.maximum, "x y", copies=True),
    "minimum": builtin(torch.minimum, "x y", copies=True),
    "equal": builtin(torch.eq, "x y"),
    "not_equal": builtin(torch.ne, "x y"),
    "less": builtin(torch.lt, "x y"),
    "less_equal": builtin(torch.le, "x y"),
    "greater": builtin(torch.gt, "x y"),
    "greater_equal": builtin(torch.ge, "x y"),
    "logical_and": builtin(torch.logical_and, "x y"),
    "logical_or": builtin(torch.logical_or, "x y"),
    "logical_xor": builtin(torch.logical_xor, "x y"),
    "select": row(select, copies=True),
    "cast": row(cast, view=True),
}
