"""The ``treeattn`` command. Under MPI only rank 0 prints, and every rank exits with the same code.

Exit codes: 0 done; 2 bad arguments or input (message on stderr, nothing written); 1 anything else.
"""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
import warnings
from typing import Any, NoReturn

import click

from treeattn import comm
from treeattn.errors import ArgumentError, ScheduleError, TransportError, TreeattnError

__all__ = ["main"]

# command -> the module below this package that holds it, loaded only when it is used
_COMMANDS = (
    *("decode", "compare", "plot", "paper", "schemes", "schedule"),
    *("roofline", "check-partials", "doctor"),
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
def commands() -> None:
    """Exact attention decode over a KV cache sharded across MPI ranks."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run one command and exit the process."""
    rank, size = comm.launched_as()
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # tables have characters that not every terminal knows
    if rank:
        # Ranks other than 0 keep their errors (stderr) but have nothing to say that rank 0 does not.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - it stays open until the process ends
    try:
        if size > 1:
            comm.mpi()  # first, so that a rank that fails alone can end the job
            signal.signal(signal.SIGINT, _interrupted)
        code = _run(arguments)
        sys.stdout.flush()
    except (click.ClickException, TreeattnError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        if rank == 0:
            print(message if message.startswith("Usage: ") else f"treeattn: {message}", file=sys.stderr)
        bad_input = isinstance(error, click.ClickException | ArgumentError | ScheduleError | TransportError)
        code = comm.leave(2 if bad_input else 1, message)
    except (click.Abort, KeyboardInterrupt) as error:
        code = comm.abort(error) if comm.started() else 1
    except BrokenPipeError:  # the reader of our output has seen enough
        code = _discard_output(0)
    except Exception as error:
        if comm.started():
            comm.abort(error)
        if not isinstance(error, OSError):
            raise
        print(f"treeattn: {error}", file=sys.stderr)
        code = _discard_output(1)
    sys.exit(code)


def _interrupted(*_: object) -> None:
    """End the job at once: unwinding would wait for ranks that have gone on, since closing is collective."""
    comm.abort(KeyboardInterrupt())


def _discard_output(code: int) -> int:
    """Leave nothing behind in a stream that cannot be written: Python would complain at exit."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    return code


def _show_warning(message: Warning | str, *_: Any) -> None:
    print(f"treeattn: warning: {message}", file=sys.stderr)


def _run(arguments: list[str] | None) -> int:
    result: Any = commands.main(args=arguments, prog_name="treeattn", standalone_mode=False)
    return result if isinstance(result, int) else 0
