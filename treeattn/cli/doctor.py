"""``treeattn doctor``: what this machine has, what is missing, and the remedy."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import click

import treeattn
from treeattn.backends import cpu
from treeattn.backends.cpu import compile
from treeattn.backends.cuda import cupy_runtime
from treeattn.backends.cuda import driver as cuda_driver
from treeattn.cli.options import Output, output_options
from treeattn.collectives.runtime import nccl
from treeattn.errors import BackendError, TreeattnError
from treeattn.mpi import communicators, launch, library
from treeattn.mpi.topology import detect
from treeattn.report import Column, Report
from treeattn.study import environment

#: Without these Open MPI's launcher refuses root.
AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")


class Finding(NamedTuple):
    """One line of the table. `verdict` is ok, slow (works, but), missing (not needed here) or broken."""

    subject: str
    verdict: str
    what: str
    remedy: str = ""


# Two ranks decode: of each one token, whose value is its rank. Records of 270 kB, which no library sends
# eagerly.
_TRIAL = """
import cupy, treeattn
from mpi4py import MPI
from treeattn.backends.cuda import cupy_runtime
rank = MPI.COMM_WORLD.rank
cupy_runtime.choose(rank)
q, v = (cupy.full((1, 1, 1024, 64), value, "f4") for value in (0, rank))
how = treeattn.Reduction("all_gather_merge", {transport!r})
out, _ = treeattn.decode(q, q, v, device="cuda", scheme=how)
print("right" if (cupy.asnumpy(out) == 0.5).all() else "wrong")
"""


@click.command("doctor")
@output_options(json="Write the findings here.")
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
    yield from _gpus()


def _mpi(other_ranks: bool, together: bool) -> Iterator[Finding]:
    """other_ranks: whether there can be ranks without MPI. together: whether those of MPI are one job."""
    try:
        library.load()
    except TreeattnError as error:
        what, _, remedy = str(error).rpartition(": ")
        without = other_ranks and environment.installed_version("mpi4py") is None
        yield Finding("MPI library", "missing" if without else "broken", what, remedy)
        return
    name, starts = library.version() or "", launcher()
    yield Finding("MPI library", "ok", name)
    if together:
        yield _places()
    if launch.launched_as()[1] > 1:
        return  # this job is the trial of its launcher, and a job in a job would be none
    if starts is None:
        yield Finding("launcher", "missing", "no mpiexec", "srun, or put the MPI library's mpiexec on PATH")
        return
    yield _launched(starts, as_root="Open MPI" in name and os.geteuid() == 0)


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


def _launched(starts: str, as_root: bool) -> Finding:
    """Start two ranks and see whether they find each other. as_root: it refuses, unless told otherwise."""
    printed, problem = in_two_ranks(starts, "from mpi4py import MPI; print(MPI.COMM_WORLD.size)")
    if printed != "22":
        what = f"{starts}: {problem or f'printed {printed}'}"
        return Finding("launcher", "broken", what, "use the mpiexec of the same MPI as mpi4py")
    unset = [f"{name}=1" for name in AS_ROOT if as_root and name not in os.environ]
    remedy = f"it refuses root: export {' '.join(unset)}" if unset else ""
    return Finding("launcher", "ok", f"{starts} starts two ranks that find each other", remedy)


def _kernels() -> Iterator[Finding]:
    problem = cpu.compiled_kernels_problem()
    if problem is not None:
        remedy = "install a C compiler (apt install gcc), or set CC"
        yield Finding("CPU kernels", "slow", f"NumPy: {problem}", remedy)
        return
    isa = compile.chosen_isa()
    yield Finding("CPU kernels", "ok", f"{isa} (this CPU runs {', '.join(compile.available_isas())})")
    yield Finding("kernel cache", "ok", str(compile.library_path(isa)))


def _gpus() -> Iterator[Finding]:
    """What a GPU would need here: none of it is needed for work on the processor, and so never "broken"."""
    driver = _asked(
        "NVIDIA driver",
        lambda: cuda_driver.inventory()[0],
        "to compute on a GPU: install NVIDIA's driver; after an update of it reboot, else reinstall it",
    )
    yield driver
    gpus = cuda_driver.inventory()[1] if driver.verdict == "ok" else []
    if driver.verdict == "ok" and not gpus:
        remedy = "check CUDA_VISIBLE_DEVICES, and that the job asked for GPUs"
        yield Finding("GPU", "missing", "the driver shows none", remedy)
    for gpu, count in Counter(gpus).items():
        yield Finding("GPU", "ok", f"{count} x {gpu}")
    cupy = _asked("CuPy", lambda: f"serves {cupy_runtime.current().name}")
    yield cupy
    yield _asked("NCCL", _nccl)
    usable = bool(gpus) and cupy.verdict == "ok"
    if usable:
        yield _asked("CUDA kernels", _one_kernel)
        yield _asked("Peer memory", lambda: _trial("peer"), (
            "for transport='peer': GPUs with peer access (nvidia-smi topo -p2p r), no MIG partitions, and in "
            "containers the IPC and PID namespaces of the host"
        ))  # fmt: skip
    yield _asked(
        "CUDA-aware MPI",
        lambda: _cuda_aware(usable),
        "not needed for transport='host' or 'nccl'; else load an MPI library that is built with CUDA",
    )


def _asked(subject: str, ask: Callable[[], str], remedy: str = "") -> Finding:
    """What is there, or the first line of whatever is raised: errors of half an installation have no type."""
    try:
        return Finding(subject, "ok", ask())
    except Exception as error:
        return Finding(subject, "missing", (str(error).strip() or repr(error)).splitlines()[0], remedy)


def _nccl() -> str:
    if problem := nccl.problem():
        raise BackendError(problem)
    return "version {}.{}".format(*nccl.version())


def _one_kernel() -> str:
    cupy_runtime.current().kernel("finish", "finish")
    return "one was compiled and loaded"


def _cuda_aware(usable: bool) -> str:
    """A library that claims it wrongly ends the trial by a crash."""
    aware = library.cuda_aware()
    if not aware:
        raise BackendError("the library cannot tell" if aware is None else "it is not")
    if not usable:
        raise BackendError("the library says that it is; not tried: no usable GPU")
    return _trial("cuda-mpi")


def _trial(transport: str) -> str:
    """Whether GPUs have peer access, and containers let processes share it, is known afterwards."""
    starts = launcher()
    if starts is None:
        raise BackendError("not tried: no launcher")
    printed, problem = in_two_ranks(starts, _TRIAL.format(transport=transport))
    if printed != "rightright":
        raise BackendError(f"two ranks cannot decode by it: {problem or printed}")
    return "two ranks decoded by it"


def launcher() -> str | None:
    """The mpiexec beside this Python, else the one on the path."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def in_two_ranks(starts: str, program: str) -> tuple[str, str | None]:
    """Run a Python program in two ranks: what they print, blanks removed, and what went wrong or None.

    A job of its own, so that a crash stays there; the variables of a job that we may be part of must
    not leak into it. Ranks may print into one another's lines.
    """
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PMI", "OMPI_", "HYDI", "MPI_", "SLURM_"))
    } | {**dict.fromkeys(AS_ROOT, "1"), "TREEATTN_TIMEOUT": "30"}
    command = [starts, "-n", "2", sys.executable, "-c", program]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=60, env=clean,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    printed = "".join(done.stdout.split())
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return printed, next((line for line in said if "Error" in line or "Signal:" in line), said[0])
    return printed, None
