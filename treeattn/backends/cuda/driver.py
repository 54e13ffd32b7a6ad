"""The NVIDIA driver and its GPUs, asked through libcuda itself: what can be known without CuPy.

CUDA Driver API, sections "Initialization", "Version Management" and "Device Management".
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import uuid
from pathlib import Path
from typing import Any

from treeattn.errors import BackendError

_LIBRARY = "libcuda.so.1"
_MODULE_VERSION = Path("/proc/driver/nvidia/version")
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_CAPABILITY = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR


def library() -> ctypes.CDLL:
    """The driver's own library. Raises `BackendError` where there is none."""
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise BackendError(f"no NVIDIA driver: {error}") from error


def inventory() -> tuple[str, list[str]]:
    """What the driver of this machine says of itself, and of each GPU that this process may use. Raises
    `BackendError`, with the driver's name for the reason, where it does not start or there is none."""
    found = library()
    started = found.cuInit(ctypes.c_uint(0))
    if started not in (0, _NO_DEVICE):
        raise BackendError(f"the NVIDIA driver does not start: {_error_name(found, started)}")
    version = _integer(found, "cuDriverGetVersion")
    count = 0 if started == _NO_DEVICE else _integer(found, "cuDeviceGetCount")
    serves = f"{_release()}, CUDA up to {version // 1000}.{version % 1000 // 10}"
    return serves, [_gpu(found, index) for index in range(count)]


def identity(index: int) -> str:
    """The UUID of GPU `index` of those that are visible, or of its MIG partition (``nvidia-smi -L``).

    Asked of the driver: CuPy's ``getDeviceProperties()["uuid"]`` ends at the first zero byte, and partitions
    share a PCI address. Raises `BackendError`.
    """
    asked, found = library(), ctypes.create_string_buffer(16)
    asked.cuInit(ctypes.c_uint(0))
    _call(asked, "cuDeviceGetUuid_v2", found, _integer(asked, "cuDeviceGet", index))
    return str(uuid.UUID(bytes=found.raw))


def _gpu(library: ctypes.CDLL, index: int) -> str:
    device, memory = _integer(library, "cuDeviceGet", index), ctypes.c_size_t()
    name = ctypes.create_string_buffer(256)
    _call(library, "cuDeviceGetName", name, len(name), device)
    _call(library, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    major, minor = (_integer(library, "cuDeviceGetAttribute", which, device) for which in _CAPABILITY)
    told = name.value.decode(errors="replace")
    return f"{told}, compute capability {major}.{minor}, {memory.value / 2**30:.0f} GiB"


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


def _release() -> str:
    """Of the driver, such as "580.82.07", where the system tells."""
    with contextlib.suppress(OSError):
        if found := re.search(r"\b\d{3}\.\d+(\.\d+)?\b", _MODULE_VERSION.read_text()):
            return found.group()
    return "release unknown"
