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
from collections.abc import Generator, Iterator
from typing import Any

from treeattn.backends.cuda import cupy_runtime
from treeattn.backends.cuda import driver as cuda_driver
from treeattn.backends.cuda.driver import Driver
from treeattn.cli import probe
from treeattn.cli.probe import Finding
from treeattn.errors import TreeattnError
from treeattn.mpi import library

_CUPY = re.compile(r"cupy(-cuda\d+x|-rocm.*)?")

# Each rank sends device memory to the other and looks at what arrived.
_DEVICE_POINTERS = """
import cupy, numpy
from mpi4py import MPI
world = MPI.COMM_WORLD
with cupy.cuda.Device(world.rank % cupy.cuda.runtime.getDeviceCount()):
    numbers = numpy.arange(70000, dtype="f4")
    sent, got = cupy.asarray(numbers + world.rank), cupy.zeros(70000, "f4")
    cupy.cuda.Device().synchronize()
    world.Sendrecv([sent, MPI.FLOAT], 1 - world.rank, recvbuf=[got, MPI.FLOAT], source=1 - world.rank)
    print("right" if (got.get() == numbers + 1 - world.rank).all() else "wrong")
"""

# Two ranks reduce by a step of transport='peer', in which each polls and reads the other's memory; after five
# seconds without the other it leaves NaN.
_PEER_MEMORY = """
import numpy
from mpi4py import MPI
from treeattn import collectives
from treeattn.backends import cuda
from treeattn.backends.cuda import cupy_runtime
from treeattn.collectives import program
from treeattn.collectives.check import prove
world = MPI.COMM_WORLD
cupy_runtime.choose(world.rank)
gpu, schedule = cupy_runtime.current(), collectives.build("all_gather_merge", 2)
operator = cuda.MergeOperator(64, runtime=gpu)
plan = program.plan(schedule, prove(schedule), world.rank, 16, granularity=1, node=(0, 1))
mine, handle = gpu.expose(operator.window_bytes(plan))
theirs = gpu.open_exposed(world.sendrecv(handle, 1 - world.rank, source=1 - world.rank))
records = gpu.empty((16, 66), numpy.float32)
gpu.upload(records, numpy.repeat(numpy.float32([[0, 1] + [world.rank + 1] * 64]), 16, axis=0))
windows = [theirs, mine] if world.rank else [mine, theirs]
step = operator.planned_gets(records, plan, windows, 5.0, operator.resident_blocks(16))
world.Barrier()
step()
found = numpy.empty((16, 66), numpy.float32)
gpu.copy(found, records)
gpu.synchronize()
print("right" if (found == [0, 2] + [3] * 64).all() else "wrong")
world.Barrier()
gpu.close_exposed(theirs)
world.Barrier()
gpu.withdraw(mine)
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
        yield _kernels()
        yield _peer_memory()
    yield _mpi(usable)


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
    wheel = f"pip install 'nvidia-cuda-nvrtc{'-cu12' if major == 12 else ''}=={major}.*'"
    try:
        version = cupy.cuda.nvrtc.getVersion()
    except Exception as error:
        return Finding("NVRTC", "missing", f"does not load: {_first_line(error)}", wheel)
    what = "version {}.{}".format(*version)
    if driver is not None and version[0] > driver.cuda[0]:
        return Finding("NVRTC", "missing", f"{what} compiles for newer drivers than this one", wheel)
    return Finding("NVRTC", "ok", what)


def _nccl(cupy: Any) -> Finding:
    major = cupy.cuda.runtime.runtimeGetVersion() // 1000
    remedy = f"for transport='nccl': pip install 'treeattn[nccl{major}]'"
    try:
        nccl = _imported("cupy.cuda.nccl")
        if not nccl.available:
            return Finding("NCCL", "missing", "libnccl.so.2 does not load", remedy)
        version = nccl.get_version()
    except Exception as error:
        return Finding("NCCL", "missing", f"does not load: {_first_line(error)}", remedy)
    return Finding("NCCL", "ok", f"version {version // 10000}.{version // 100 % 100}.{version % 100}")


def _kernels() -> Finding:
    """Compile one kernel and load it on the GPU."""
    try:
        cupy_runtime.current().kernel("finish", "finish")
    except Exception as error:
        return Finding("CUDA kernels", "missing", _first_line(error))
    return Finding("CUDA kernels", "ok", "one was compiled and loaded")


def _peer_memory() -> Finding:
    """A trial: whether GPUs have peer access, and containers let processes share it, is known afterwards."""
    subject, launcher = "Peer memory", probe.launcher()
    remedy = (
        "for transport='peer': GPUs with peer access (nvidia-smi topo -p2p r), no MIG partitions, and in "
        "containers the IPC and PID namespaces of the host"
    )
    if launcher is None:
        return Finding(subject, "missing", "not tried: no launcher")
    printed, problem = probe.in_two_ranks(launcher, _PEER_MEMORY)
    if printed == "rightright":
        return Finding(subject, "ok", "two ranks reduced in each other's GPU memory")
    return Finding(
        subject, "missing", f"two ranks cannot reduce in each other's: {problem or printed}", remedy
    )


def _mpi(gpu: bool) -> Finding:
    """What the MPI library says of device pointers, and where it says yes, a trial."""
    subject, launcher = "CUDA-aware MPI", probe.launcher()
    remedy = "not needed for transport='host' or 'nccl'; else load an MPI library that is built with CUDA"
    try:
        aware = library.cuda_aware()
    except TreeattnError as error:
        return Finding(subject, "missing", _first_line(error))
    if not aware:
        what = "the library cannot tell" if aware is None else "it is not"
        return Finding(subject, "missing", what, remedy)
    if not gpu or launcher is None:
        lacking = "launcher" if gpu else "usable GPU"
        return Finding(subject, "missing", f"the library says that it is; not tried: no {lacking}")
    printed, problem = probe.in_two_ranks(launcher, _DEVICE_POINTERS)
    if printed == "rightright":
        return Finding(subject, "ok", "two ranks exchanged device memory")
    what = f"the library says that it is, a trial fails: {problem or printed}"
    return Finding(subject, "missing", what, remedy)


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
