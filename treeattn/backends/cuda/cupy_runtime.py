"""The NVIDIA GPU through CuPy: compiling, launching, allocating, and clear words where something lacks.

CuPy is imported when this is first asked for a device, never before.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from treeattn.backends.cuda import compile as cuda_source
from treeattn.backends.cuda import driver as cuda_driver
from treeattn.errors import ArgumentError, BackendError, MissingPackageError, TransportError

_INSTALL = "install treeattn[cuda12] or treeattn[cuda13], whichever CUDA version the driver has (nvidia-smi)"
_NO_IPC = (
    "transport='peer' needs peer access between the GPUs (nvidia-smi topo -p2p r), no MIG partitions, in "
    "containers the IPC and PID namespaces of the host, and from Slurm --gpus-per-node and --gpu-bind=none, "
    "so that a rank sees the others' GPUs; else take transport='nccl' or 'host'"
)
_SHARED_UNIT = 2 << 20


def problem() -> str | None:
    """Why no GPU can be used here, in one line with the remedy; None where one can."""
    try:
        current()
    except BackendError as error:
        return str(error)
    return None


def choose(index: int) -> None:
    """Make GPU `index`, modulo the number of those that are visible, CuPy's current device.

    CUDA_VISIBLE_DEVICES is respected: it decides which GPUs there are, and their order. Raises as `current`.
    """
    cupy = _cupy()
    cupy.cuda.Device(index % int(cupy.cuda.runtime.getDeviceCount())).use()


def current() -> CupyRuntime:
    """CuPy's current device. Raises `BackendError` without CuPy, driver or GPU, and for a CuPy for another
    CUDA or for ROCm."""
    return _device(int(_cupy().cuda.Device().id))


@functools.cache
def _device(index: int) -> CupyRuntime:
    return CupyRuntime(_cupy(), index)


@contextlib.contextmanager
def _shown_warnings() -> Iterator[None]:
    """CuPy warns of what is not fatal, such as two builds of it: told, even where warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        yield


@functools.cache
def _cupy() -> Any:
    try:
        with _shown_warnings():
            import cupy
    except ImportError as error:
        missing = error.name == "cupy"
        raise MissingPackageError(
            f"no CuPy: {_INSTALL}" if missing else f"CuPy does not load: {error}; {_INSTALL}"
        ) from error
    if cupy.cuda.runtime.is_hip:
        raise BackendError(
            f"this CuPy is for AMD's ROCm, which is not served: use device='cpu', or {_INSTALL}"
        )
    if not cupy.cuda.is_available():
        raise BackendError(
            "CuPy finds no GPU that it can use: check CUDA_VISIBLE_DEVICES, and with treeattn doctor driver "
            "and CuPy; or use device='cpu'"
        )
    return cupy


class CupyRuntime:
    """A `treeattn.backends.cuda.runtime.Runtime` on one device of this process."""

    def __init__(self, cupy: Any, index: int) -> None:
        """Device `index` of those that CuPy sees."""
        self._cupy = self.namespace = cupy
        self._cuda, self._calls = cupy.cuda, cupy.cuda.runtime
        self.index = index
        #: A kernel, compiled by NVRTC at its first use (CuPy keeps it on disk).
        self.kernel = functools.cache(self._load)
        # Copies under way and the memory that they read.
        self._uploads: collections.deque[tuple[Any, Any]] = collections.deque()
        device = cupy.cuda.Device(index)
        self.name = cupy.cuda.runtime.getDeviceProperties(index)["name"].decode()
        self.multiprocessors = int(device.attributes["MultiProcessorCount"])
        self.shared_bytes = int(device.attributes["MaxSharedMemoryPerBlockOptin"])
        self.driver = cuda_driver.library()
        #: The UUID, by which NCCL tells GPUs and MIG partitions apart too.
        self.identity = cuda_driver.identity(index)
        # Compute capability, "90" for 9.0; it is not among the attributes.
        capability = int(device.compute_capability)
        self.tensor_cores, self.clusters = capability >= 80, capability >= 90

    def _load(self, module: str, expression: str, shared_bytes: int = 0) -> Any:
        cupy = self._cupy
        try:
            with _shown_warnings(), cupy.cuda.Device(self.index):
                code = cupy.RawModule(
                    code=cuda_source.source(module),
                    options=cuda_source.OPTIONS,
                    name_expressions=(expression,),
                )
                kernel = code.get_function(expression)
                if shared_bytes:
                    kernel.max_dynamic_shared_size_bytes = shared_bytes
        except cupy.cuda.compiler.CompileException as error:
            raise BackendError(f"NVRTC refuses {expression} of {module}.cu: {error}") from error
        except Exception as error:  # a missing NVRTC raises a type of the library that looks for it
            if type(error).__name__ == "CUDADriverError":
                raise BackendError(
                    f"the driver does not load {expression}: {error}; is NVRTC newer than the driver? "
                    "treeattn doctor names both"
                ) from error
            if (
                "nvrtc" not in f"{type(error).__module__} {error}".lower()
                and "DynamicLib" not in type(error).__name__
            ):
                raise
            raise BackendError(f"no NVRTC to compile CUDA kernels with: {error}; {_INSTALL}") from error
        return kernel

    def resident_blocks(self, kernel: Any, threads: int, shared_bytes: int) -> int:
        """How many blocks one multiprocessor holds at once, as the driver says."""
        occupancy = self._cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor
        return max(1, int(occupancy(self.handle(kernel), threads, shared_bytes)))

    def handle(self, launch: Any) -> int:
        return int(launch.kernel.ptr if hasattr(launch, "kernel") else launch.__self__.graphExec)

    def zeros(self, size: int, dtype: Any) -> Any:
        """A new device array [size] of zeros."""
        return self._allocate(self._cupy.zeros, size, dtype)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self._allocate(self._cupy.empty, shape, dtype)

    def _allocate(self, new: Callable[..., Any], shape: Any, dtype: Any) -> Any:
        try:
            with self._cuda.Device(self.index):
                return new(shape, dtype)
        except self._cuda.memory.OutOfMemoryError as error:
            raise BackendError(
                f"out of GPU memory: {error}; use a smaller cache, more ranks, or fewer splits (num_splits=)"
            ) from error

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Page-locked memory of the host, which goes back to CuPy's pool with the array."""
        count = math.prod(shape)
        try:
            memory = self._cuda.alloc_pinned_memory(count * np.dtype(dtype).itemsize)
        except self._calls.CUDARuntimeError as error:
            raise BackendError(
                f"no page-locked memory for {count} numbers: {error}; free memory of the host"
            ) from error
        return np.frombuffer(memory, dtype, count).reshape(shape)

    def expose(self, size: int) -> tuple[int, bytes]:
        """Allocate by cudaMalloc itself: what pools give cannot be exported. In units of 2 MiB, which CUDA
        shares with nothing else (CUDA programming guide, "Interprocess Communication")."""
        size = -(-size // _SHARED_UNIT) * _SHARED_UNIT
        with self._cuda.Device(self.index):
            address = self._malloc(size)
            try:
                self._calls.memset(address, 0, size)
                self._calls.deviceSynchronize()
                return address, bytes(self._calls.ipcGetMemHandle(address))
            except self._calls.CUDARuntimeError as error:
                self._calls.free(address)
                raise TransportError(f"this GPU exposes no memory: {error}; {_NO_IPC}") from error

    def _malloc(self, size: int) -> int:
        """Beside CuPy's pool, which gives back what it holds unused where there is no room."""
        with contextlib.suppress(self._calls.CUDARuntimeError):
            return int(self._calls.malloc(size))
        self._cupy.get_default_memory_pool().free_all_blocks()
        try:
            return int(self._calls.malloc(size))
        except self._calls.CUDARuntimeError as error:
            raise BackendError(f"out of GPU memory: {error}; use a smaller cache, or more ranks") from error

    def withdraw(self, address: int) -> None:
        self._calls.free(address)

    def open_exposed(self, handle: bytes) -> int:
        """Also of a GPU that this process does not see, where both have peer access."""
        try:
            with self._cuda.Device(self.index):
                return int(self._calls.ipcOpenMemHandle(handle))
        except self._calls.CUDARuntimeError as error:
            raise TransportError(f"{error}; {_NO_IPC}") from error

    def close_exposed(self, address: int) -> None:
        self._calls.ipcCloseMemHandle(address)

    def copy(self, into: Any, source: Any) -> None:
        """Copy on the current stream; from or to page-locked memory the host does not wait."""
        if isinstance(source, np.ndarray):
            into.data.copy_from_host_async(source.ctypes.data, source.nbytes)
        elif isinstance(into, np.ndarray):
            source.data.copy_to_host_async(into.ctypes.data, into.nbytes)
        else:
            self._cupy.copyto(into, source)

    def upload(self, into: Any, source: Any) -> None:
        """Copy by way of page-locked memory. Whether CUDA reads other memory later, or makes the host wait,
        is not promised (CUDA Runtime API, "API synchronization behavior")."""
        while self._uploads and self._uploads[0][0].done:
            self._uploads.popleft()
        staged = self.pinned(source.shape, source.dtype)
        staged[...] = source
        self.copy(into, staged)
        event = self._cuda.Event(disable_timing=True)
        event.record()
        self._uploads.append((event, staged))

    def on_stream(self, stream: int) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if stream == self.stream else self._cuda.ExternalStream(stream)

    def address(self, array: Any) -> int:
        """Where the array begins, for the device."""
        return int(array.data.ptr)

    def holds(self, array: Any) -> bool:
        return isinstance(array, self._cupy.ndarray)

    def borrow(self, array: Any) -> Any:
        """CuPy's own reader of the CUDA array interface, which also waits for the stream that it may name."""
        return self._cupy.asarray(array)

    def synchronize(self) -> None:
        self._cuda.get_current_stream().synchronize()

    def done(self) -> bool:
        return bool(self._cuda.get_current_stream().done)

    def synchronize_all(self) -> None:
        """Wait by cudaDeviceSynchronize; the current device is a thread's own."""
        with self._cuda.Device(self.index):
            self._calls.deviceSynchronize()

    def follow(self, last: Any) -> Any:
        """Wait by an event. The stream that is returned lives as long as it is held, a library's own
        apart."""
        current = self._cuda.get_current_stream()
        if (last is not None and current.ptr == last.ptr) or current.is_capturing():
            return last
        if last is not None:
            event = self._cuda.Event(disable_timing=True)
            try:
                event.record(last)
            except self._calls.CUDARuntimeError as error:
                raise BackendError(
                    f"the stream of the last step cannot be waited for: {error}; keep it until the next step"
                ) from error
            current.wait_event(event)
        return current

    def capturing(self) -> bool:
        """Whether CuPy's current stream is being captured."""
        return bool(self._cuda.get_current_stream().is_capturing())

    def capture(self, run: Callable[[], object]) -> Callable[[], object]:
        """Record `run` on a stream of its own: the default stream cannot be captured."""
        with self._cuda.Device(self.index), self._cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            try:
                run()
            except BaseException:
                # An error may have spoilt the capture: then its end fails too, and would hide the reason.
                with contextlib.suppress(RuntimeError):
                    stream.end_capture()
                raise
            graph = stream.end_capture()
        launch: Callable[[], object] = graph.launch  # on the stream that is current then
        return launch

    @property
    def stream(self) -> int:
        return int(self._cuda.get_current_stream().ptr)

    def check(self, name: str, array: Any) -> None:
        """ArgumentError unless `array` is a CuPy array of this device."""
        if not isinstance(array, self._cupy.ndarray):
            raise ArgumentError(
                f"{name} is a {type(array).__module__}.{type(array).__name__}: the GPU needs cupy.ndarray "
                "(cupy.asarray makes one)"
            )
        current = int(self._calls.getDevice())
        if current != self.index:
            raise ArgumentError(
                f"GPU {current} is current, but this was planned on GPU {self.index}: make that one current "
                f"again (with cupy.cuda.Device({self.index}))"
            )
        if array.device.id != self.index:
            raise ArgumentError(
                f"{name} lies on GPU {array.device.id}, but GPU {self.index} is current: move it, or make "
                f"the other current (with cupy.cuda.Device({array.device.id}))"
            )
