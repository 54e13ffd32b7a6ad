"""The doctor's findings about GPUs: driver, CuPy, NVRTC, NCCL, kernels, peer memory, CUDA-aware MPI.

None of it is needed for work on the processor, so that nothing here is ever "broken"; and each question may
meet half an installation, whose errors have no common type.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import Any

from treeattn.backends.cuda import cupy_runtime
from treeattn.backends.cuda import driver as cuda_driver
from treeattn.backends.cuda.driver import Driver
from treeattn.cli import probe
from treeattn.cli.probe import Finding
from treeattn.errors import BackendError, TreeattnError
from treeattn.mpi import library

_CUPY = re.compile(r"cupy(-cuda\d+x|-rocm.*)?")

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
    driver = yield from _driver()
    cupy = yield from _cupy(driver)
    if cupy is not None:
        yield _nvrtc(cupy, driver)
        yield _nccl(cupy)
    else:
        for name in ("NVRTC", "NCCL"):
            yield Finding(name, "missing", "not asked: it is reached through CuPy")
    usable = driver is not None and bool(driver.gpus) and cupy is not None
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
        return Finding(subject, "missing", _first_line(error), remedy)


def _driver() -> Generator[Finding, None, Driver | None]:
    subject = "NVIDIA driver"
    try:
        driver = cuda_driver.driver()
    except TreeattnError as error:
        yield Finding(subject, "missing", str(error), "after a driver update reboot, else reinstall it")
        return None
    if driver is None:
        yield Finding(subject, "missing", "no libcuda.so.1", "to compute on a GPU: install NVIDIA's driver")
        return None
    known = "{}, CUDA up to {}.{}".format(driver.release or "release unknown", *driver.cuda)
    yield Finding(subject, "ok", known)
    if not driver.gpus:
        remedy = "check CUDA_VISIBLE_DEVICES, and that the job asked for GPUs"
        yield Finding("GPU", "missing", "the driver shows none", remedy)
    for gpu, count in Counter(driver.gpus).items():
        what = f"{count} x {gpu.name}, compute capability {gpu.capability}, {gpu.memory / 2**30:.0f} GiB"
        yield Finding("GPU", "ok", what)
    return driver


def _cupy(driver: Driver | None) -> Generator[Finding, None, Any]:
    """Returns CuPy if it can serve this driver, else None."""
    builds = _builds()
    named = ", ".join(f"{name} {version}" for name, version in builds.items()) or "CuPy"
    afresh = " and ".join([f"pip uninstall {' '.join(builds)}"] * bool(builds) + [_install(driver)])
    if len(builds) > 1:
        yield Finding("CuPy", "missing", f"builds that overwrite one another: {named}", afresh)
        return None
    try:
        cupy = _imported("cupy")
        built = cupy.cuda.runtime.runtimeGetVersion()
    except Exception as error:
        absent = not builds and isinstance(error, ImportError) and error.name == "cupy"
        what = "not installed" if absent else f"{named} does not load: {_first_line(error)}"
        yield Finding("CuPy", "missing", what, afresh)
        return None
    if cupy.cuda.runtime.is_hip:
        yield Finding("CuPy", "missing", f"{named}, built for AMD's ROCm, which is not served", afresh)
        return None
    what = f"{named}, built for CUDA {built // 1000}.{built % 1000 // 10}"
    if driver is not None and built // 1000 > driver.cuda[0]:
        yield Finding("CuPy", "missing", f"{what}; the driver serves less", f"{afresh}, or update the driver")
        return None
    yield Finding("CuPy", "ok", what)
    return cupy


def _nvrtc(cupy: Any, driver: Driver | None) -> Finding:
    major = cupy.cuda.runtime.runtimeGetVersion() // 1000

    def version() -> str:
        found = cupy.cuda.nvrtc.getVersion()
        what = "version {}.{}".format(*found)
        if driver is not None and found[0] > driver.cuda[0]:
            raise BackendError(f"{what} compiles for newer drivers than this one")
        return what

    return _asked(
        "NVRTC", version, f"pip install 'nvidia-cuda-nvrtc{'-cu12' if major == 12 else ''}=={major}.*'"
    )


def _nccl(cupy: Any) -> Finding:
    major = cupy.cuda.runtime.runtimeGetVersion() // 1000

    def version() -> str:
        nccl = _imported("cupy.cuda.nccl")
        if not nccl.available:
            raise BackendError("libnccl.so.2 does not load")
        found = nccl.get_version()
        return f"version {found // 10000}.{found // 100 % 100}.{found % 100}"

    return _asked("NCCL", version, f"for transport='nccl': pip install 'treeattn[nccl{major}]'")


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


def _builds() -> dict[str, str]:
    """Version of each build of CuPy that is installed: they share one folder, so that only one may be."""
    installed = importlib.metadata.distributions()
    named = ((distribution.metadata["Name"] or "", distribution.version) for distribution in installed)
    return {name: version for name, version in sorted(named) if _CUPY.fullmatch(name.lower())}


def _install(driver: Driver | None) -> str:
    if driver is None:
        return "pip install 'treeattn[cuda12]' or 'treeattn[cuda13]', whichever CUDA the driver will have"
    if driver.cuda[0] < 12:
        return "update the driver to one for CUDA 12 or newer"
    return f"pip install 'treeattn[cuda{min(driver.cuda[0], 13)}]'"


def _imported(name: str) -> Any:
    """A module; what it warns of is among the findings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
