"""The NVIDIA driver and its GPUs, asked through libcuda itself: what can be known without CuPy.

CUDA Driver API, sections "Initialization", "Version Management" and "Device Management".
"""

from __future__ import annotations

import ctypes
import re
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from treeattn.errors import BackendError

_LIBRARY = "libcuda.so.1"
_MODULE_VERSION = Path("/proc/driver/nvidia/version")
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


class Gpu(NamedTuple):
    """One GPU; memory in bytes."""

    name: str
    capability: str
    memory: int


class Driver(NamedTuple):
    """release: of the driver, such as "580.82.07", where the system tells. cuda: (major, minor) of the
    newest CUDA that it serves. gpus: those that this process may use."""

    release: str | None
    cuda: tuple[int, int]
    gpus: tuple[Gpu, ...]


def driver() -> Driver | None:
    """What the driver of this machine says; None where there is none. Raises `BackendError`, with the
    driver's name for the reason, where it does not start."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    started = library.cuInit(ctypes.c_uint(0))
    if started not in (0, _NO_DEVICE):
        raise BackendError(f"the NVIDIA driver does not start: {_error_name(library, started)}")
    version = _integer(library, "cuDriverGetVersion")
    count = 0 if started == _NO_DEVICE else _integer(library, "cuDeviceGetCount")
    gpus = tuple(_gpu(library, index) for index in range(count))
    return Driver(_release(), (version // 1000, version % 1000 // 10), gpus)


def addresses() -> tuple[str, ...]:
    """Where on the PCI bus the GPUs are that this process may use, as the kernel writes it
    ("0000:19:00.0"). Empty where there is no driver, or one that does not start. Partitions of a GPU have
    its address.
    """
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return ()
    if library.cuInit(ctypes.c_uint(0)):
        return ()
    return tuple(_address(library, index) for index in range(_integer(library, "cuDeviceGetCount")))


def _address(library: ctypes.CDLL, index: int) -> str:
    text, device = ctypes.create_string_buffer(32), _integer(library, "cuDeviceGet", index)
    _call(library, "cuDeviceGetPCIBusId", text, len(text), device)
    return text.value.decode().lower()


def identity(index: int) -> str:
    """The UUID of GPU `index` of those that are visible, or of its MIG partition (``nvidia-smi -L``).

    Asked of the driver: CuPy's ``getDeviceProperties()["uuid"]`` ends at the first zero byte, and partitions
    share a PCI address. Raises `BackendError`.
    """
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise BackendError(f"no NVIDIA driver: {error}") from error
    library.cuInit(ctypes.c_uint(0))
    found = ctypes.create_string_buffer(16)
    # From CUDA 11.4 on; what came before knows no partitions.
    name = "cuDeviceGetUuid_v2" if hasattr(library, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    _call(library, name, found, _integer(library, "cuDeviceGet", index))
    return str(uuid.UUID(bytes=found.raw))


def _gpu(library: ctypes.CDLL, index: int) -> Gpu:
    device, memory = _integer(library, "cuDeviceGet", index), ctypes.c_size_t()
    name = ctypes.create_string_buffer(256)
    _call(library, "cuDeviceGetName", name, len(name), device)
    _call(library, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    capability = [
        _integer(library, "cuDeviceGetAttribute", attribute, device)
        for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR)
    ]
    return Gpu(name.value.decode(errors="replace"), "{}.{}".format(*capability), memory.value)


def _integer(library: ctypes.CDLL, function: str, *arguments: int) -> int:
    """What a function writes to the int that its first argument points to."""
    value = ctypes.c_int()
    _call(library, function, ctypes.byref(value), *arguments)
    return value.value


def _call(library: ctypes.CDLL, function: str, *arguments: Any) -> None:
    code = getattr(library, function)(*arguments)
    if code:
        raise BackendError(f"the NVIDIA driver: {function} says {_error_name(library, code)}")


def _error_name(library: ctypes.CDLL, code: int) -> str:
    name = ctypes.c_char_p()
    library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(name))
    return name.value.decode() if name.value else f"error {code}"


def _release() -> str | None:
    try:
        found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", _MODULE_VERSION.read_text())
    except OSError:
        return None
    return found.group() if found else None
