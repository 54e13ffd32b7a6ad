"""``treeattn doctor``: what this machine has, what is missing, and the remedy."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
from rich.console import Console
from rich.table import Table

from treeattn import comm as comm_
from treeattn import files, report
from treeattn.backends import compile, cpu
from treeattn.errors import TreeattnError

__all__ = ["command"]


class Finding(NamedTuple):
    """One line of the table. `verdict` is ok, slow (works, but), missing (not needed here) or broken."""

    subject: str
    verdict: str
    what: str
    remedy: str = ""


@click.command("doctor")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the findings here.")
def command(json_path: Path | None) -> int:
    """Say what treeattn finds on this machine, and how to mend what it misses.

    Exit code 1 if something is broken that every use needs.
    """
    findings = list(_findings())
    files.output_writer(json_path)(report.as_json([finding._asdict() for finding in findings]))
    table = Table(box=None, pad_edge=False)
    for heading in ("", "verdict", "found", "remedy"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row(*finding)
    Console(width=None if sys.stdout.isatty() else 150, markup=False).print(table)
    return int(any(finding.verdict == "broken" for finding in findings))


def _findings() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")
    cores = len(os.sched_getaffinity(0))
    yield Finding("processor", "ok", f"{report.cpu_name()}, {cores} usable cores, {platform.machine()}")
    yield from _mpi()
    yield from _kernels()
    yield from _gpu()


def _mpi() -> Iterator[Finding]:
    try:
        library = comm_.mpi().Get_library_version().split("\n")[0].strip(" \t\x00")
    except TreeattnError as error:
        yield Finding("MPI library", "broken", str(error), "pip install mpich, or load the site's MPI module")
        return
    yield Finding("MPI library", "ok", library)
    beside = Path(sys.executable).parent / "mpiexec"
    launcher = str(beside) if beside.exists() else shutil.which("mpiexec")
    if launcher is None:
        yield Finding("launcher", "missing", "no mpiexec", "srun, or put the MPI library's mpiexec on PATH")
        return
    yield _launched(launcher)


def _launched(launcher: str) -> Finding:
    """Start two ranks and see whether they find each other."""
    program = "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"
    # A job of its own: the variables of a job that we may be part of must not leak into it.
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("PMI", "PMIX", "OMPI_", "HYDI", "MPI_"))
    }
    try:
        done = subprocess.run(
            [launcher, "-n", "2", sys.executable, "-c", program],
            capture_output=True, text=True, timeout=60, env=clean, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("launcher", "broken", f"{launcher}: {error}", "use the MPI library's own mpiexec")
    if "".join(done.stdout.split()) == "22":  # the ranks' lines may run into each other
        return Finding("launcher", "ok", f"{launcher} starts two ranks that find each other")
    complaint = (done.stderr.strip().splitlines() or [f"printed {done.stdout.split()}"])[0]
    return Finding(
        "launcher", "broken", f"{launcher}: {complaint}", "use the mpiexec of the same MPI as mpi4py"
    )


def _kernels() -> Iterator[Finding]:
    problem = cpu.compiled_kernels_problem()
    if problem is not None:
        yield Finding(
            "CPU kernels", "slow", f"NumPy: {problem}", "install a C compiler (apt install gcc), or set CC"
        )
        return
    isa = compile.chosen_isa()
    yield Finding("CPU kernels", "ok", f"{isa} (this processor runs {', '.join(compile.available_isas())})")
    yield Finding("kernel cache", "ok", str(compile.library_path(isa)))


def _gpu() -> Iterator[Finding]:
    """Only told, never needed: no command of this version runs on a GPU."""
    present = importlib.util.find_spec("cupy") is not None
    found = "CuPy is installed" if present else "CuPy is not installed"
    yield Finding("GPU", "missing", f"{found}; the commands of this version compute on CPUs")
