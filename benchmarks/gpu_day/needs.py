"""What the steps of gpu_day.sh miss on this machine, all at once and without touching a GPU:

python -m gpu_day.needs

A line for each thing that is not there, with the steps that need it. Exit code 1 if there is one.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys

_EVERY = "every step"
_JOBS = "host, model, ranks, peer, compare, node"
#: Module -> the steps that import it.
MODULES = {
    "numpy": _EVERY,
    "ml_dtypes": _EVERY,
    "cupy": _EVERY,
    "safetensors": _EVERY,
    "click": "doctor, roofline, host, compare",
    "rich": "doctor, roofline, host, compare",
    "msgspec": "doctor, roofline, host, model, compare, node",
    "pytest": "tests, streams, ranks, peer",
    "hypothesis": "tests, ranks, peer",
    "mpi4py": _JOBS,
    "torch": "beside",
}
#: Program -> the steps that start it.
PROGRAMS = {
    "mpiexec": _JOBS,
    "compute-sanitizer": "memcheck, initcheck, racecheck",
    "ncu": "ncu",
    "g++": "bits, tests (the emulator's side)",
}
# A trial in a process of its own -> what is missing where it fails, and the steps.
_TRIALS = {
    "from mpi4py import MPI": ("an MPI library: unpack a wheel of mpich (WHEELS)", _JOBS),
    "from cupy.cuda import nccl; assert nccl.get_version() >= 23000": (
        "NCCL 2.30 or newer: several ranks on one GPU", "ranks, compare over nccl",
    ),
    "import treeattn": ("treeattn, which does not load", _EVERY),
}  # fmt: skip


def missing() -> list[str]:
    """Each thing that is not there, and which steps need it."""
    found = [f"module {name}: {steps}" for name, steps in MODULES.items() if not _has(name)]
    found += [f"program {name}: {steps}" for name, steps in PROGRAMS.items() if not shutil.which(name)]
    for code, (what, steps) in _TRIALS.items():
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip() or "without a word").splitlines()[-1]
            found.append(f"{what}: {steps} ({reason})")
    return found


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


if __name__ == "__main__":
    lacking = missing()
    print("\n".join(lacking) or "nothing is missing")
    sys.exit(bool(lacking))
