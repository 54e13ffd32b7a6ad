"""What the doctor's probes share: a finding, and a job of two ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

#: Without these Open MPI's launcher refuses root.
AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")


class Finding(NamedTuple):
    """One line of the table. `verdict` is ok, slow (works, but), missing (not needed here) or broken."""

    subject: str
    verdict: str
    what: str
    remedy: str = ""


def launcher() -> str | None:
    """The mpiexec beside this Python, else the one on the path."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def in_two_ranks(launcher: str, program: str) -> tuple[str, str | None]:
    """Run a Python program in two ranks: what they print, blanks removed, and what went wrong or None.

    A job of its own, so that a crash stays there; the variables of a job that we may be part of must
    not leak into it. Ranks may print into one another's lines.
    """
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PMI", "OMPI_", "HYDI", "MPI_", "SLURM_"))
    } | {**dict.fromkeys(AS_ROOT, "1"), "TREEATTN_TIMEOUT": "30"}
    command = [launcher, "-n", "2", sys.executable, "-c", program]
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
