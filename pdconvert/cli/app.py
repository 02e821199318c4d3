"""The `pdconvert` group: its options, its subcommands, and how an exception becomes an exit code.

| exit | meaning |
|---|---|
| 0 | done and passed |
| 1 | a check failed: the files are kept, their verdict is `fail` |
| 2 | bad input or usage, or the system refused (disk full, no permission): nothing is left behind |
| 70 | a bug in pdconvert (`EX_SOFTWARE`) |
| 130, 143 | interrupted by Ctrl-C, or by SIGTERM |
| 141 | whoever read standard output has closed it |
"""

import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import click

from pdconvert import __version__
from pdconvert.cli import (
    bench,
    build,
    compare,
    decode,
    doctor,
    eval,
    exec,
    export,
    init,
    inspect,
    lint,
    listing,
    plan,
    prefill,
    report,
    run,
    verify,
)
from pdconvert.errors import InputError, PdconvertError, printable
from pdconvert.interrupts import exit_on_sigterm

EXIT_BAD_INPUT = 2
EXIT_INTERNAL = 70
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141
OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "cannot allocate memory", "unable to allocate")

SUBCOMMANDS: tuple[click.Command, ...] = (
    init.command,
    plan.command,
    build.command,
    run.command,
    prefill.command,
    decode.command,
    verify.command,
    report.command,
    compare.command,
    eval.command,
    bench.command,
    inspect.command,
    exec.command,
    export.command,
    lint.command,
    listing.command,
    doctor.command,
)


class ErrorBoundary(click.Group):
    """A group which reports every error in one or two lines on stderr and exits with its code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Keep the commands in the order of a day's work, not of the alphabet."""
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand; turn what it raises into a message and an exit code."""
        debug = ctx.params["debug"]
        try:
            with exit_on_sigterm():
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except KeyboardInterrupt:
            _report("interrupted", debug)
            ctx.exit(EXIT_INTERRUPTED)
        except BrokenPipeError:
            # Python flushes stdout once more at exit: give it a place where that succeeds.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(EXIT_PIPE_CLOSED)
        except PdconvertError as error:
            _report(f"error: {error}", debug, getattr(error, "__notes__", ()))
            ctx.exit(error.exit_code)
        except OSError as error:
            _report(f"error: {_os_error_text(error)}", debug)
            ctx.exit(EXIT_BAD_INPUT)
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                _internal(ctx, error, debug)
            _report(
                "error: not enough memory; close other programs, or take a smaller model or function", debug
            )
            ctx.exit(EXIT_BAD_INPUT)
        except Exception as error:  # noqa: BLE001  the outermost boundary: report, never swallow
            _internal(ctx, error, debug)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Like click's, with usage errors in the form of all other errors."""
        run: Callable[[], Any] = partial(
            super().main, args, prog_name, complete_var, standalone_mode=False, **extra
        )
        if not standalone_mode:
            return run()
        try:
            code = run()
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message(), err=True)
            code = error.exit_code
        except click.UsageError as error:
            path = error.ctx.command_path if error.ctx else "pdconvert"
            _report(f"error: {error.format_message()} See `{path} --help`.", debug=False)
            code = error.exit_code
        except click.Abort:
            _report("interrupted", debug=False)
            code = EXIT_INTERRUPTED
        sys.exit(code if isinstance(code, int) else 0)


def _internal(ctx: click.Context, error: Exception, debug: bool) -> NoReturn:
    """Report a bug of pdconvert and leave."""
    hint = "" if debug else " (run it again as `pdconvert --debug ...` for the traceback)"
    text = " ".join(str(error).split())[:500]
    notes = getattr(error, "__notes__", ())
    _report(f"internal error: {type(error).__name__}: {text}{hint}", debug, notes)
    ctx.exit(EXIT_INTERNAL)


def _is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out; torch and mlx say so in the words of a RuntimeError."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in OUT_OF_MEMORY)


def _report(message: str, debug: bool, notes: Sequence[str] = ()) -> None:
    """Write an error to stderr: its message, its notes on a second line, the traceback if asked for."""
    if debug and sys.exc_info()[0] is not None:
        click.echo(traceback.format_exc().rstrip(), err=True)
    click.echo("\n".join(map(printable, message.split("\n"))), err=True)
    if notes:
        click.echo("  " + "; ".join(notes), err=True)


def _os_error_text(error: OSError) -> str:
    """Say in one line what the operating system refused, and where."""
    what = error.strerror or str(error) or type(error).__name__
    where = f": {error.filename}" if error.filename is not None else ""
    return f"{what}{where}"


def _quiet_libraries() -> None:
    """Keep third-party chatter (missing Core ML libraries on Linux, version notes) off stderr."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in ("coremltools", "matplotlib", "torch", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)


@click.group(cls=ErrorBoundary, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pdconvert")
@click.option("--debug", is_flag=True, help="Show tracebacks and debug messages.")
def main(debug: bool) -> None:
    """Compile a causal LM into an ANE prefill package and MLX decode weights, and prove both."""
    _quiet_libraries()
    try:
        os.getcwd()
    except FileNotFoundError:
        raise InputError("the working directory is gone; change to one that exists") from None
    if debug:
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
        logging.getLogger("pdconvert").setLevel(logging.DEBUG)


for _command in SUBCOMMANDS:
    main.add_command(_command)
