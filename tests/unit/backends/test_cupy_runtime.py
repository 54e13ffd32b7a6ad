"""What is said where the GPU path cannot work, and that it is looked for only when asked."""

from __future__ import annotations

import subprocess
import sys
import warnings
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from cupy_signatures import strict

from treeattn.backends import cuda, device
from treeattn.backends.cuda import cupy_runtime
from treeattn.backends.cuda import driver as cuda_driver
from treeattn.errors import ArgumentError, BackendError, TransportError


class CUDARuntimeError(RuntimeError):
    """As in cupy.cuda.runtime."""


class CompileException(Exception):
    """As in cupy.cuda.compiler."""


class OutOfMemoryError(MemoryError):
    """As in cupy.cuda.memory."""


def peer_memory(log):
    """What cupy.cuda.runtime has of memory that processes share: it says what was called. A first entry that
    names a function makes that one fail."""

    def function(name):
        def call(*given):
            if log and log[0] == name:
                raise CUDARuntimeError("cudaErrorNotSupported: operation not supported")
            log.append((name, *given))
            return {"malloc": 4096, "ipcGetMemHandle": b"handle", "ipcOpenMemHandle": 8192}.get(name)

        return strict(f"cuda.runtime.{name}", call)

    ipc = ("ipcGetMemHandle", "ipcOpenMemHandle", "ipcCloseMemHandle")
    return {name: function(name) for name in ("malloc", "free", "memset", *ipc)}


def fake_cupy(**changes):
    """A module with what the runtime uses of CuPy, on a machine with one GPU unless changed."""

    class Device:
        id = 0
        used: list[int] = []  # noqa: RUF012
        compute_capability = changes.get("capability", "90")
        # No others: CuPy's table lacks the compute capability.
        attributes = {"MultiProcessorCount": 132}  # noqa: RUF012
        if not changes.get("hip"):
            attributes["MaxSharedMemoryPerBlockOptin"] = 227 << 10

        def __init__(self, device=0):
            self.index = device

        def use(self):
            self.used.append(self.index)

        def __enter__(self): ...

        def __exit__(self, *error): ...

    class Stream:
        """Says what was done to it."""

        ptr = 77
        log: list[str] = []  # noqa: RUF012
        capturing = False

        def __init__(self, null=False, non_blocking=False):
            assert not null
            assert non_blocking, "the default stream would wait for a blocking one, which no capture allows"

        def __enter__(self):
            self.log.append("current")
            return self

        def __exit__(self, *error):
            self.log.append("left")

        def synchronize(self):
            self.log.append("waited for")

        @property
        def done(self):
            return "busy" not in self.log

        def is_capturing(self):
            return self.capturing

        def begin_capture(self):
            self.log.append("begin")

        def end_capture(self):
            self.log.append("end")
            if "spoilt" in self.log:
                raise CUDARuntimeError("cudaErrorStreamCaptureInvalidated")
            return SimpleNamespace(launch=strict("cuda.Graph.launch", lambda: self.log.append("launch")))

    class Event:
        """Done when `ended` says so."""

        ended = False

        def __init__(self, block=False, disable_timing=False):
            assert (block, disable_timing) == (False, True)

        @property
        def done(self):
            return self.ended

        def record(self, stream=None):
            Stream.log.append("event")

    def device_count():
        if changes.get("driver") == 0 or changes.get("too_old"):
            raise CUDARuntimeError("cudaErrorInsufficientDriver")
        if "device_error" in changes:
            raise CUDARuntimeError(changes["device_error"])
        return 0 if changes.get("no_gpu") else changes.get("gpus", 1)

    def raw_module(code, options, name_expressions):
        if "compile_error" in changes:
            raise changes["compile_error"]
        assert isinstance(options, tuple)
        (name,) = name_expressions
        assert name in code
        kernel = SimpleNamespace(name=name, kernel=SimpleNamespace(ptr=4711))
        return SimpleNamespace(get_function={name: kernel}.__getitem__)

    def zeros(shape, dtype):
        raise OutOfMemoryError("Out of memory allocating 1,024 bytes")

    def pinned(size):
        if "no_pinned" in changes:
            raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
        return bytearray(size + 100)  # a pool gives more than was asked for

    module = ModuleType("cupy")
    module.ndarray = type("ndarray", (), {})
    module.RawModule = strict("RawModule", raw_module)
    module.zeros = module.empty = strict("zeros", zeros)
    module.copyto = strict("copyto", lambda into, source: Stream.log.append("copy"))
    module.cuda = SimpleNamespace(
        Device=Device,
        Stream=Stream,
        Event=Event,
        get_current_stream=strict("cuda.get_current_stream", lambda: Stream(non_blocking=True)),
        alloc_pinned_memory=strict("cuda.alloc_pinned_memory", pinned),
        driver=SimpleNamespace(
            occupancyMaxActiveBlocksPerMultiprocessor=strict(
                "cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor",
                lambda *given: {(4711, 128, 70_000): 3}.get(given, 0),
            )
        ),
        is_available=lambda: not changes.keys() & {"driver", "too_old", "no_gpu", "device_error"},
        runtime=SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            driverGetVersion=lambda: changes.get("driver", 12040 if "too_old" in changes else 13000),
            runtimeGetVersion=lambda: 13000,
            getDeviceCount=device_count,
            is_hip=changes.get("hip", False),
            getDevice=lambda: changes.get("current", 0),
            getDeviceProperties=strict("cuda.runtime.getDeviceProperties", lambda device: {"name": b"Fake"}),
            **peer_memory(changes.get("peer", [])),
            deviceSynchronize=strict("cuda.runtime.deviceSynchronize", lambda: Stream.log.append("all")),
        ),
        compiler=SimpleNamespace(CompileException=CompileException),
        memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
    )
    return module


@pytest.fixture
def use(monkeypatch):
    """Puts such a CuPy in place, and returns it. What is found out about one is kept for good: not here."""

    def forget():
        for cached in (cupy_runtime._cupy, cupy_runtime._device):
            cached.cache_clear()

    def use(**changes):
        monkeypatch.setitem(sys.modules, "cupy", fake_cupy(**changes))
        monkeypatch.setattr(cuda_driver, "identity", lambda index: f"8f1c0a52-{index}")
        return sys.modules["cupy"]

    forget()
    yield use
    forget()


def test_cpu_work_never_imports_cupy():
    code = (
        "import sys, treeattn, treeattn.backends.cpu, treeattn.backends.cuda;"
        "import treeattn.backends.cuda.cupy_runtime;"
        "assert 'cupy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"driver": 0}, "no NVIDIA driver.*device='cpu'"),
        ({"too_old": True}, r"built for CUDA 13, the driver offers 12\.4.*treeattn\[cuda12\]"),
        ({"hip": True}, r"for AMD's ROCm, which is not served: use device='cpu'.*treeattn\[cuda12\]"),
        ({"no_gpu": True}, "shows no GPU: check CUDA_VISIBLE_DEVICES"),
        ({"device_error": "cudaErrorNoDevice: no CUDA-capable device"}, "shows no GPU: check CUDA_VISIBLE_"),
        ({"device_error": "cudaErrorSystemDriverMismatch: ..."}, "not start: cudaErrorSystemDriverM.*doctor"),
    ],
)
def test_what_lacks_is_named_with_its_remedy(use, changes, message):
    use(**changes)
    with pytest.raises(BackendError, match=message):
        cuda.MergeOperator(64)
    assert cupy_runtime.problem() is not None


def test_another_gpu_than_the_current_one_is_refused(use, monkeypatch):
    """Objects of torch have a number, which was not looked at: GPU 0 computed."""
    use()
    monkeypatch.setattr("treeattn.backends.cuda.device.BlockTables", lambda runtime: None)
    assert device.find(SimpleNamespace(type="cuda", index=0)).runtime.index == 0
    with pytest.raises(ArgumentError, match=r"cuda:1 is not .* which is 0: cupy.cuda.Device\(1\).use\(\)"):
        device.find(SimpleNamespace(type="cuda", index=1))


@pytest.fixture
def package(use, monkeypatch, tmp_path):
    """Puts a package of this source in CuPy's place."""

    def package(source):
        (tmp_path / "cupy.py").write_text(source)
        monkeypatch.delitem(sys.modules, "cupy", raising=False)
        monkeypatch.syspath_prepend(tmp_path)

    yield package
    sys.modules.pop("cupy", None)


def test_no_cupy(use, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BackendError, match=r"treeattn\[cuda12\]"):
        cuda.MergeOperator(64)


def test_cupy_that_lacks_a_library(package):
    """The package is there, what it loads is not."""
    package("raise ImportError('libcudart.so.12: no such file', name='cupy._core')")
    with pytest.raises(BackendError, match=r"does not load: libcudart.*treeattn\[cuda12\]"):
        cuda.MergeOperator(64)


def test_a_warning_of_cupy_is_no_error(package):
    """Here, where every warning is one: the package warns, and is looked at all the same."""
    package(
        "import types, warnings\n"
        "warnings.warn('CuPy may not function correctly: two builds')\n"
        "cuda = types.SimpleNamespace(runtime=types.SimpleNamespace(is_hip=True))\n"
    )
    with pytest.warns(UserWarning, match="two builds"), pytest.raises(BackendError, match="for AMD's ROCm"):
        cuda.MergeOperator(64)


def test_a_warning_of_the_compiler_is_no_error(use, monkeypatch):
    cupy = use()
    compiled = cupy.RawModule

    def warns(**options):
        warnings.warn("nvrtc: a later version is there", stacklevel=1)
        return compiled(**options)

    monkeypatch.setattr(cupy, "RawModule", warns)
    with pytest.warns(UserWarning, match="a later version"):
        cupy_runtime.current().kernel("finish", "finish")


class CUDADriverError(RuntimeError):
    """As in cupy_backends.cuda.api.driver."""


class DynamicLibNotFoundError(RuntimeError):
    """What the search for a library of the toolkit raises."""


@pytest.mark.parametrize(
    ("error", "told", "message"),
    [
        (DynamicLibNotFoundError("Failure finding libnvrtc.so"), BackendError, "no NVRTC"),
        (
            CUDADriverError("CUDA_ERROR_INVALID_IMAGE"),
            BackendError,
            "load finish: CUDA_ERROR_INVALID.*doctor",
        ),
        (CompileException("finish.cu(3): error"), BackendError, r"NVRTC refuses finish.*finish.cu\(3\)"),
        (KeyError("a fault of ours"), KeyError, "a fault of ours"),
    ],
)
def test_trouble_of_the_compiler_is_told_and_no_other(use, error, told, message):
    use(compile_error=error)
    with pytest.raises(told, match=message):
        cupy_runtime.current().kernel("finish", "finish")


def test_out_of_memory(use):
    use(no_pinned=True)
    runtime = cupy_runtime.current()
    with pytest.raises(BackendError, match="num_splits="):
        runtime.zeros(10, np.float32)
    with pytest.raises(BackendError, match="out of GPU memory.*smaller cache, more ranks"):
        runtime.empty((2, 3), np.float32)
    with pytest.raises(BackendError, match="no page-locked memory.*cudaErrorMemoryAllocation.*of the host"):
        runtime.pinned((2, 3), np.float32)


@pytest.mark.parametrize(
    ("current", "lies", "message"),
    [
        (0, None, r"k is a numpy\.ndarray.*cupy\.asarray"),
        (0, 1, "k lies on GPU 1, but GPU 0 is current"),
        (1, 0, r"GPU 1 is current, but .* GPU 0: .*cupy\.cuda\.Device\(0\)"),
    ],
)
def test_arrays_that_lie_elsewhere_are_named(use, current, lies, message):
    cupy = use(current=current)
    array = np.zeros(1) if lies is None else cupy.ndarray()
    if lies is not None:
        array.device = SimpleNamespace(id=lies)
    with pytest.raises(ArgumentError, match=message):
        cupy_runtime.current().check("k", array)


@pytest.mark.parametrize(("capability", "has"), [("75", False), ("80", True), ("90", True), ("120", True)])
def test_tensor_cores_from_compute_capability_8(use, capability, has):
    use(capability=capability)
    runtime = cupy_runtime.current()
    assert (runtime.multiprocessors, runtime.shared_bytes, runtime.tensor_cores) == (132, 227 << 10, has)


def test_a_kernel_is_compiled_once_and_may_have_its_shared_memory(use):
    use()
    runtime = cupy_runtime.current()
    kernel = runtime.kernel("finish", "finish", 70_000)
    assert kernel.max_dynamic_shared_size_bytes == 70_000
    assert runtime.kernel("finish", "finish", 70_000) is kernel
    assert not hasattr(runtime.kernel("finish", "finish"), "max_dynamic_shared_size_bytes")
    assert runtime.resident_blocks(kernel, 128, 70_000) == 3
    assert runtime.resident_blocks(kernel, 128, 200_000) == 1


def test_ranks_take_the_visible_gpus_in_turn(use):
    cupy = use(gpus=4)
    cupy_runtime.choose(6)
    assert cupy.cuda.Device.used == [2]


def device_array(done):
    """Writes down how it is copied."""
    pointer = "cuda.MemoryPointer"
    return SimpleNamespace(
        data=SimpleNamespace(
            copy_from_host_async=strict(
                f"{pointer}.copy_from_host_async", lambda at, size: done.append(("up", at, size))
            ),
            copy_to_host_async=strict(
                f"{pointer}.copy_to_host_async", lambda at, size: done.append(("down", at, size))
            ),
        )
    )


def test_what_is_uploaded_may_change_at_once(use):
    """The copies read memory of their own, which is kept until the event behind them."""
    cupy = use()
    runtime, done, lengths = cupy_runtime.current(), [], np.array([3, 4])
    for _ in range(3):
        runtime.upload(device_array(done), lengths)
        lengths += 10
    kept = [staged for _, staged in runtime._uploads]
    assert [staged.tolist() for staged in kept] == [[3, 4], [13, 14], [23, 24]]
    assert done == [("up", staged.ctypes.data, 16) for staged in kept]
    assert cupy.cuda.Stream.log == ["event"] * 3
    cupy.cuda.Event.ended = True
    runtime.upload(device_array(done), lengths)
    assert len(runtime._uploads) == 1


def test_copies_go_by_address_and_length(use):
    cupy, done = use(), []
    runtime, array = cupy_runtime.current(), device_array(done)
    host = runtime.pinned((3, 5), np.float32)
    assert host.shape == (3, 5)
    assert host.flags.c_contiguous
    runtime.copy(array, host)
    runtime.copy(host, array)
    assert done == [("up", host.ctypes.data, 60), ("down", host.ctypes.data, 60)]
    runtime.copy(array, array)
    assert cupy.cuda.Stream.log == ["copy"]


def test_a_capture_has_a_stream_of_its_own_and_ends_with_an_error(use):
    log = use().cuda.Stream.log
    runtime = cupy_runtime.current()
    runtime.capture(lambda: log.append("run"))()
    assert log == ["current", "begin", "run", "end", "left", "launch"]
    with pytest.raises(ZeroDivisionError):
        runtime.capture(lambda: 1 / 0)
    assert log[6:] == ["current", "begin", "end", "left"]
    with pytest.raises(ZeroDivisionError):  # not what ending a spoilt capture says
        runtime.capture(lambda: log.append("spoilt") or 1 / 0)
    assert log[-2:] == ["end", "left"]
    assert (runtime.stream, runtime.identity, runtime.capturing()) == (77, "8f1c0a52-0", False)


def test_a_stream_waits_for_the_last_one_by_an_event(use, monkeypatch):
    cupy = use()
    runtime, log = cupy_runtime.current(), []
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    first.ptr, second.ptr = 1, 2
    for stream in (first, second):
        stream.wait_event = strict("cuda.Stream.wait_event", lambda event, ptr=stream.ptr: log.append(ptr))
    monkeypatch.setattr(cupy.cuda.Event, "record", lambda event, stream: log.append(-stream.ptr))
    last = None
    for current in (first, first, second, second, first):
        monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda current=current: current)
        last = runtime.follow(last)
        assert last is current
    assert log == [-1, 2, -2, 1]
    second.capturing = True
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: second)
    assert runtime.follow(first) is first
    assert runtime.follow(None) is None
    second.capturing = False
    error = cupy.cuda.runtime.CUDARuntimeError
    monkeypatch.setattr(cupy.cuda.Event, "record", lambda *given: (_ for _ in ()).throw(error("gone")))
    with pytest.raises(BackendError, match="last step cannot be waited for: gone; keep it"):
        runtime.follow(first)
    assert log == [-1, 2, -2, 1]


def test_one_stream_is_asked_and_all_are_waited_for(use):
    log = use().cuda.Stream.log
    runtime = cupy_runtime.current()
    assert runtime.done()
    log.append("busy")
    assert not runtime.done()
    runtime.synchronize_all()
    assert log == ["busy", "all"]


def test_memory_for_other_processes_is_cudas_own_and_zero(use):
    log = []
    use(peer=log)
    runtime = cupy_runtime.current()
    assert runtime.expose(5) == (4096, b"handle")
    size = 2 << 20  # what CUDA shares with nothing else
    assert log == [("malloc", size), ("memset", 4096, 0, size), ("ipcGetMemHandle", 4096)]
    log.clear()
    assert runtime.open_exposed(b"theirs") == 8192
    runtime.close_exposed(8192)
    runtime.withdraw(4096)
    assert log == [("ipcOpenMemHandle", b"theirs"), ("ipcCloseMemHandle", 8192), ("free", 4096)]


@pytest.mark.parametrize(
    ("fails", "error", "message"),
    [
        ("malloc", BackendError, "out of GPU memory: cudaError"),
        (
            "ipcGetMemHandle",
            TransportError,
            "exposes no memory: cudaErrorNotSupported.*--gpu-bind=none.*'nccl' or 'host'",
        ),
    ],
)
def test_memory_that_cannot_be_exposed(use, fails, error, message):
    """It is given back."""
    log = [fails]
    use(peer=log).get_default_memory_pool = lambda: SimpleNamespace(
        free_all_blocks=lambda: log.append("pool")
    )
    with pytest.raises(error, match=message):
        cupy_runtime.current().expose(5)
    assert (("free", 4096) in log) == (("malloc", 2 << 20) in log)
    assert ("pool" in log) == (fails == "malloc")


def test_memory_that_cannot_be_opened(use):
    use(peer=["ipcOpenMemHandle"])
    with pytest.raises(
        TransportError, match=r"NotSupported.*peer access.*MIG.*IPC and PID namespaces.*'host'"
    ):
        cupy_runtime.current().open_exposed(b"theirs")
