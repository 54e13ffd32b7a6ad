"""``treeattn doctor``: what this machine has, what is missing, and the remedy."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import click

from treeattn import comm as comm_
from treeattn import files, launch
from treeattn.backends import cpu
from treeattn.backends.cpu import compile
from treeattn.cli import doctor_gpu, probe
from treeattn.cli.console import Columns, console, table
from treeattn.cli.probe import Finding
from treeattn.errors import TreeattnError
from treeattn.study import environment

__all__ = ["command"]

_COLUMNS: Columns[Finding] = {
    "": attrgetter("subject"),
    "verdict": attrgetter("verdict"),
    "found → what to do": lambda finding: "\n→ ".join(filter(None, (finding.what, finding.remedy))),
}


@click.command("doctor")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the findings here.")
def command(json_path: Path | None) -> int:
    """Say what treeattn finds on this machine, and how to mend what it misses.

    Exit code 1 if something is broken that every use needs.
    """
    findings = list(_findings())
    files.output_writer(json_path)(environment.as_json([finding._asdict() for finding in findings]))
    table(console(), _COLUMNS, findings, words=len(_COLUMNS))
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
        comm_.mpi()
    except TreeattnError as error:
        what, _, remedy = str(error).rpartition(": ")
        yield Finding("MPI library", "broken", what, remedy)
        return
    library, launcher = comm_.library_version() or "", probe.launcher()
    yield Finding("MPI library", "ok", library)
    yield _started()
    if launch.launched_as()[1] > 1:
        return  # this job is the trial of its launcher, and a job in a job would be none
    if launcher is None:
        yield Finding("launcher", "missing", "no mpiexec", "srun, or put the MPI library's mpiexec on PATH")
        return
    yield _launched(launcher, as_root="Open MPI" in library and os.geteuid() == 0)


def _started() -> Finding:
    """How this very process was started."""
    ranks = comm_.mpi().COMM_WORLD.size
    if ranks > 1:
        return Finding("this job", "ok", f"{ranks} ranks that find each other")
    if problem := launch.problem():
        return Finding("this job", "broken", *problem)
    if beside := launch.outside_job():
        what, _, remedy = beside.rpartition(": ")
        return Finding("this job", "slow", what, f"what is measured here is not the cluster: {remedy}")
    where = f" in a container ({launch.container()})" if launch.container() else ""
    return Finding("this job", "ok", f"one process{where}, started by no launcher")


def _launched(launcher: str, as_root: bool) -> Finding:
    """Start two ranks and see whether they find each other. as_root: it refuses, unless told otherwise."""
    printed, problem = probe.in_two_ranks(launcher, "from mpi4py import MPI; print(MPI.COMM_WORLD.size)")
    if printed != "22":
        what = f"{launcher}: {problem or f'printed {printed}'}"
        return Finding("launcher", "broken", what, "use the mpiexec of the same MPI as mpi4py")
    unset = [f"{name}=1" for name in probe.AS_ROOT if as_root and name not in os.environ]
    remedy = f"it refuses root: export {' '.join(unset)}" if unset else ""
    return Finding("launcher", "ok", f"{launcher} starts two ranks that find each other", remedy)


def _kernels() -> Iterator[Finding]:
    problem = cpu.compiled_kernels_problem()
    if problem is not None:
        remedy = "install a C compiler (apt install gcc), or set CC"
        yield Finding("CPU kernels", "slow", f"NumPy: {problem}", remedy)
        return
    isa = compile.chosen_isa()
    yield Finding("CPU kernels", "ok", f"{isa} (this processor runs {', '.join(compile.available_isas())})")
    yield Finding("kernel cache", "ok", str(compile.library_path(isa)))
