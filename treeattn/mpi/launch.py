"""How this process was started, as its environment tells: known without MPI, held against what it finds."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from treeattn.collectives.runtime.process import Process

#: What `jobs/emulated_cluster` was asked for, in the environment of its nodes.
EMULATED = "TREEATTN_EMULATED"

TORCHRUN = "torchrun"

# What launchers put into the environment of each process: rank, size, and what else is there. One that runs
# below another inherits that one's variables, too: those that only an inner one sets stand first.
_LAUNCHERS = {
    TORCHRUN: ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    "Open MPI's mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE"),  # of MPICH and Intel; srun --mpi=pmi2
    "PALS": ("PALS_RANKID", "PMI_SIZE"),  # HPE's mpiexec
    "flux": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    "jsrun": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # with any plug-in
}

# What starts the processes of a machine, by /proc/PID/comm: MPICH's and Intel's, Open MPI's, Slurm's.
_STARTERS = ("hydra_pmi_proxy", "prterun", "prted", "mpirun", "orted", "slurmstepd")

# How people start them, and tell how many.
_COMMANDS = ("mpiexec", "mpiexec.hydra", "mpirun", "prterun")
_HOW_MANY = ("-n", "-np")

# How many ranks of the job run on this machine, as the launchers of MPICH, Open MPI and torch say it.
_LOCAL_SIZES = (
    "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE", "PMI_LOCAL_SIZE",
    "JSM_NAMESPACE_LOCAL_SIZE",
)  # fmt: skip

_SLURM_FILES = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf", "/opt/slurm/etc/slurm.conf")
_PLUG_INS = (
    "srun --mpi=pmi2 for MPICH and Intel MPI, --mpi=pmix for Open MPI (`srun --mpi=list` names what is there)"
)


class Launch(NamedTuple):
    """What a launcher announced to a process; launcher: its name, "" for none."""

    launcher: str
    rank: int
    size: int


def launched() -> Launch:
    """What the innermost launcher above this process announced to it.

    A process that a rank of torchrun starts inherits the environment of the rank, and is none itself: it runs
    alone, as everything below a Python program does. A shell between is part of the rank.
    """
    found = {name: _sharers(name) for name in _LAUNCHERS if _size(os.environ, name)}
    least = min(map(len, found.values()), default=0)
    innermost = [name for name, sharers in found.items() if len(sharers) == least]
    launch = _first(os.environ, innermost)
    if launch.launcher == TORCHRUN and any(map(_runs_python, found[TORCHRUN])):
        return Launch("", 0, 1)
    return launch


def launched_as(environment: Mapping[str, str] | None = None) -> tuple[int, int]:
    """(rank, size) that a launcher announced to this process, or by these variables to another; or (0, 1)."""
    return (launched() if environment is None else _first(environment, _LAUNCHERS))[1:]


def _first(environment: Mapping[str, str], launchers: Iterable[str]) -> Launch:
    """The first of them that announced several, else none."""
    for name in launchers:
        if (size := _size(environment, name)) > 1:
            return Launch(name, _number(environment, _LAUNCHERS[name][0]), size)
    # PMIx alone does not tell how many there are: at least those up to this one.
    another = any(_size(environment, name) for name in _LAUNCHERS)
    rank = 0 if another else _number(environment, "PMIX_RANK")
    return Launch("PMIx" if rank else "", rank, rank + 1)


def _size(environment: Mapping[str, str], launcher: str) -> int:
    """How many processes it announced; 0 where it did not."""
    variables = _LAUNCHERS[launcher]
    return _number(environment, variables[1]) if all(name in environment for name in variables) else 0


def _sharers(launcher: str) -> list[int]:
    """The processes above this one, from the nearest on, to which this launcher said the same: this one has
    inherited it from the last of them."""
    ours = {name: os.environ[name] for name in _LAUNCHERS[launcher]}
    return list(itertools.takewhile(lambda process: ours.items() <= _environment(process).items(), _above()))


def _runs_python(process: int) -> bool:
    try:
        return Path(os.readlink(f"/proc/{process}/exe")).name.startswith(("python", "pypy"))
    except OSError:
        return False


def by_launcher() -> bool:
    """Whether a launcher started this process: what looks like a terminal here may be its pipe to a file."""
    return "PMIX_RANK" in os.environ or _by_variables()


def _by_variables() -> bool:
    """Whether a launcher says how many it has started, be it this one process alone."""
    return any(_size(os.environ, name) for name in _LAUNCHERS)


def local_size() -> int:
    """How many ranks of the job run on this machine, as its launcher says; 0 where it does not say."""
    return max(_number(os.environ, name) for name in _LOCAL_SIZES)


def _number(environment: Mapping[str, str], name: str) -> int:
    """0 for none, or what no launcher writes."""
    text = environment.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def problem(ranks: int = 1) -> tuple[str, str] | None:
    """For a process that finds itself one of so many by MPI, and in no process group: what is wrong where it
    was started as one of more, and the remedy; None if it was not."""
    launcher, _, announced = launched()
    if announced > ranks:
        if launcher == TORCHRUN:
            what = f"torchrun started {announced} processes, and this one is in no process group"
            return what, "call torch.distributed.init_process_group first, or pass comm="
        sees = "one" if ranks == 1 else ranks
        what = f"the launcher started {announced} processes but MPI sees {sees}"
        return what, _other_launcher()
    if ranks > 1 or _by_variables():
        return None  # whatever else that launcher has started, such as its agents on other nodes
    above = _announced_above()
    if above > 1:
        what = f"one of {above} processes, each of which would be rank 0"
        return what, "the launcher's environment does not arrive here: pass it on (no --cleanenv, no env -i)"
    return None


def _other_launcher() -> str:
    if "SLURM_STEP_NUM_TASKS" in os.environ and not any(name in os.environ for name in _LOCAL_SIZES):
        return f"srun's plug-in is not the one of the MPI that mpi4py loaded; {_PLUG_INS}"
    return (
        "the launcher belongs to another MPI than the one mpi4py loaded; use the mpiexec of that one, "
        "within a container too (treeattn doctor names it)"
    )


def siblings() -> dict[int, Process]:
    """The processes that the launcher of this one has started on this machine, by rank."""
    found, launcher = {}, launched().launcher
    for process in _started_by(os.getppid()):
        _, rank, size = _first(_environment(process), [launcher] if launcher in _LAUNCHERS else _LAUNCHERS)
        if size > 1:
            found[rank] = Process.of(process)
    return found


def abort(code: int) -> None:
    """Ask a launcher to end the job with this code, as a process may before MPI starts; else nothing happens.

    MPICH's and Intel's do not mind one that ends then, whatever its code, and others wait for it in
    MPI_Init. They listen at a socket whose number they give (PMI 1.1, the wire protocol).
    """
    with contextlib.suppress(OSError, ValueError):
        socket = int(os.environ.get("PMI_FD", ""))
        if stat.S_ISSOCK(os.fstat(socket).st_mode):
            os.write(socket, f"cmd=abort exitcode={code}\n".encode())


def _announced_above() -> int:
    """How many processes a launcher announced to the nearest process above this one that knows it, or has
    started on this machine."""
    for process in _above():
        if (announced := launched_as(_environment(process))[1]) > 1:
            return announced
        # Of those that it has started, some may have ended by now: what it was asked for does not change.
        started = len(_started_by(process)) if _name(process) in _STARTERS else 1
        if (most := max(started, _asked_for(process))) > 1:
            return most
    return 1


def _asked_for(process: int) -> int:
    """N of a launcher's ``mpiexec -n N ..``, itself or run by a shell, where it begins so; else 0."""
    words = _said(process, "cmdline").split("\0")
    for command, option, number in zip(words[:2], words[1:], words[2:], strict=False):
        if Path(command).name in _COMMANDS and option in _HOW_MANY and number.isdecimal():
            return int(number)
    return 0


def _above() -> Iterator[int]:
    """The processes above this one, as far as the system shows them."""
    process = os.getppid()
    while process > 1:
        yield process
        process = _parent(process)


def _environment(process: int) -> dict[str, str]:
    """That it was started with; empty for another user's, or one outside of this container."""
    words = _said(process, "environ").split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def _name(process: int) -> str:
    return _said(process, "comm").strip()


def _parent(process: int) -> int:
    """0 for none, or none that is known."""
    after_name = _said(process, "stat").rpartition(")")[2].split()
    return int(after_name[1]) if after_name else 0


def _started_by(process: int) -> list[int]:
    everything = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [other for other in everything if _parent(other) == process]


def _said(process: int, what: str) -> str:
    """A file of /proc; "" where there is none, or none for us."""
    try:
        return Path(f"/proc/{process}/{what}").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def outside_job() -> str | None:
    """Says that this runs beside the jobs of a Slurm cluster, or beside the other tasks of its job; or None.

    Not that there is a cluster: a machine whose programs of Slurm have no configuration is none of one.
    """
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if "SLURM_JOB_ID" in os.environ:
        alone = tasks.isdecimal() and int(tasks) > 1 and launched_as() == (0, 1) and not _by_variables()
        return f"one process in a job of {tasks} tasks: start it with srun" if alone else None
    configured = "SLURM_CONF" in os.environ or any(Path(path).exists() for path in _SLURM_FILES)
    if configured and shutil.which("srun"):
        return "outside of any job of this Slurm cluster, as on a login node: use srun or sbatch"
    return None
