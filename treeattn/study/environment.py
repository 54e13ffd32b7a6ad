"""What ran where: the facts that every result carries along."""

from __future__ import annotations

import json
import math
import os
import platform
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeattn import comm as comm_

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = [
    "as_json", "as_json_line", "cpu_name", "free_memory", "kernel", "node_load", "placement", "software",
]  # fmt: skip


def as_json(facts: Any) -> bytes:
    """Strict JSON, one fact per line; numbers that JSON has no words for become strings ("inf", "nan")."""
    return (json.dumps(_spelled(facts), indent=1, allow_nan=False) + "\n").encode()


def as_json_line(facts: Any) -> bytes:
    """The same in one line."""
    return (json.dumps(_spelled(facts), separators=(",", ":"), allow_nan=False) + "\n").encode()


def _spelled(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _spelled(item) for key, item in value.items()}
    return [_spelled(item) for item in value] if isinstance(value, list | tuple) else value


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def free_memory() -> int | None:
    """Bytes that processes of this machine may still take; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    known = dict(line.split(":", 1) for line in lines)
    return 1024 * int(known["MemAvailable"].split()[0]) if "MemAvailable" in known else None


def software() -> dict[str, Any]:
    """Versions of everything that can change a result or a time."""
    names = ("treeattn", "numpy", "mpi4py", "ml_dtypes", "safetensors")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in names},
        "mpi": comm_.library_version(),
        "git": _git_revision(),
        "command": [_program(sys.argv[0]), *sys.argv[1:]],
    }


def placement(comm: Intracomm) -> list[dict[str, Any]]:
    """One entry per rank: host, node, machine, CPU and usable cores. Collective; the same list on every rank.

    Nodes may be of one machine (containers, emulated nodes) and then share its cores: ``machine_cores`` are
    those that its ranks may use together, ``cores`` those that this one may.
    """
    groups = comm_.node_groups(comm)
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


def kernel() -> str:
    """What processes have in common if they run under the same kernel: its boot, else the host's name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def node_load(ranks: list[dict[str, Any]]) -> str | None:
    """A warning where a machine has more ranks than cores: waiting ranks spin, so times mean little there."""
    by_machine: dict[int, list[dict[str, Any]]] = {}
    for entry in ranks:
        by_machine.setdefault(entry["machine"], []).append(entry)
    crowded = [group for group in by_machine.values() if len(group) > group[0]["machine_cores"]]
    if not crowded:
        return None
    worst = max(crowded, key=len)
    hosts = " and ".join(dict.fromkeys(entry["host"] for entry in worst))
    cores = worst[0]["machine_cores"]
    return f"{len(worst)} ranks share {cores} cores of {hosts}: times show waiting, not the scheme"


def _program(path: str) -> str:
    """The command's own name, wherever it is installed; a script's path as it was given."""
    return "treeattn" if Path(path).name in ("treeattn", "__main__.py") else path


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    """Commit of the checkout that this runs from, with ``+dirty`` if it was changed; None elsewhere."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        revision = _git(root, "rev-parse", "HEAD")
        return revision + ("+dirty" if _git(root, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
