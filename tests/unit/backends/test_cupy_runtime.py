"""What is said where the GPU path cannot work, that it is looked for only when asked, and what is called."""

import sys
import warnings
from types import MethodType, SimpleNamespace

import numpy as np
import pytest
from cupy_signatures import MadeUpCupy, strict

from treeattn.backends import cuda, device
from treeattn.backends.cuda import cupy_runtime
from treeattn.backends.cuda import driver as cuda_driver
from treeattn.errors import ArgumentError, BackendError, TransportError


@pytest.fixture
def no_cupy():
    """What is found out about a CuPy is kept for good: not here."""
    caches = (cupy_runtime._cupy, cupy_runtime._device)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def cupy(no_cupy, monkeypatch):
    """One that is made up; tests change its answers."""
    made = MadeUpCupy()
    monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.setattr(cuda_driver, "identity", lambda index: f"8f1c0a52-{index}")
    monkeypatch.setattr(cuda_driver, "library", lambda: None)
    return made


@pytest.fixture
def runtime(cupy):
    return cupy_runtime.current()


@pytest.fixture
def log(cupy, runtime):
    """What is called of CuPy after the runtime is there."""
    cupy.log.clear()
    return cupy.log


def error(cupy, text="cudaErrorNotSupported: operation not supported"):
    return cupy.answers["cuda.runtime.CUDARuntimeError"](text)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"cuda.is_available": False}, "no GPU that it can use: check CUDA_VISIBLE_DEVICES.*doctor.*'cpu'"),
        ({"cuda.runtime.is_hip": True}, r"AMD's ROCm, which is not served: use device='cpu'.*\[cuda12\]"),
    ],
)
def test_what_lacks_is_named_with_its_remedy(cupy, answers, message):
    cupy.answers |= answers
    with pytest.raises(BackendError, match=message):
        cuda.MergeOperator(64)
    assert cupy_runtime.problem() is not None


@pytest.mark.usefixtures("cupy")
def test_another_gpu_than_the_current_one_is_refused(monkeypatch):
    """Objects of torch have a number, which was not looked at: GPU 0 computed."""
    monkeypatch.setattr("treeattn.backends.cuda.device.BlockTables", lambda runtime: None)
    assert device.find(SimpleNamespace(type="cuda", index=0)).runtime.index == 0
    with pytest.raises(ArgumentError, match=r"cuda:1 is not .* which is 0: cupy.cuda.Device\(1\).use\(\)"):
        device.find(SimpleNamespace(type="cuda", index=1))


@pytest.fixture
def package(no_cupy, monkeypatch, tmp_path):
    """Puts a package of this source in CuPy's place."""

    def package(source):
        (tmp_path / "cupy.py").write_text(source)
        monkeypatch.delitem(sys.modules, "cupy", raising=False)
        monkeypatch.syspath_prepend(tmp_path)

    yield package
    sys.modules.pop("cupy", None)


@pytest.mark.usefixtures("no_cupy")
def test_no_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BackendError, match=r"treeattn\[cuda12\]"):
        cuda.MergeOperator(64)


def test_cupy_that_lacks_a_library(package):
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


def kernel_of(code, options, names):
    """What a module gives, if it is compiled as a tuple of options and one name of the text say."""
    assert isinstance(options, tuple)
    assert names[0] in code
    return SimpleNamespace(get_function=lambda name: SimpleNamespace(kernel=SimpleNamespace(ptr=4711)))


def test_a_kernel_is_compiled_once_and_may_have_its_shared_memory(cupy, runtime, log):
    def warns(*given):
        warnings.warn("nvrtc: a later version is there", stacklevel=1)
        return kernel_of(*given)

    cupy.answers["RawModule"] = warns
    with pytest.warns(UserWarning, match="a later version"):  # where every warning is an error
        kernel = runtime.kernel("finish", "finish", 70_000)
    assert kernel.max_dynamic_shared_size_bytes == 70_000
    assert runtime.kernel("finish", "finish", 70_000) is kernel
    cupy.answers["RawModule"] = kernel_of
    assert not hasattr(runtime.kernel("finish", "finish"), "max_dynamic_shared_size_bytes")
    assert [entry[0] for entry in log].count("RawModule") == 2
    for blocks in (3, 0):
        cupy.answers["cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor"] = blocks
        assert runtime.resident_blocks(kernel, 128, 70_000) == max(blocks, 1)
    assert log[-1][1:] == (4711, 128, 70_000)


class CUDADriverError(RuntimeError):
    """As in cupy_backends.cuda.api.driver."""


class DynamicLibNotFoundError(RuntimeError):
    """What the search for a library of the toolkit raises."""


@pytest.mark.parametrize(
    ("trouble", "told", "message"),
    [
        (DynamicLibNotFoundError("Failure finding libnvrtc.so"), BackendError, "no NVRTC"),
        (CUDADriverError("CUDA_ERROR_INVALID_IMAGE"), BackendError, "load finish: CUDA_ERROR_INV.*doctor"),
        (None, BackendError, r"NVRTC refuses finish.*finish.cu\(3\)"),
        (KeyError("a fault of ours"), KeyError, "a fault of ours"),
    ],
)
def test_trouble_of_the_compiler_is_told_and_no_other(cupy, runtime, trouble, told, message):
    refused = cupy.answers["cuda.compiler.CompileException"]("finish.cu(3): error")
    cupy.answers["RawModule"] = trouble or refused
    with pytest.raises(told, match=message):
        runtime.kernel("finish", "finish")


def test_out_of_memory(cupy, runtime):
    full = cupy.answers["cuda.memory.OutOfMemoryError"]("Out of memory allocating 1,024 bytes")
    cupy.answers |= {"zeros": full, "empty": full}
    cupy.answers["cuda.alloc_pinned_memory"] = error(cupy, "cudaErrorMemoryAllocation: out of memory")
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
def test_arrays_that_lie_elsewhere_are_named(cupy, runtime, current, lies, message):
    cupy.answers["cuda.runtime.getDevice"] = current
    array = np.zeros(1) if lies is None else cupy.ndarray()
    if lies is not None:
        array.device = SimpleNamespace(id=lies)
    with pytest.raises(ArgumentError, match=message):
        runtime.check("k", array)


@pytest.mark.parametrize(("capability", "has"), [("75", False), ("80", True), ("90", True), ("120", True)])
def test_what_is_known_of_a_device(cupy, capability, has):
    """Tensor cores from compute capability 8.0 on, clusters from 9.0 on. Ranks take the GPUs in turn."""
    cupy.answers |= {"cuda.Device.compute_capability": capability, "cuda.runtime.getDeviceCount": 4}
    runtime = cupy_runtime.current()
    assert (runtime.multiprocessors, runtime.shared_bytes, runtime.tensor_cores) == (1 << 18, 1 << 18, has)
    assert runtime.clusters == (int(capability) >= 90)
    assert (runtime.stream, runtime.identity, runtime.capturing()) == (77, "8f1c0a52-0", False)
    cupy_runtime.choose(6)
    assert cupy.log[-2:] == [("cuda.Device", 2), ("cuda.Device.use",)]


@pytest.fixture
def device_array(log):
    """Writes down how it is copied."""

    def copying(name):
        return strict(f"cuda.MemoryPointer.{name}", lambda *given: log.append((name, *given)))

    names = "copy_from_host_async", "copy_to_host_async"
    return SimpleNamespace(data=SimpleNamespace(**{name: copying(name) for name in names}))


def test_what_is_uploaded_may_change_at_once(cupy, runtime, log, device_array):
    """The copies read memory of their own, which is kept until the event behind them."""
    cupy.answers["cuda.alloc_pinned_memory"] = lambda size: bytearray(size + 100)  # a pool gives more
    lengths = np.array([3, 4])
    for _ in range(3):
        runtime.upload(device_array, lengths)
        lengths += 10
    kept = [staged for _, staged in runtime._uploads]
    assert [staged.tolist() for staged in kept] == [[3, 4], [13, 14], [23, 24]]
    copies = [("copy_from_host_async", staged.ctypes.data, 16) for staged in kept]
    assert [entry for entry in log if entry[0] == "copy_from_host_async"] == copies
    assert [entry[0] for entry in log if "Event" in entry[0]] == ["cuda.Event", "cuda.Event.record"] * 3
    cupy.answers["cuda.Event.done"] = True
    runtime.upload(device_array, lengths)
    assert len(runtime._uploads) == 1


def test_copies_go_by_address_and_length(cupy, runtime, log, device_array):
    cupy.answers["cuda.alloc_pinned_memory"] = bytearray(200)
    host = runtime.pinned((3, 5), np.float32)
    assert host.shape == (3, 5)
    assert host.flags.c_contiguous
    runtime.copy(device_array, host)
    runtime.copy(host, device_array)
    runtime.copy(device_array, device_array)
    ways = [("copy_from_host_async", host.ctypes.data, 60), ("copy_to_host_async", host.ctypes.data, 60)]
    assert log[1:] == [*ways, ("copyto", device_array, device_array)]


def test_a_capture_has_a_stream_of_its_own_and_ends_with_an_error(cupy, runtime, log):
    graph = SimpleNamespace(graphExec=8192)
    graph.launch = MethodType(lambda self, stream=None: log.append("launch"), graph)
    cupy.answers["cuda.Stream.end_capture"] = graph
    begin = [("cuda.Device", 0), "in cuda.Device", ("cuda.Stream", True), "in cuda.Stream"]
    begin += [("cuda.Stream.begin_capture",)]
    end = [("cuda.Stream.end_capture",), "out of cuda.Stream", "out of cuda.Device"]
    launch = runtime.capture(lambda: log.append("run"))
    launch()
    assert log == [*begin, "run", *end, "launch"]
    assert runtime.handle(launch) == 8192
    for answer in (graph, error(cupy, "cudaErrorStreamCaptureInvalidated")):
        cupy.answers["cuda.Stream.end_capture"] = answer
        log.clear()
        with pytest.raises(ZeroDivisionError):  # not what ending a spoilt capture says
            runtime.capture(lambda: 1 / 0)
        assert log == begin + end


def test_a_stream_waits_for_the_last_one_by_an_event(cupy, runtime, log):
    first, second = (MadeUpCupy("cuda.Stream", {**cupy.answers, "cuda.Stream.ptr": n}, log) for n in (1, 2))
    last = None
    for current in (first, first, second, second, first):
        cupy.answers["cuda.get_current_stream"] = current
        last = runtime.follow(last)
        assert last is current
    events = [entry for entry in log if entry[0].startswith(("cuda.Event.", "cuda.Stream."))]
    names = ["cuda.Stream.is_capturing", "cuda.Event.record", "cuda.Stream.wait_event"]
    assert [entry[0] for entry in events if entry[0] in names[1:]] == names[1:] * 2
    assert [entry[1] for entry in events if entry[0] == names[1]] == [first, second]
    second.answers["cuda.Stream.is_capturing"] = True
    cupy.answers["cuda.get_current_stream"] = second
    log.clear()
    assert runtime.follow(first) is first
    assert runtime.follow(None) is None
    second.answers["cuda.Stream.is_capturing"] = False
    cupy.answers["cuda.Event.record"] = error(cupy, "gone")
    with pytest.raises(BackendError, match="last step cannot be waited for: gone; keep it"):
        runtime.follow(first)
    assert not [entry for entry in log if entry[0] == "cuda.Stream.wait_event"]


def test_the_stream_of_another_library_is_current_for_a_while(cupy, runtime, log):
    cupy.answers["cuda.ExternalStream"] = MadeUpCupy("cuda.ExternalStream", cupy.answers, log)
    with runtime.on_stream(runtime.stream):
        assert not [entry for entry in log if "ExternalStream" in str(entry)]
    with runtime.on_stream(runtime.stream + 1):
        log.append("within")
    around = log.index("within")
    assert log[around - 2 :] == [
        ("cuda.ExternalStream", runtime.stream + 1), "in cuda.ExternalStream",
        "within", "out of cuda.ExternalStream",
    ]  # fmt: skip


def test_one_stream_is_asked_and_all_are_waited_for(cupy, runtime, log):
    assert runtime.done()
    cupy.answers["cuda.Stream.done"] = False
    assert not runtime.done()
    runtime.synchronize_all()
    assert ("cuda.runtime.deviceSynchronize",) in log
    assert ("cuda.Stream.synchronize",) not in log


def test_memory_for_other_processes_is_cudas_own_and_zero(cupy, runtime, log):
    cupy.answers |= {"cuda.runtime.malloc": 4096, "cuda.runtime.ipcGetMemHandle": b"handle"}
    cupy.answers["cuda.runtime.ipcOpenMemHandle"] = 8192
    assert runtime.expose(5) == (4096, b"handle")
    assert runtime.open_exposed(b"theirs") == 8192
    runtime.close_exposed(8192)
    runtime.withdraw(4096)
    size = 2 << 20  # what CUDA shares with nothing else
    calls = [(entry[0].removeprefix("cuda.runtime."), *entry[1:]) for entry in log if "runtime" in entry[0]]
    assert calls == [
        *(("malloc", size), ("memset", 4096, 0, size), ("deviceSynchronize",), ("ipcGetMemHandle", 4096)),
        *(("ipcOpenMemHandle", b"theirs"), ("ipcCloseMemHandle", 8192), ("free", 4096)),
    ]
    cupy.answers["cuda.runtime.ipcOpenMemHandle"] = error(cupy)
    with pytest.raises(TransportError, match=r"NotSupported.*peer access.*MIG.*IPC and PID.*'host'"):
        runtime.open_exposed(b"theirs")


@pytest.mark.parametrize(
    ("fails", "raised", "message"),
    [
        ("malloc", BackendError, "out of GPU memory: cudaError"),
        (
            "ipcGetMemHandle",
            TransportError,
            "exposes no memory: cudaErrorNot.*--gpu-bind=none.*'nccl' or 'host'",
        ),
    ],
)
def test_memory_that_cannot_be_exposed_is_given_back(cupy, runtime, log, fails, raised, message):
    pool = SimpleNamespace(free_all_blocks=lambda: log.append(("pool",)))
    cupy.answers |= {"get_default_memory_pool": lambda _: lambda: pool, "cuda.runtime.malloc": 4096}
    cupy.answers[f"cuda.runtime.{fails}"] = error(cupy)
    with pytest.raises(raised, match=message):
        runtime.expose(5)
    assert (("cuda.runtime.free", 4096) in log) == (fails == "ipcGetMemHandle")
    assert (("pool",) in log) == (fails == "malloc")
