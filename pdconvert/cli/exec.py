"""`pdconvert exec`: run one function of any `.mlpackage` on arrays, and trace it op by op."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdconvert.cli.params import UserPath, echo_json, examples, json_option, table
from pdconvert.errors import InputError, printable
from pdconvert.plain_files import refuse_special, replacing

if TYPE_CHECKING:
    import numpy as np

    from pdconvert.executors.mil.trace import TraceRow
    from pdconvert.forensics import Fault


@click.command(
    "exec",
    short_help="Run any .mlpackage on arrays, op by op.",
    epilog=examples(
        "pdconvert exec some.mlpackage --inputs in.npz --out out.npz --trace",
    ),
)
@click.argument("package", type=UserPath())
@click.option("--function", metavar="NAME", help="Which function. [default: the package's own default]")
@click.option("--inputs", type=UserPath(), required=True, metavar="NPZ", help="Arrays by input name.")
@click.option("--out", type=UserPath(), metavar="NPZ", help="Where to write the outputs by name.")
@click.option("--mode", type=click.Choice(["fp32", "fp16"]), default="fp16", show_default=True)
@click.option(
    "--trace", is_flag=True, help="Per op: range, overflow, flushed values, SQNR of fp16 against fp32."
)
@click.option(
    "--loss-db", type=click.FloatRange(min=0), default=20.0, show_default=True, help="Loss that is a fault."
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Run this many times, states living on; an input with a further leading axis gives one slice a step.",
)
@json_option
def command(
    package: Path,
    function: str | None,
    inputs: Path,
    out: Path | None,
    mode: str,
    trace: bool,
    loss_db: float,
    steps: int,
    as_json: bool,
) -> None:
    """Run one function of PACKAGE, written by any tool, on the arrays of an .npz file."""
    import numpy as np

    from pdconvert.executors.mil import MilSession, Package
    from pdconvert.executors.mil.trace import Tracer
    from pdconvert.forensics import find_fault

    if out is not None:
        refuse_special(out, "name the .npz to write")
    arrays = _read(inputs)
    opened = Package.open(package)
    wanted = opened.function(function).inputs
    fault: tuple[int, Fault] | None = None
    rows: list[TraceRow] = []
    results: list[dict[str, Any]] = []
    calls = (_step(arrays, wanted, step, steps) for step in range(steps))
    if trace:
        tracer = Tracer(opened, function)
        for step, call in enumerate(calls):
            found = tracer.run(call)
            results.append(found.outputs if mode == "fp16" else found.reference)
            if fault is None:
                rows = found.rows
                first = find_fault(rows, loss_db=loss_db)
                fault = (step, first) if first else None
    else:
        session = MilSession(opened, function, mode=mode)
        state = session.make_state()
        results = [session.run(call, state) for call in calls]
    outputs = {name: np.stack([np.asarray(one[name]) for one in results]) for name in results[0]}
    if steps == 1:
        outputs = {name: value[0] for name, value in outputs.items()}
    if out is not None:
        _write(out, outputs)
    if as_json:
        echo_json(_content(outputs, rows, fault, trace))
    else:
        _print(outputs, rows, fault, loss_db, steps)


def _read(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, each of a kind that a tensor can have.

    Raises:
        InputError: no such file, or not an archive of plain numbers.
    """
    import zipfile
    import zlib
    from tokenize import TokenError

    import numpy as np

    refuse_special(path, "give an .npz with one array for each input")
    numpys = (ValueError, OSError, EOFError, AttributeError, TypeError, RuntimeError, TokenError)
    try:
        with np.load(path, allow_pickle=False) as content:
            arrays = {name: np.asarray(content[name]) for name in content.files}
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; give an .npz with one array for each input") from None
    except (*numpys, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(
            f"{path}: not an .npz file of plain arrays (numpy: {type(error).__name__}); write it with numpy.savez"
        ) from error
    for name, value in arrays.items():
        if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:
            raise InputError(
                f"{path}: {name!r} is of type {value.dtype}; inputs are integers, floats or bool"
            )
    return {name: value.astype(value.dtype.newbyteorder("=")) for name, value in arrays.items()}


def _write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write an .npz file of just this name; an existing one is replaced when the new one is whole.

    Raises:
        InputError: the system refused, or a name is longer than an archive can hold.
    """
    import struct
    import zipfile

    from numpy.lib.format import write_array

    try:
        with replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
            for name, value in arrays.items():  # numpy.savez cannot name an array `file`
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    write_array(member, value, allow_pickle=False)
    except (OSError, struct.error, ValueError) as error:
        raise InputError(f"{path}: cannot be written ({error})") from error


def _step(arrays: dict[str, np.ndarray], wanted: Any, step: int, steps: int) -> dict[str, np.ndarray]:
    """The inputs of one step: arrays with one axis more than the input are sliced along it."""
    call = {}
    for name, value in arrays.items():
        stacked = name in wanted and value.ndim == len(wanted[name].shape) + 1
        if stacked and len(value) != steps:
            raise InputError(f"input {name!r} has {len(value)} steps, and --steps is {steps}")
        call[name] = value[step] if stacked else value
    return call


def _content(
    outputs: dict[str, np.ndarray], rows: list[TraceRow], fault: tuple[int, Fault] | None, traced: bool
) -> dict[str, Any]:
    shapes = {
        name: {"shape": list(value.shape), "dtype": str(value.dtype)} for name, value in outputs.items()
    }
    if not traced:
        return {"outputs": shapes}
    found = {**fault[1].to_json(), "step": fault[0]} if fault else None
    return {"outputs": shapes, "trace": [_row(row) for row in rows], "fault": found}


def _print(
    outputs: dict[str, np.ndarray],
    rows: list[TraceRow],
    fault: tuple[int, Fault] | None,
    loss_db: float,
    steps: int,
) -> None:
    """The trace (if there is one) of the step at fault or of the last one, and the outputs."""
    if rows:
        header = ("op", "output", "min", "max", "of fp16", "non-finite", "flushed", "SQNR dB")
        lines = [
            (row.op.op_type, row.name, f"{row.low:.4g}", f"{row.high:.4g}", f"{row.fp16_share:.2%}",
             row.nonfinite, row.flushed, f"{row.sqnr_db:.1f}")
            for row in rows
        ]  # fmt: skip
        click.echo(table(lines, header))
        if fault:
            where = f" in step {fault[0]}, traced above" if steps > 1 else ""
            click.echo(f"fault{where}: {fault[1].sentence()}")
        else:  # losses add up: each op may be good and the outputs bad
            kept = min((row.sqnr_db for row in rows if row.name in outputs), default=math.nan)
            click.echo(
                f"no op by itself overflows or loses {loss_db:g} dB in fp16; the outputs keep {kept:.1f} dB"
            )
    for name, value in outputs.items():
        click.echo(f"{printable(name)}: {list(value.shape)} {value.dtype}")


def _row(row: TraceRow) -> dict[str, Any]:
    return {
        "op": row.op.op_type,
        "output": row.name,
        "position": row.op.position,
        "dtype": row.dtype,
        "shape": list(row.shape),
        "min": _number(row.low),
        "max": _number(row.high),
        "fp16_share": _number(row.fp16_share),
        "nonfinite": row.nonfinite,
        "flushed": row.flushed,
        "sqnr_db": _number(row.sqnr_db),
        "lost_db": _number(row.lost_db),
    }


def _number(value: float) -> float | str:
    """As the JSON output has it: `inf` and `-inf` in words; a NaN becomes null when it is written."""
    return str(value) if math.isinf(value) else value
