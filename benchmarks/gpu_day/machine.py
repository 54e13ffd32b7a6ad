"""What machine and which versions a result is of: python -m gpu_day.machine --json FILE

Each thing is asked in a process of its own, with a time limit: an MPI library that ends its process takes
nothing with it, and what is not there is null.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import harness

from treeattn.study import environment

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = (
    *("numpy", "ml_dtypes", "mpi4py", "cupy-cuda12x", "cupy-cuda13x", "torch", "flashinfer-python"),
    *("nvidia-cuda-nvrtc", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "pytest"),
)
_GPU = "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.memory,mig.mode.current"
# Name -> the command whose last line tells its version.
_TOOLS = {
    "nvcc": ("nvcc", "--version"),
    "ncu": ("ncu", "--version"),
    "compute-sanitizer": ("compute-sanitizer", "--version"),
    "mpiexec": ("mpiexec", "--version"),
    "g++": ("g++", "-dumpfullversion"),
    "mpi": (
        sys.executable,
        "-c",
        "from mpi4py import MPI; print(MPI.Get_library_version().split(chr(10))[0])",
    ),
    "nccl": (sys.executable, "-c", "from cupy.cuda import nccl; print(nccl.get_version())"),
}


def machine() -> dict[str, Any]:
    """What stands in every result: the GPUs, the processor, versions of the packages, the commit."""
    gpus = _said("nvidia-smi", f"--query-gpu={_GPU}", "--format=csv,noheader")
    commit = _said("git", "-C", str(_ROOT), "rev-parse", "HEAD")
    changed = _said("git", "-C", str(_ROOT), "status", "--porcelain", "-uno")
    return {
        "gpus": None
        if gpus is None
        else [dict(zip(_GPU.split(","), g.split(", "), strict=False)) for g in gpus],
        "cpu": environment.cpu_name(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "commit": commit[0] + ("+changed" if changed else "") if commit else None,
    }


def tools() -> dict[str, str | None]:
    """The last line that each of the programs and libraries says of its version."""
    said = {name: _said(*command) for name, command in _TOOLS.items()}
    return {name: lines[-1].strip() if lines else None for name, lines in said.items()}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _said(*command: str) -> list[str] | None:
    """Lines that a program prints; None where there is none, or it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()


def main() -> None:
    options, found = harness.options(__doc__, required=True), tools()
    options.write(found)
    for name, what in found.items():
        print(f"{name}: {what or 'not there'}")


if __name__ == "__main__":
    main()
