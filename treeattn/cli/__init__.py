"""The ``treeattn`` command. On several ranks only rank 0 prints, and every rank exits with the same code.

Exit codes: 0 done; 2 bad arguments or input (message on stderr, nothing written); 124 a wait for other ranks
reached its limit; 130 interrupted; 143 ended by SIGTERM, 129 by SIGHUP; 1 anything else, as a rank that dies.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from treeattn import files
from treeattn.cli.standard_output import StandardOutput
from treeattn.errors import PeerError, TreeattnError, one_line
from treeattn.mpi import communicators, job, launch, library

__all__ = ["main"]

INTERRUPTED = 130  # as shells count: 128 + SIGINT


#: Names of commands and their help: of a module beside this one each, imported when it is used.
_COMMANDS = {
    "cache-node": "Keep keys and values for the model process, rank 0, and attend to them until it ends.",
    "calibrate": "Measure what messages cost between the ranks of this job, and write it as a cluster file.",
    "check-partials": "Find out why the partial results of several ranks do not add up. Needs no MPI.",
    "compare": "Measure schemes against each other, whole steps and the reduction alone, and say which is "
    "faster.",
    "decode": "Decode the query of INPUT over its KV cache, every rank holding a shard of the tokens.",
    "doctor": "Say what treeattn finds on this machine, and how to mend what is missing.",
    "generate": "Continue a prompt: text on stdout as it comes, what was measured on stderr.",
    "paper": "Print the paper's experiments, its numbers and the model side by side (default: all).",
    "plot": "Draw results of `treeattn compare --out`: time over size, relative to a baseline, scaling "
    "with ranks, predicted against measured. Needs no MPI; pip install '.[study]'.",
    "report": "Write results of `treeattn compare --out` as one HTML file that needs no network and no MPI.",
    "roofline": "Measure decoding steps (one query, 8 KV heads x 128) against what this machine's memory "
    "delivers.",
    "schedule": "Show who sends what to whom in SCHEME, after proving that it counts every rank exactly "
    "once.",
    "schemes": "List every scheme with its parameters: what it is and, with --wide, its time and "
    "restriction.",
    "simulate": "Predict what a reduction costs on a cluster that need not be here, message by message. "
    "Needs no MPI.",
    "tune": "Search for the schedule that suits a machine: the catalogue's schemes and parameters, and "
    "ranks reordered, each proved and simulated. Needs no MPI.",
    "verify": "Verify the draft tokens of FILE against its KV cache, every rank holding a shard of the "
    "context.",
}


class _Commands(click.Group):
    """Those of `_COMMANDS`: importing all of them to print their help would take seconds."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"{__name__}.{name.replace('-', '_')}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if (near := difflib.get_close_matches(args[0], _COMMANDS, 1)) and args[0] not in _COMMANDS:
            ctx.fail(f"No such command {args[0]!r:.60}: did you mean {near[0]}?")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names of commands without their modules, and options."""
        names = [CompletionItem(name, help=text) for name, text in _COMMANDS.items()]
        fitting = [item for item in names if item.value.startswith(incomplete)]
        return [*fitting, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


_HELP = ["-h", "--help"]
_SETTINGS: dict[str, Any] = {"help_option_names": _HELP, "show_default": True}


@click.group(cls=_Commands, context_settings=_SETTINGS)
@click.version_option(package_name="treeattn")
@click.pass_context
def commands(context: click.Context) -> None:
    """Exact attention decode over a KV cache sharded across MPI ranks."""
    asked = {context.invoked_subcommand, *context.obj}
    if launch.launched_as()[1] > 1 and asked.isdisjoint({"doctor", *_HELP}):
        communicators.intracomm(None)  # where ranks do not find each other, each would answer as one alone


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run one command and exit the process."""
    if "_TREEATTN_COMPLETE" in os.environ:  # a shell asks, which takes bytes: nothing of ours is started
        commands.main(prog_name="treeattn")
    words = sys.argv[1:] if arguments is None else arguments
    rank, size = launch.launched_as()
    if not {*_HELP, "--version"}.isdisjoint(words):
        size = 1  # who only asks that waits for no other rank
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    screen = sys.stdout
    output = StandardOutput(open(os.devnull, "w") if rank else screen)  # noqa: SIM115
    sys.stdout = output
    interrupted = functools.partial(_end_interrupted, rank)
    endings: dict[int, Callable[[], object]] = {signal.SIGINT: interrupted}
    for number in (signal.SIGTERM, signal.SIGHUP):  # of schedulers before the limit, of terminals that close
        endings[number] = functools.partial(_end_interrupted, rank, f"ended by {number.name}", 128 + number)
    job.end_on_signals(endings)
    try:
        if size > 1:
            job.start()  # first, so that a rank that fails alone can end the job
        code = _run(words)
        job.finalize(code)
    except (click.ClickException, TreeattnError, OSError) as error:
        code = _failed(error)
    except click.Abort:
        interrupted()
    except Exception as error:
        if isinstance(error.__cause__, SystemExit):  # a signal in the import of an extension module
            raise error.__cause__ from None
        if library.is_error(error):
            error = PeerError(f"a message failed, perhaps since another rank has ended: {error}")
            sys.exit(_failed(error))
        if size > 1 or library.started():
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


def _run(words: list[str]) -> int:
    result: Any = commands.main(args=words, prog_name="treeattn", standalone_mode=False, obj=words)
    return result if isinstance(result, int) else 0
