"""The ``treeattn`` command. Under MPI only rank 0 prints, and every rank exits with the same code.

Exit codes: 0 done; 2 bad arguments or input (message on stderr, nothing written); 124 a wait for other ranks
reached its limit; 130 interrupted; 143 ended by SIGTERM, 129 by SIGHUP; 1 anything else, as a rank that dies.
"""

from __future__ import annotations

import ast
import functools
import importlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from treeattn import communicators, files, job, launch, mpi_library
from treeattn.cli.standard_output import StandardOutput
from treeattn.errors import PeerError, TreeattnError, one_line

__all__ = ["main"]

INTERRUPTED = 130  # as shells count: 128 + SIGINT


class _Commands(click.Group):
    """Every module beside this one that defines ``command``, imported only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_summaries())

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _summaries():
            return None
        command: click.Command = importlib.import_module(f"{__name__}.{name.replace('-', '_')}").command
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names of commands out of their files, and options."""
        names = [CompletionItem(name, help=text) for name, text in _summaries().items()]
        fitting = [item for item in names if item.value.startswith(incomplete)]
        return [*fitting, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Show each with its first paragraph, where click's own list breaks off in mid sentence."""
        with formatter.section("Commands"):
            formatter.write_dl(list(_summaries().items()))


@functools.cache
def _summaries() -> dict[str, str]:
    """Read each command's first paragraph of help out of its file: importing all of them takes seconds."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.FunctionDef) and node.name == "command":
                paragraph = (ast.get_docstring(node) or "").partition("\n\n")[0]
                found[path.stem.replace("_", "-")] = " ".join(paragraph.split())
    return found


_SETTINGS = {"help_option_names": ["-h", "--help"], "show_default": True}


@click.group(cls=_Commands, context_settings=_SETTINGS)
@click.version_option(package_name="treeattn")
@click.pass_context
def commands(context: click.Context) -> None:
    """Exact attention decode over a KV cache sharded across MPI ranks."""
    if launch.launched_as()[1] > 1 and context.invoked_subcommand != "doctor":  # which tells it in its table
        communicators.world()


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run one command and exit the process."""
    if "_TREEATTN_COMPLETE" in os.environ:  # a shell asks, which takes bytes: nothing of ours is started
        commands.main(prog_name="treeattn")
    rank, size = launch.launched_as()
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    screen, output = sys.stdout, StandardOutput.of_rank(rank)
    sys.stdout = output
    interrupted = functools.partial(_end_interrupted, rank)
    endings: dict[int, Callable[[], object]] = {signal.SIGINT: interrupted}
    for number in (signal.SIGTERM, signal.SIGHUP):  # of schedulers before the limit, of terminals that close
        endings[number] = functools.partial(_end_interrupted, rank, f"ended by {number.name}", 128 + number)
    job.end_on_signals(endings)
    try:
        if size > 1:
            job.start()  # first, so that a rank that fails alone can end the job
        code = _run(arguments)
        job.finalize(code)
    except (click.ClickException, TreeattnError, OSError) as error:
        code = _failed(error)
    except click.Abort:
        interrupted()
    except Exception as error:
        if isinstance(error.__cause__, SystemExit):  # a signal in the import of an extension module
            raise error.__cause__ from None
        if mpi_library.is_error(error):
            error = PeerError(f"a message failed, perhaps since another rank has ended: {error}")
            sys.exit(_failed(error))
        if size > 1 or mpi_library.started():
            job.abort(error)
        raise
    code = output.verdict(code)
    sys.stdout = screen
    if code:  # all agreed: when the first rank has left with it, srun sends SIGTERM to those still leaving
        endings.update(dict.fromkeys(endings, functools.partial(job.end, code)))
    sys.exit(code)


def _failed(error: Exception) -> int:
    """Say what is wrong, once: the lowest rank that failed, or one that failed alone and ends the job."""
    message = error.format_message() if isinstance(error, click.ClickException) else str(error)
    code = error.exit_code if isinstance(error, TreeattnError | click.ClickException) else 1
    message = message if message.startswith("Usage: ") else one_line(message)
    if job.finalize(code, message):
        print(message if message.startswith("Usage: ") else f"treeattn: {message}", file=sys.stderr)
    return code


def _end_interrupted(rank: int, how: str = "interrupted", code: int = INTERRUPTED) -> NoReturn:
    """At once: unwinding a job would wait for ranks that have gone on, since closing is collective. Where all
    ranks are interrupted, the lowest that runs speaks, and ends the job."""
    time.sleep(min(0.6 * rank, 1.2))  # the lower ones end the job meanwhile
    kept = ", ".join(files.kept)
    print(f"treeattn: {how}: {f'kept {kept}' if kept else 'nothing was written'}", file=sys.stderr)
    job.end(code)


def _show_warning(message: Warning | str, *_: Any) -> None:
    print(f"treeattn: warning: {message}", file=sys.stderr)


def _run(arguments: list[str] | None) -> int:
    result: Any = commands.main(args=arguments, prog_name="treeattn", standalone_mode=False)
    return result if isinstance(result, int) else 0
