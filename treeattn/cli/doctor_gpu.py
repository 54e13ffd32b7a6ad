"""The doctor's findings about GPUs: driver, CuPy, NCCL, kernels, peer memory, CUDA-aware MPI.

None of it is needed for work on the processor, so that nothing here is ever "broken"; and each question may
meet half an installation, whose errors have no common type.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from treeattn.backends.cuda import cupy_runtime
from treeattn.backends.cuda import driver as cuda_driver
from treeattn.cli import probe
from treeattn.cli.probe import Finding
from treeattn.collectives.runtime import nccl
from treeattn.errors import BackendError
from treeattn.mpi import library

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


def findings() -> Iterator[Finding]:
    """What a GPU would need here. Never raises over what is missing."""
    gpus: list[str] = []
    driver = _asked(
        "NVIDIA driver",
        lambda: _driver(gpus),
        "to compute on a GPU: install NVIDIA's driver; after an update of it reboot, else reinstall it",
    )
    yield driver
    if driver.verdict == "ok" and not gpus:
        remedy = "check CUDA_VISIBLE_DEVICES, and that the job asked for GPUs"
        yield Finding("GPU", "missing", "the driver shows none", remedy)
    for gpu, count in Counter(gpus).items():
        yield Finding("GPU", "ok", f"{count} x {gpu}")
    cupy = _asked("CuPy", _cupy)
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
    """What is there, or the first line of whatever is raised."""
    try:
        return Finding(subject, "ok", ask())
    except Exception as error:
        return Finding(subject, "missing", (str(error).strip() or repr(error)).splitlines()[0], remedy)


def _driver(gpus: list[str]) -> str:
    """gpus: gets what is said of each."""
    said, gpus[:] = cuda_driver.inventory()
    return said


def _cupy() -> str:
    return f"serves {cupy_runtime.current().name}"


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
    launcher = probe.launcher()
    if launcher is None:
        raise BackendError("not tried: no launcher")
    printed, problem = probe.in_two_ranks(launcher, _TRIAL.format(transport=transport))
    if printed != "rightright":
        raise BackendError(f"two ranks cannot decode by it: {problem or printed}")
    return "two ranks decoded by it"
