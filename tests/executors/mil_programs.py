"""Build small ML programs for tests of the MIL executor, and compare it with coremltools' own values.

A `Case` is one use of one op. All cases of one op and one opset go into one program, which is saved and
run by the executor in both modes. What must come out is, unless a case brings its own reference, what
coremltools infers when the same op is built on constants (`Var.val`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pdconvert.executors.mil import MilSession, Package
from pdconvert.quiet import quiet_coremltools

ct = quiet_coremltools()

from coremltools.converters.mil import Builder as mb  # noqa: E402
from coremltools.converters.mil.mil import Function, Program, get_new_symbol, types  # noqa: E402, F401
from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry  # noqa: E402

TARGETS = {15: ct.target.iOS15, 16: ct.target.iOS16, 17: ct.target.iOS17, 18: ct.target.iOS18}
_IO = {np.dtype(np.float16): types.fp16, np.dtype(np.float32): types.fp32, np.dtype(np.int32): types.int32}
_HOLDS = {
    types.bool: "int32",
    types.int8: "int32",
    types.uint8: "int32",
    types.int16: "int32",
    types.uint16: "int32",
}


@dataclass(frozen=True)
class Case:
    """One use of one op.

    Attributes:
        tensors: MIL inputs that are arrays (a list for a tuple input). They become inputs of the
            program, or constants where the op wants those.
        params: MIL inputs that are attributes.
        expected: reference: takes the tensors by name and returns an array or several; coremltools' own
            value where None.
        since: first opset, as an iOS version.
        until: last opset.
        constants: tensors that are constants of the program although the op takes computed ones too.
        rtol: relative tolerance of fp32.
        atol: absolute tolerance of fp32.
    """

    tensors: Mapping[str, Any]
    params: Mapping[str, Any] = field(default_factory=dict)
    expected: Callable[..., Any] | None = None
    since: int = 15
    until: int = 18
    constants: tuple[str, ...] = ()
    rtol: float = 1e-4
    atol: float = 1e-5


def opsets(op: str) -> list[int]:
    """Return the iOS versions in which an op changed, beginning with the first that has it."""
    registered = SSAOpRegistry.core_ops[op]
    found: list[int] = []
    for version, target in TARGETS.items():
        if target in registered and (not found or registered[target] is not registered[TARGETS[found[-1]]]):
            found.append(version)
    return found


def _spec(op: str, version: int) -> Any:
    return SSAOpRegistry.core_ops[op][TARGETS[version]].input_spec.input_types


def _fits(op: str, version: int, case: Case) -> bool:
    known = _spec(op, version)
    return case.since <= version <= case.until and all(
        name in known for name in (*case.tensors, *case.params)
    )


def _is_constant(spec: Any, case: Case, name: str) -> bool:
    return name in case.constants or getattr(spec[name], "const", False)


def _constant(array: np.ndarray) -> Any:
    return mb.const(val=array)


def _build(op: str, version: int, case: Case, variable: Callable[[np.ndarray], Any]) -> list[Any]:
    """Build one op; `variable` makes the value of an input that need not be constant."""
    spec = _spec(op, version)
    given: dict[str, Any] = dict(case.params)
    for name, value in case.tensors.items():
        make = _constant if _is_constant(spec, case, name) else variable
        given[name] = [make(v) for v in value] if isinstance(value, list) else make(value)
    result = getattr(mb, op)(**given)
    return list(result) if isinstance(result, list | tuple) else [result]


def inferred(op: str, version: int, case: Case) -> list[np.ndarray]:
    """Return what coremltools itself computes for a case."""
    with Function({}, opset_version=TARGETS[version]):
        outputs = _build(op, version, case, lambda array: _constant(array.copy()))
    for output in outputs:
        assert output.val is not None, (
            f"coremltools infers no value of {op}; the case needs its own reference"
        )
    return [np.asarray(output.val) for output in outputs]


def save_program(
    path: Path,
    inputs: Mapping[str, np.ndarray | tuple[tuple[Any, ...], Any]],
    body: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    version: int = 18,
    states: Mapping[str, tuple[tuple[int, ...], Any]] | None = None,
    inputs_as: Sequence[Any] | None = None,
) -> Path:
    """Save a program of one function and return its path.

    Args:
        path: where.
        inputs: an example array, or (shape, MIL type), for each input.
        body: takes the inputs by name (states too) and returns the outputs by name.
        version: iOS version of the opset.
        states: shape and MIL type of each state.
        inputs_as: the inputs as `ct.convert` takes them, where shapes are symbolic.
    """
    placeholders = {}
    for name, value in inputs.items():
        shape, dtype = (value.shape, _IO[value.dtype]) if isinstance(value, np.ndarray) else value
        placeholders[name] = mb.placeholder(shape, dtype=dtype)
    for name, (shape, dtype) in (states or {}).items():
        placeholders[name] = mb.state_tensor_placeholder(shape, dtype=dtype)
    program = Program()
    with Function(placeholders, opset_version=TARGETS[version]) as function:
        outputs = body(function.inputs)
        function.set_outputs([mb.identity(x=value, name=name) for name, value in outputs.items()])
    program.add_function("main", function)
    model = ct.convert(
        program,
        convert_to="mlprogram",
        minimum_deployment_target=TARGETS[version],
        pass_pipeline=ct.PassPipeline.EMPTY,
        skip_model_load=True,
        **({"inputs": list(inputs_as)} if inputs_as else {}),
    )
    model.save(str(path))
    return path


def _as_input(array: np.ndarray, version: int) -> np.ndarray:
    """Return the array that a function input holds for a value: fp16 from iOS 16 on, fp32 or int32; rank >= 1."""
    array = np.atleast_1d(array)
    if array.dtype == np.float16 and version < 16:
        return array.astype(np.float32)
    return array if array.dtype in _IO else array.astype(np.int32)


def _run_cases(
    folder: Path, op: str, version: int, cases: Sequence[Case]
) -> dict[str, list[list[np.ndarray]]]:
    """Run all cases in one program; returns outputs by mode, case and output."""
    inputs: dict[str, np.ndarray] = {}
    counts: list[int] = []

    def body(variables: Mapping[str, Any]) -> dict[str, Any]:
        outputs: dict[str, Any] = {}
        order = iter(variables.values())

        def variable(array: np.ndarray) -> Any:
            value = next(order) if array.ndim else mb.squeeze(x=next(order), axes=[0])
            wanted = types.numpy_type_to_builtin_type(array.dtype)
            return value if value.dtype == wanted else mb.cast(x=value, dtype=types.builtin_to_string(wanted))

        for number, case in enumerate(cases):
            built = _build(op, version, case, variable)
            counts.append(len(built))
            for place, value in enumerate(built):
                held = _HOLDS.get(value.dtype)
                if held is None and value.dtype == types.fp16 and version < 16:
                    held = "fp32"
                outputs[f"c{number}_{place}"] = mb.cast(x=value, dtype=held) if held else value
        return outputs

    for number, case in enumerate(cases):
        spec = _spec(op, version)
        for name, value in case.tensors.items():
            if not _is_constant(spec, case, name):
                for place, array in enumerate(value if isinstance(value, list) else [value]):
                    inputs[f"c{number}_{name}_{place}"] = _as_input(array, version)
    package = Package.open(save_program(folder / f"{op}_{version}.mlpackage", inputs, body, version))
    results = {}
    for mode in ("fp32", "fp16"):
        found = MilSession(package, mode=mode).run(inputs)
        results[mode] = [
            [found[f"c{number}_{place}"].numpy() for place in range(count)]
            for number, count in enumerate(counts)
        ]
    return results


def _expected(op: str, version: int, case: Case) -> list[np.ndarray]:
    if case.expected is None:
        return inferred(op, version, case)
    tensors = {
        name: [v.astype(np.float32) if v.dtype == np.float16 else v for v in value]
        if isinstance(value, list)
        else value.astype(np.float32) if value.dtype == np.float16 else value
        for name, value in case.tensors.items()
    }  # fmt: skip
    value = case.expected(**tensors)
    return [np.asarray(v) for v in value] if isinstance(value, list | tuple) else [np.asarray(value)]


def _is_half(case: Case) -> bool:
    arrays = [a for v in case.tensors.values() for a in (v if isinstance(v, list) else [v])]
    return any(a.dtype == np.float16 for a in arrays)


def check_op(op: str, cases: Iterable[Case], folder: Path) -> None:
    """Check one op on all cases, in every opset that changed it.

    In fp32 mode the result is the reference's. In fp16 mode it is the fp32 mode's result, rounded, where
    the case is of type fp16, and the same where it is not: inside one op nothing else is rounded.
    """
    every = list(cases)
    ran = 0
    versions = opsets(op)
    if not all(any(_fits(op, version, case) for version in versions) for case in every):
        versions.append(18)
    for version in versions:
        chosen = [case for case in every if _fits(op, version, case)]
        if not chosen:
            continue
        ran += len(chosen)
        results = _run_cases(folder, op, version, chosen)
        for number, case in enumerate(chosen):
            wanted = _expected(op, version, case)
            exact, rounded = results["fp32"][number], results["fp16"][number]
            assert len(wanted) == len(exact)
            where = f"{op}, iOS {version}, case {number}: {case}"
            half = _is_half(case) or any(want.dtype == np.float16 for want in wanted)
            for want, got, low in zip(wanted, exact, rounded, strict=True):
                assert got.shape == want.shape, f"shape {got.shape}, not {want.shape}: {where}"
                slack = {"rtol": 2e-3, "atol": 2e-3} if half else {"rtol": case.rtol, "atol": case.atol}
                np.testing.assert_allclose(
                    got.astype(np.float64), want.astype(np.float64), err_msg=where, **slack
                )
                if half and got.dtype == np.float32:
                    with np.errstate(over="ignore"):
                        got = got.astype(np.float16).astype(np.float32)
                np.testing.assert_array_equal(low, got, err_msg=f"fp16 mode: {where}")
    assert ran >= len(every), f"{len(every)} cases, {ran} runs: some case fits no opset of {op}"
