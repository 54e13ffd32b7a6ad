"""What a run line of the results tells: who ran where, on what, with which settings."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from treeattn.backends.cpu import compile
from treeattn.study import environment
from treeattn.study.clock import Clock

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["provenance", "run_id"]

# Variables that change what is measured; others may hold secrets and are nobody's business.
_PREFIXES = (
    "TREEATTN_", "MPICH_", "MPIR_", "OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "I_MPI_", "UCX_", "FI_", "OMP_",
    "SLURM_JOB_", "SLURM_STEP_", "NCCL_", "CUDA_VISIBLE", "MALLOC_", "OPENBLAS_NUM", "MKL_NUM",
)  # fmt: skip
# Of those, what names files of this machine alone.
_PLACES = ("_agent", "_hostfile")


def provenance(world: Intracomm, options: dict[str, Any], used: int | None = None) -> dict[str, Any]:
    """The fields of a run line. Collective; the same on every rank but for what only rank 0 may ask.

    used: the first so many ranks measure and the others sleep; by default all measure.
    """
    ranks = environment.placement(world)
    clock = Clock(world)
    error = max(world.allgather(clock.compare().error)) / 1000
    # Asked once: it starts processes, and reads the whole checkout.
    software = world.bcast(
        environment.software() | {"isa": compile.chosen_isa()} if world.rank == 0 else None
    )
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "software": software,
        "ranks": ranks,
        "gpu": _gpus() if world.rank == 0 else None,
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_PREFIXES) and not name.endswith(_PLACES)
        },
        "clock": {
            "source": "CLOCK_MONOTONIC of each machine",
            "clocks": clock.count,
            "error": error,
            "method": "one clock, read by all ranks" if clock.count == 1 else "fastest of 30 round trips",
        },
        "options": options,
        "warning": environment.node_load(ranks[:used]),
    }


def run_id() -> str:
    """A name for this job that no other has."""
    return f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def _gpus() -> list[str]:
    """The GPUs of rank 0's machine, as nvidia-smi names them; none where it is not installed."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,power.limit", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []
