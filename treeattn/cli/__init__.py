"""The ``treeattn`` command. Under MPI only rank 0 prints, and every rank exits with the same code.

Exit codes: 0 done; 2 bad arguments or input (message on stderr, nothing written); 130 interrupted; 143 ended
by SIGTERM; 1 anything else.
"""

from __future__ import annotations

import importlib
import io
import math
import os
import signal
import sys
import time
import warnings
from typing import Any, NoReturn, TextIO

import click

from treeattn import comm, files
from treeattn.errors import ArgumentError, ScheduleError, TransportError, TreeattnError

__all__ = ["main"]

INTERRUPTED = 130  # as shells count: 128 + SIGINT
CUT_OFF = 143  # 128 + SIGTERM, which schedulers send before the time limit

# command -> the module below this package that holds it, loaded only when it is used
_COMMANDS = (
    *("decode", "compare", "plot", "paper", "schemes", "schedule", "visible", "generate", "inspect"),
    *("topology", "calibrate", "simulate", "tune", "trace", "published"),
    *("tree", "verify", "roofline", "check-partials", "doctor"),
)


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"treeattn.cli.{name.replace('-', '_')}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Each with its first paragraph, where click's own list breaks off in mid sentence."""
        rows = [(name, self._first_paragraph(ctx, name)) for name in _COMMANDS]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def _first_paragraph(self, ctx: click.Context, name: str) -> str:
        command = self.get_command(ctx, name)
        words = command.help if command is not None else None
        return " ".join((words or "").partition("\n\n")[0].split())


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="treeattn")
@click.pass_context
def commands(context: click.Context) -> None:
    """Exact attention decode over a KV cache sharded across MPI ranks."""
    if comm.launched_as()[1] > 1 and context.invoked_subcommand != "doctor":  # which tells it in its table
        comm.world()


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run one command and exit the process."""
    rank, size = comm.launched_as()
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    screen = sys.stdout
    sys.stdout = _output(screen, rank)
    signal.signal(signal.SIGTERM, lambda *_: _end_interrupted(rank, "ended by SIGTERM", CUT_OFF))
    try:
        if size > 1:
            comm.mpi()  # first, so that a rank that fails alone can end the job
            signal.signal(signal.SIGINT, lambda *_: _end_interrupted(rank))
        code = _run(arguments)
        comm.leave(code, patience=math.inf)
    except (click.ClickException, TreeattnError, OSError) as error:
        code = _failed(error)
    except (click.Abort, KeyboardInterrupt):
        _end_interrupted(rank)
    except Exception as error:
        if isinstance(
            error.__cause__, KeyboardInterrupt
        ):  # what an extension module makes of it in its import
            _end_interrupted(rank)
        if comm.started():
            comm.abort(error)
        raise
    code = _written(screen, code)
    sys.stdout = screen
    sys.exit(code)


def _failed(error: Exception) -> int:
    """Say what is wrong, once: the lowest rank that failed, or one that failed alone and ends the job."""
    message = error.format_message() if isinstance(error, click.ClickException) else str(error)
    bad_input = isinstance(error, click.ClickException | ArgumentError | ScheduleError | TransportError)
    code = 2 if bad_input else 1
    if comm.leave(code, message):
        print(message if message.startswith("Usage: ") else f"treeattn: {message}", file=sys.stderr)
    return code


def _output(screen: TextIO | None, rank: int) -> TextIO:
    """Where this process prints: at once to a terminal; elsewhere it is kept, since a pipe that breaks or a
    disk that is full must not end one rank in the middle of what all of them do."""
    if screen is None or rank:  # closed by whoever started us; ranks other than 0 repeat rank 0
        return open(os.devnull, "w")
    if isinstance(screen, io.TextIOWrapper):
        screen.reconfigure(errors="replace")  # tables have characters that not every terminal knows
    return screen if screen.isatty() else io.StringIO()


def _written(screen: TextIO | None, code: int) -> int:
    """Print what was kept; the exit code."""
    try:
        if screen is not None and isinstance(sys.stdout, io.StringIO) and (text := sys.stdout.getvalue()):
            screen.write(text)
            screen.flush()
    except BrokenPipeError:  # the reader of our output has seen enough: that changes no verdict
        return code
    except OSError as error:
        print(f"treeattn: standard output: {error.strerror}; print to another place", file=sys.stderr)
        return 1
    return code


def _end_interrupted(rank: int, how: str = "interrupted", code: int = INTERRUPTED) -> NoReturn:
    """At once: unwinding a job would wait for ranks that have gone on, since closing is collective. Where all
    ranks are interrupted, the first that is not within an MPI call speaks, and ends the job."""
    time.sleep(min(rank, 5))
    kept = ", ".join(files.kept)
    print(f"treeattn: {how}: {f'kept {kept}' if kept else 'nothing was written'}", file=sys.stderr)
    comm.end_job(code)


def _show_warning(message: Warning | str, *_: Any) -> None:
    print(f"treeattn: warning: {message}", file=sys.stderr)


def _run(arguments: list[str] | None) -> int:
    result: Any = commands.main(args=arguments, prog_name="treeattn", standalone_mode=False)
    return result if isinstance(result, int) else 0
