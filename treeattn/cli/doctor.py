"""``treeattn doctor``: what this machine has, what is missing, and the remedy."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import click

import treeattn
from treeattn.backends import cpu
from treeattn.backends.cpu import compile
from treeattn.cli import doctor_gpu, probe
from treeattn.cli.options import Output, output_options
from treeattn.cli.probe import Finding
from treeattn.errors import TreeattnError
from treeattn.mpi import communicators, launch, library
from treeattn.mpi.topology import detect
from treeattn.report import Column, Report
from treeattn.study import environment


@click.command("doctor")
@output_options(wide=False, json="Write the findings here.")
def command(output: Output) -> int:
    """Say what treeattn finds on this machine, and how to mend what is missing.

    Exit code 1 if something is broken that every use needs.
    """
    output.open()
    findings = list(_findings())
    made = Report([finding._asdict() for finding in findings])
    made.table(findings, [
        Column("", "subject", words=True),
        Column("verdict", words=True),
        Column("found → what to do", lambda finding: "\n→ ".join(filter(None, finding[2:])), words=True),
    ])  # fmt: skip
    output.report(made)
    return int(any(finding.verdict == "broken" for finding in findings))


def _findings() -> Iterator[Finding]:
    commit = environment.git_revision()
    what = f"{treeattn.__version__}{f', commit {commit}' if commit else ''}, {Path(treeattn.__file__).parent}"
    yield Finding("treeattn", "ok", what)
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")
    cores = len(os.sched_getaffinity(0))
    yield Finding("CPU", "ok", f"{environment.cpu_name()}, {cores} usable cores, {platform.machine()}")
    torch = environment.installed_version("torch")
    started = _started()
    yield started
    by_mpi = launch.launched()[0] != launch.TORCHRUN
    yield from _mpi(torch is not None, by_mpi and started.verdict == "ok")
    yield Finding(
        "torchrun",
        "missing" if torch is None else "ok",
        "torch is not installed" if torch is None else f"torch {torch}: its ranks need no MPI",
        "pip install treeattn[torch], for ranks that torchrun starts" if torch is None else "",
    )
    yield from _kernels()
    yield from doctor_gpu.findings()


def _mpi(other_ranks: bool, together: bool) -> Iterator[Finding]:
    """other_ranks: whether there can be ranks without MPI. together: whether those of MPI are one job."""
    try:
        library.load()
    except TreeattnError as error:
        what, _, remedy = str(error).rpartition(": ")
        without = other_ranks and environment.installed_version("mpi4py") is None
        yield Finding("MPI library", "missing" if without else "broken", what, remedy)
        return
    name, launcher = library.version() or "", probe.launcher()
    yield Finding("MPI library", "ok", name)
    if together:
        yield _places()
    if launch.launched_as()[1] > 1:
        return  # this job is the trial of its launcher, and a job in a job would be none
    if launcher is None:
        yield Finding("launcher", "missing", "no mpiexec", "srun, or put the MPI library's mpiexec on PATH")
        return
    yield _launched(launcher, as_root="Open MPI" in name and os.geteuid() == 0)


def _started() -> Finding:
    launcher, _, announced = launch.launched()
    if launcher == launch.TORCHRUN:
        what = f"{announced} ranks that torchrun started, and find each other by torch.distributed"
        return Finding("this job", "ok", what, "programs call torch.distributed.init_process_group first")
    try:
        ranks = library.load().COMM_WORLD.size
    except TreeattnError:
        ranks = 1  # each of them is alone
    by = f", started by {launcher}" if launcher else ""
    if ranks > 1:
        return Finding("this job", "ok", f"{ranks} ranks that find each other{by}")
    if problem := launch.problem(ranks):
        return Finding("this job", "broken", *problem)
    if beside := launch.outside_job():
        what, _, remedy = beside.rpartition(": ")
        return Finding("this job", "slow", what, f"what is measured here is not the cluster: {remedy}")
    return Finding("this job", "ok", "one process, started by no launcher")


def _places() -> Finding:
    """Where the ranks of this job are. Collective."""
    found = detect(communicators.world())
    nodes = ", ".join(str(len(node)) for node in found.nodes)
    return Finding(
        "places",
        "ok",
        f"ranks on each node: {nodes}; {found.binding}",
        "lstopo draws the machine, nvidia-smi topo -m what joins its GPUs",
    )


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
    yield Finding("CPU kernels", "ok", f"{isa} (this CPU runs {', '.join(compile.available_isas())})")
    yield Finding("kernel cache", "ok", str(compile.library_path(isa)))
