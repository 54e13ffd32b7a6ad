"""``treeattn doctor``: what this machine has, what is missing, and the remedy."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from treeattn import comm as comm_
from treeattn import files
from treeattn.backends import cpu
from treeattn.backends.cpu import compile
from treeattn.cli import doctor_gpu, probe
from treeattn.cli.probe import Finding
from treeattn.errors import TreeattnError
from treeattn.study import environment

__all__ = ["command"]


@click.command("doctor")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the findings here.")
def command(json_path: Path | None) -> int:
    """Say what treeattn finds on this machine, and how to mend what it misses.

    Exit code 1 if something is broken that every use needs.
    """
    findings = list(_findings())
    files.output_writer(json_path)(environment.as_json([finding._asdict() for finding in findings]))
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
    yield Finding("processor", "ok", f"{environment.cpu_name()}, {cores} usable cores, {platform.machine()}")
    yield from _mpi()
    yield from _kernels()
    yield from doctor_gpu.findings()


def _mpi() -> Iterator[Finding]:
    try:
        library = comm_.mpi().Get_library_version().split("\n")[0].strip(" \t\x00")
    except TreeattnError as error:
        yield Finding("MPI library", "broken", str(error), "pip install mpich, or load the site's MPI module")
        return
    yield Finding("MPI library", "ok", library)
    launcher = probe.launcher()
    if launcher is None:
        yield Finding("launcher", "missing", "no mpiexec", "srun, or put the MPI library's mpiexec on PATH")
        return
    yield _launched(launcher)


def _launched(launcher: str) -> Finding:
    """Start two ranks and see whether they find each other."""
    printed, problem = probe.in_two_ranks(launcher, "from mpi4py import MPI; print(MPI.COMM_WORLD.size)")
    if printed == "22":
        return Finding("launcher", "ok", f"{launcher} starts two ranks that find each other")
    return Finding(
        "launcher",
        "broken",
        f"{launcher}: {problem or f'printed {printed}'}",
        "use the mpiexec of the same MPI as mpi4py",
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
