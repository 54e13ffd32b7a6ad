"""A `treeattn.backends.cuda.runtime.Runtime` that executes the CUDA sources on the processor."""

import collections
import contextlib
import ctypes
import functools
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np

from treeattn.backends.cuda.compile import OPTIONS, source
from treeattn.errors import ArgumentError

from . import device_array
from .device_array import DeviceArray
from .raw_module import WORKERS, Kernel, RawModule, libcuda

# Kernels whose blocks wait for other devices: all run at once.
_WAITING = ("pull_partials",)


class _Known(ctypes.Structure):
    """struct kernel of cuda_on_cpu/libcuda.c."""

    _fields_ = (
        *(("run", ctypes.c_void_p), ("seed", ctypes.c_uint)),
        *(("workers", ctypes.c_int), ("launches", ctypes.c_void_p)),
    )


class EmulatorRuntime:
    """NumPy arrays stand for device arrays. A small device: 3 multiprocessors of 2 blocks each.

    Its one stream runs what is queued at once, except while it is captured: then it is written down, with
    the values that arguments have at that time, as a CUDA graph has them.
    """

    name = "emulated GPU"
    multiprocessors = 3
    tensor_cores = clusters = True
    identity, index = "emulated GPU 0", 0
    stream = 0
    namespace: Any = np
    #: Where exposed memory lies: a file, which another process maps.
    shared_folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    _exposed: ClassVar[dict[str, int]] = {}  # file -> address, of this process

    def __init__(
        self,
        *,
        seed: int = 0,
        sanitizer: str = "",
        options: tuple[str, ...] = (),
        shared_bytes: int = 227 << 10,
        edit: Callable[[str], str] = str,
    ) -> None:
        """`edit` changes a source before it is compiled: how faults are planted."""
        self._seed = seed
        self._sanitizer = sanitizer
        self._options = options
        self._edit = edit
        self.shared_bytes = shared_bytes
        self._launched = 0
        self._driver_calls = np.zeros(1, np.int64)
        self.allocations = 0
        self.graph_launches = 0
        self.waited = True
        self._captured: list[Callable[[], object]] | None = None
        self._maps: dict[int, tuple[Any, str]] = {}  # address -> memory, and its file if it was exposed here

    #: A libcuda that executes what it is given.
    driver = property(lambda self: libcuda())
    #: Kernels that compiled code launched, and those that were launched by whomever.
    driver_calls = property(lambda self: int(self._driver_calls[0]))
    launches = property(lambda self: self._launched + self.driver_calls)

    def handle(self, launch: Any) -> int:
        """What its libcuda knows a kernel or graph by."""
        return ctypes.addressof(launch.known)

    def kernel(self, module: str, expression: str, shared_bytes: int = 0) -> Callable[..., object]:
        """A kernel of kernels/cuda, compiled by g++ if it never was."""
        kernel = _kernel(self._edit(source(module)), expression, self._options, self._sanitizer)

        def launch(grid: Any, block: Any, arguments: tuple[Any, ...], **options: Any) -> None:
            self._launched += 1
            if module in _WAITING:
                options["workers"] = grid[0]
            values = tuple(value.copy() if value.dtype.kind == "V" else value for value in arguments)
            self.queue(lambda: kernel(grid, block, values, seed=self._seed, **options))

        workers = 0 if module in _WAITING else WORKERS
        launch.known = _Known(kernel.code, self._seed, workers, self._driver_calls.ctypes.data)
        return launch

    def queue(self, work: Callable[[], object]) -> None:
        """Run `work`, or write it down while the stream is captured."""
        self.waited = False
        if self._captured is None:
            work()
        else:
            self._captured.append(work)

    def resident_blocks(self, kernel: Any, threads: int, shared_bytes: int) -> int:
        """Always 2."""
        return 2

    def zeros(self, size: int, dtype: Any) -> Any:
        """A NumPy array [size] of zeros."""
        self.allocations += 1
        return np.zeros(size, dtype)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A NumPy array of what nobody should read."""
        self.allocations += 1
        array = np.empty(shape, dtype)
        array.view(np.uint8).fill(0x7B)
        return array

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A NumPy array."""
        return np.empty(shape, dtype)

    def expose(self, size: int) -> tuple[int, bytes]:
        """Memory that is shared by a file, in place of CUDA IPC."""
        descriptor, file = tempfile.mkstemp(prefix="treeattn-emulator-", dir=self.shared_folder)
        os.truncate(descriptor, size)
        address = self._mapped(descriptor, size, mmap.PROT_READ | mmap.PROT_WRITE, file)
        self._exposed[file] = address
        return address, file.encode()

    def withdraw(self, address: int) -> None:
        """The memory lives on where it is open."""
        file = self._maps.pop(address)[1]
        del self._exposed[file]
        os.unlink(file)

    def open_exposed(self, handle: bytes) -> int:
        """To be read only: a device that writes to another ends with a signal. Devices of one process share
        one address, so that ThreadSanitizer knows the memory again."""
        file = handle.decode()
        if file in self._exposed:
            return self._exposed[file]
        descriptor = os.open(file, os.O_RDONLY)
        return self._mapped(descriptor, os.fstat(descriptor).st_size, mmap.PROT_READ, "")

    def _mapped(self, descriptor: int, size: int, protection: int, file: str) -> int:
        memory = mmap.mmap(descriptor, size, prot=protection)
        os.close(descriptor)
        address = int(np.frombuffer(memory, np.uint8).ctypes.data)
        self._maps[address] = memory, file
        return address

    def close_exposed(self, address: int) -> None:
        """Unmapped, unless it is this process's own."""
        if address in self._maps and not self._maps[address][1]:
            del self._maps[address]

    def copy(self, into: Any, source: Any) -> None:
        """Queued like a kernel."""
        assert into.shape == source.shape
        assert into.dtype == source.dtype
        self.queue(lambda: np.copyto(into, source))

    def upload(self, into: Any, source: Any) -> None:
        """The values that `source` has now."""
        assert into.flags.c_contiguous
        assert source.flags.c_contiguous
        self.copy(into, source.copy())

    @contextlib.contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """Its number is all there is of it."""
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def holds(self, array: Any) -> bool:
        """Any NumPy array: only lists and the like lie on the host here."""
        return isinstance(array, np.ndarray)

    def borrow(self, array: Any) -> Any:
        """A NumPy array over what the CUDA array interface describes."""
        assert array.__cuda_array_interface__["version"] == 3
        array.__array_interface__ = array.__cuda_array_interface__
        return np.asarray(array)

    def synchronize(self) -> None:
        """A captured stream cannot be waited for."""
        assert self._captured is None, "waiting for a stream that is captured"
        self.waited = True

    def done(self) -> bool:
        """Whatever is queued runs at once."""
        return True

    def synchronize_all(self) -> None:
        """There is one stream."""
        self.synchronize()

    def follow(self, last: Any) -> Any:
        """There is one stream."""
        return self.stream

    def capturing(self) -> bool:
        """Whether `capture` is under way."""
        return self._captured is not None

    def capture(self, run: Callable[[], object]) -> Callable[[], object]:
        """The work that `run` queues, to be queued again."""
        assert self._captured is None, "a stream is captured once at a time"
        self._captured = graph = []
        try:
            run()
        finally:
            self._captured = None

        def launch() -> None:
            self.graph_launches += 1
            for work in graph:
                self.queue(work)

        launch.known = ctypes.CFUNCTYPE(None)(launch)
        return launch

    def address(self, array: Any) -> int:
        """Where the array begins."""
        return int(array.__array_interface__["data"][0])

    def inside(self, array: Any) -> Any:
        """The NumPy array that an array of the device is, for stand-ins of what reads its memory."""
        return array

    def check(self, name: str, array: Any) -> None:
        """ArgumentError unless `array` is a NumPy array."""
        if not isinstance(array, np.ndarray):
            raise ArgumentError(f"{name} is a {type(array).__name__}, not a numpy.ndarray")


class StrictRuntime(EmulatorRuntime):
    """The same with arrays that are none of NumPy's: what mixes them with those of the host is an error, as
    is what CuPy does not have."""

    namespace = device_array.namespace

    def zeros(self, size: int, dtype: Any) -> Any:
        """An array of the device."""
        return DeviceArray(super().zeros(size, dtype))

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array of the device."""
        return DeviceArray(super().empty(shape, dtype))

    def copy(self, into: Any, source: Any) -> None:
        """Between the host and the device as `CupyRuntime` does it, by addresses and sizes."""
        arrays = [getattr(array, "_inside", array) for array in (into, source)]
        assert DeviceArray in (type(into), type(source)), "a copy from the host to the host"
        if np.ndarray in (type(into), type(source)):
            assert all(array.flags.c_contiguous for array in arrays), "a copy by address of a strided array"
        super().copy(*arrays)

    def upload(self, into: Any, source: Any) -> None:
        """The values that `source` has now."""
        assert type(source) is np.ndarray
        super().upload(into, source)

    def holds(self, array: Any) -> bool:
        """Whether it is the device's."""
        return isinstance(array, DeviceArray)

    def borrow(self, array: Any) -> Any:
        """Over what the CUDA array interface describes."""
        return DeviceArray(super().borrow(array))

    def inside(self, array: Any) -> Any:
        """Of an array of the device, and of no other."""
        return array._inside

    def address(self, array: Any) -> int:
        """Of an array of the device, and of no other."""
        return super().address(self.inside(array))

    def check(self, name: str, array: Any) -> None:
        """ArgumentError unless `array` is the device's."""
        if not self.holds(array):
            raise ArgumentError(f"{name} is a {type(array).__name__}, not an array of the device")


class LazyRuntime(EmulatorRuntime):
    """Streams that run nothing before they are waited for, and of all those first that were used last: what
    does not follow the stream of a step before runs before that step. The current one is `stream`."""

    driver = None

    def __init__(self) -> None:
        super().__init__()
        self._queued = collections.defaultdict[int, list[Callable[[], object]]](list)

    def queue(self, work: Callable[[], object]) -> None:
        """Keep `work` for later."""
        if self._captured is None:
            self._queued[self.stream].append(work)
        else:
            self._captured.append(work)

    def follow(self, last: Any) -> Any:
        """What is queued to `last` until now runs before what is queued here from now on."""
        if self._captured is not None:
            return last
        if last not in (None, self.stream):
            until = len(self._queued[last])
            self.queue(lambda: self._run(last, until))
        return self.stream

    def _run(self, stream: int, until: int) -> None:
        works = self._queued[stream]
        for i in range(until):
            works[i], work = tuple, works[i]
            work()

    def synchronize(self) -> None:
        """Run what was queued to the current one."""
        self._run(self.stream, len(self._queued[self.stream]))

    def synchronize_all(self) -> None:
        """Run everything."""
        for stream in reversed(self._queued):
            self._run(stream, len(self._queued[stream]))


class CountingRuntime(EmulatorRuntime):
    """Launches nothing; counts splits and uploads, on a large device."""

    multiprocessors, driver = 132, None

    def __init__(self) -> None:
        super().__init__()
        self.splits: list[int] = []
        self.uploads = 0

    def kernel(self, module: str, expression: str, shared_bytes: int = 0) -> Any:
        """Counts the splits of a launch."""
        return lambda grid, *_, **__: self.splits.append(grid[0])

    def upload(self, into: Any, source: Any) -> None:
        """Counted."""
        self.uploads += 1
        super().upload(into, source)


@functools.cache
def _kernel(code: str, expression: str, options: tuple[str, ...], sanitizer: str) -> Kernel:
    module = RawModule(
        code, options=(*OPTIONS, *options), name_expressions=(expression,), sanitizer=sanitizer
    )
    return module.get_function(expression)
