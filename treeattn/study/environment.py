"""What ran where, on what, with which settings: the facts that every result carries along."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from treeattn.collectives.runtime.communicator import Communicator
from treeattn.collectives.runtime.process import kernel
from treeattn.mpi import launch, library

# Variables that change what is measured; others may hold secrets and are nobody's business.
_PREFIXES = (
    "TREEATTN_", "MPICH_", "MPIR_", "OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "I_MPI_", "UCX_", "FI_", "OMP_",
    "SLURM_JOB_", "SLURM_STEP_", "NCCL_", "CUDA_VISIBLE", "MALLOC_", "OPENBLAS_NUM", "MKL_NUM",
)  # fmt: skip
# Of those, what names files of this machine alone.
_PLACES = ("_agent", "_hostfile")


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def free_memory() -> int | None:
    """Bytes that processes of this machine may still take; None where the system does not tell."""
    known = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines())
    return 1024 * int(known["MemAvailable"].split()[0]) if "MemAvailable" in known else None


def software() -> dict[str, Any]:
    """Versions of everything that can change a result or a time."""
    names = ("treeattn", "numpy", "mpi4py", "ml_dtypes", "safetensors")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: installed_version(name) for name in names},
        "mpi": None if launch.launched().launcher == launch.TORCHRUN else library.version(),
        "git": git_revision(),
        "command": [_program(sys.argv[0]), *sys.argv[1:]],
    }


def placement(comm: Communicator) -> list[dict[str, Any]]:
    """One entry per rank: host, node, machine, CPU and usable cores. Collective; the same list on every rank.

    Nodes may be of one machine (containers, emulated nodes) and then share its cores: ``machine_cores`` are
    those that its ranks may use together, ``cores`` those that this one may.
    """
    groups = comm.nodes
    node = next(index for index, ranks in enumerate(groups) if comm.rank in ranks)
    cores = os.sched_getaffinity(0)
    mine = {
        "rank": comm.rank,
        "host": socket.gethostname(),
        "node": node,
        "cpu": cpu_name(),
        "cores": len(cores),
    }
    everyone = comm.allgather((mine, kernel(), cores))
    return [entry | _machine(name, everyone) for entry, name, _ in everyone]


def _machine(own: str, everyone: list[tuple[dict[str, Any], str, set[int]]]) -> dict[str, int]:
    kernels = list(dict.fromkeys(name for _, name, _ in everyone))
    together = set[int]().union(*(cores for _, name, cores in everyone if name == own))
    return {"machine": kernels.index(own), "machine_cores": len(together)}


def variables() -> dict[str, str]:
    """Those of the environment that change what is measured."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_PREFIXES) and not name.endswith(_PLACES)
    }


def machine(comm: Communicator) -> dict[str, Any]:
    """What a report says of where it was measured: its ranks, a warning, and on rank 0 the software.

    Collective.
    """
    ranks = placement(comm)
    known = software() if comm.rank == 0 else None
    return {"ranks": ranks, "warning": warning(ranks), "software": known}


def warning(ranks: list[dict[str, Any]]) -> str | None:
    """What makes times mean less than they seem to: too many ranks for the cores, or the wrong place."""
    made_by = os.environ.get(launch.EMULATED)
    emulated = made_by and f"an emulated cluster ({made_by}), not one of several machines"
    return "; ".join(filter(None, (emulated, node_load(ranks), launch.outside_job()))) or None


def node_load(ranks: list[dict[str, Any]]) -> str | None:
    """A warning where a machine has more ranks than cores: waiting ranks spin, so times mean little there."""
    members = Counter(entry["machine"] for entry in ranks)
    oversubscribed = [entry for entry in ranks if members[entry["machine"]] > entry["machine_cores"]]
    if not oversubscribed:
        return None
    worst = max(oversubscribed, key=lambda entry: members[entry["machine"]])
    count, cores = members[worst["machine"]], worst["machine_cores"]
    hosts = dict.fromkeys(entry["host"] for entry in ranks if entry["machine"] == worst["machine"])
    return f"{count} ranks share {cores} cores of {' and '.join(hosts)}: times show waiting, not the scheme"


def _read(path: str) -> str:
    """A file of the system; "" where there is none."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _program(path: str) -> str:
    """The command's own name, wherever it is installed; a script's path as it was given."""
    return "treeattn" if Path(path).name in ("treeattn", "__main__.py") else path


def installed_version(name: str) -> str | None:
    """The version of a package, which is not loaded."""
    from importlib.metadata import PackageNotFoundError, version  # loads the standard library's mail

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def git_revision() -> str | None:
    """Commit of the checkout that this runs from, with ``+dirty`` if it was changed; None elsewhere."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    revision = _said("git", "-C", str(root), "rev-parse", "HEAD")
    changes = _said("git", "-C", str(root), "status", "--porcelain", "-uno")
    return None if revision is None or changes is None else revision + ("+dirty" if changes else "")


def _said(*command: str) -> str | None:
    """What a program prints; None where there is none, or it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
