"""`pdconvert exec`: run one function of any `.mlpackage` on arrays, and trace it op by op."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdconvert.cli.params import UserPath, echo_json, examples, json_option, table
from pdconvert.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from pdconvert.executors.mil.trace import TraceRow


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

    arrays = _read(inputs)
    opened = Package.open(package)
    calls = [_step(arrays, opened.function(function).inputs, step, steps) for step in range(steps)]
    rows: list[TraceRow] = []
    results: list[dict[str, Any]] = []
    if trace:
        from pdconvert.executors.mil.trace import Tracer

        tracer = Tracer(opened, function)
        for call in calls:
            found = tracer.run(call)
            rows = found.rows
            results.append(found.outputs if mode == "fp16" else found.reference)
    else:
        session = MilSession(opened, function, mode=mode)
        state = session.make_state()
        results = [session.run(call, state) for call in calls]
    outputs = {name: np.stack([np.asarray(one[name]) for one in results]) for name in results[0]}
    if steps == 1:
        outputs = {name: value[0] for name, value in outputs.items()}
    if out is not None:
        np.savez(out, allow_pickle=False, **outputs)
    _report(outputs, rows, loss_db, as_json, trace)


def _read(path: Path) -> dict[str, np.ndarray]:
    import zipfile

    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as content:
            return {name: content[name] for name in content.files}
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; give an .npz with one array for each input") from None
    except (ValueError, OSError, AttributeError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{path}: not an .npz file of plain arrays ({' '.join(str(error).split())})"
        ) from error


def _step(arrays: dict[str, np.ndarray], wanted: Any, step: int, steps: int) -> dict[str, np.ndarray]:
    """The inputs of one step: arrays with one axis more than the input are sliced along it."""
    call = {}
    for name, value in arrays.items():
        stacked = name in wanted and value.ndim == len(wanted[name].shape) + 1
        if stacked and len(value) != steps:
            raise InputError(f"input {name!r} has {len(value)} steps, and --steps is {steps}")
        call[name] = value[step] if stacked else value
    return call


def _report(
    outputs: dict[str, np.ndarray], rows: list[TraceRow], loss_db: float, as_json: bool, traced: bool
) -> None:
    from pdconvert.forensics import find_fault

    fault = find_fault(rows, loss_db=loss_db)
    if as_json:
        shapes = {
            name: {"shape": list(value.shape), "dtype": str(value.dtype)} for name, value in outputs.items()
        }
        content: dict[str, Any] = {"outputs": shapes}
        if traced:
            content |= {"trace": [_row(row) for row in rows], "fault": fault.to_json() if fault else None}
        echo_json(content)
        return
    if traced:
        header = ("op", "output", "min", "max", "of fp16", "non-finite", "flushed", "SQNR dB")
        lines = [
            (row.op.op_type, row.name, f"{row.low:.4g}", f"{row.high:.4g}", f"{row.fp16_share:.2%}",
             row.nonfinite, row.flushed, f"{row.sqnr_db:.1f}")
            for row in rows
        ]  # fmt: skip
        click.echo(table(lines, header))
        click.echo(f"fault: {fault.sentence()}" if fault else "no op overflows or loses that much in fp16")
    for name, value in outputs.items():
        click.echo(f"{name}: {list(value.shape)} {value.dtype}")


def _row(row: TraceRow) -> dict[str, Any]:
    return {
        "op": row.op.op_type,
        "output": row.name,
        "position": row.op.position,
        "dtype": row.dtype,
        "shape": list(row.shape),
        "min": row.low,
        "max": row.high,
        "fp16_share": row.fp16_share,
        "nonfinite": row.nonfinite,
        "flushed": row.flushed,
        "sqnr_db": row.sqnr_db,
        "lost_db": row.lost_db,
    }
