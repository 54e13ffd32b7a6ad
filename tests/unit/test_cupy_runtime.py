"""What is said where the GPU path cannot work, and that it is looked for only when asked."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from treeattn.backends import cuda, cupy_runtime
from treeattn.errors import ArgumentError, BackendError


class CUDARuntimeError(RuntimeError):
    """As in cupy.cuda.runtime."""


class CompileException(Exception):
    """As in cupy.cuda.compiler."""


class OutOfMemoryError(MemoryError):
    """As in cupy.cuda.memory."""


def fake_cupy(**changes: Any) -> ModuleType:
    """A module with what the runtime uses of CuPy, on a machine with one GPU unless changed."""

    class Device:
        id = 0
        used: list[int] = []  # noqa: RUF012
        pci_bus_id = "0000:3B:00.0"
        attributes = {  # noqa: RUF012
            "MultiProcessorCount": 132,
            "MaxSharedMemoryPerBlockOptin": 227 << 10,
            "ComputeCapabilityMajor": 9,
        }

        def __init__(self, index: int = 0) -> None:
            self.index = index

        def use(self) -> None:
            self.used.append(self.index)

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

    class Stream:
        """Says what was done to it."""

        ptr = 77
        log: list[str] = []  # noqa: RUF012
        capturing = False

        def __init__(self, non_blocking: bool = False) -> None:
            assert non_blocking, "the default stream would wait for a blocking one, which no capture allows"

        def __enter__(self) -> Stream:
            self.log.append("current")
            return self

        def __exit__(self, *error: object) -> None:
            self.log.append("left")

        def synchronize(self) -> None:
            self.log.append("waited for")

        def is_capturing(self) -> bool:
            return self.capturing

        def begin_capture(self) -> None:
            self.log.append("begin")

        def end_capture(self) -> Any:
            self.log.append("end")
            return SimpleNamespace(launch=lambda: self.log.append("launch"))

    def device_count() -> int:
        if changes.get("driver") == 0 or changes.get("too_old"):
            raise CUDARuntimeError("cudaErrorInsufficientDriver")
        if "device_error" in changes:
            raise CUDARuntimeError(changes["device_error"])
        return 0 if changes.get("no_gpu") else changes.get("gpus", 1)

    def raw_module(**arguments: Any) -> Any:
        raise changes["compile_error"]

    def zeros(shape: Any, dtype: Any) -> Any:
        raise OutOfMemoryError("Out of memory allocating 1,024 bytes")

    module = ModuleType("cupy")
    module.ndarray = type("ndarray", (), {})  # type: ignore[attr-defined]
    module.RawModule = raw_module  # type: ignore[attr-defined]
    module.zeros = module.empty = zeros  # type: ignore[attr-defined]
    module.copyto = lambda into, source: Stream.log.append("copy")  # type: ignore[attr-defined]
    module.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        Device=Device,
        Stream=Stream,
        get_current_stream=lambda: Stream(non_blocking=True),
        alloc_pinned_memory=lambda size: bytearray(size + 100),  # a pool gives more than was asked for
        is_available=lambda: not changes.keys() & {"driver", "too_old", "no_gpu", "device_error"},
        runtime=SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            driverGetVersion=lambda: changes.get("driver", 12040 if "too_old" in changes else 13000),
            runtimeGetVersion=lambda: 13000,
            getDeviceCount=device_count,
        ),
        compiler=SimpleNamespace(CompileException=CompileException),
        memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
    )
    return module


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """What was found out about CuPy is kept for good: not in these tests."""
    for cached in (cupy_runtime._cupy, cupy_runtime._device):
        cached.cache_clear()
    yield
    for cached in (cupy_runtime._cupy, cupy_runtime._device):
        cached.cache_clear()


def use(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(**changes))


def test_cpu_work_never_imports_cupy() -> None:
    code = (
        "import sys, treeattn, treeattn.backends.cpu, treeattn.backends.cuda, treeattn.backends.cupy_runtime;"
        "assert 'cupy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"driver": 0}, "no NVIDIA driver.*device='cpu'"),
        ({"too_old": True}, r"built for CUDA 13, the driver offers 12\.4.*treeattn\[cuda12\]"),
        ({"no_gpu": True}, "shows no GPU: check CUDA_VISIBLE_DEVICES"),
        (
            {"device_error": "cudaErrorNoDevice: no CUDA-capable device"},
            "shows no GPU: check CUDA_VISIBLE_DEVICES",
        ),
        (
            {"device_error": "cudaErrorSystemDriverMismatch: ..."},
            "does not start: cudaErrorSystemDriverM.*doctor",
        ),
    ],
)
def test_what_lacks_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    use(monkeypatch, **changes)
    with pytest.raises(BackendError, match=message):
        cuda.MergeOperator(64)
    assert cupy_runtime.problem() is not None


def test_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BackendError, match=r"treeattn\[cuda12\]"):
        cuda.MergeOperator(64)


def test_cupy_that_lacks_a_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The package is there, what it loads is not."""
    (tmp_path / "cupy.py").write_text("raise ImportError('libcudart.so.12: no such file', name='cupy._core')")
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendError, match=r"does not load: libcudart.*treeattn\[cuda12\]"):
        cuda.MergeOperator(64)


class CUDADriverError(RuntimeError):
    """As in cupy_backends.cuda.api.driver."""


class DynamicLibNotFoundError(RuntimeError):
    """What the search for a library of the toolkit raises."""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (DynamicLibNotFoundError("Failure finding libnvrtc.so"), "no NVRTC"),
        (
            CUDADriverError("CUDA_ERROR_INVALID_IMAGE: ..."),
            "does not load finish: CUDA_ERROR_INVALID.*doctor",
        ),
        (CompileException("kernels/cuda/finish.cu(3): error"), r"NVRTC refuses finish.*finish.cu\(3\)"),
    ],
)
def test_compiler_trouble(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    use(monkeypatch, compile_error=error)
    with pytest.raises(BackendError, match=message):
        cupy_runtime.current().kernel("finish", "finish")


def test_errors_of_other_kinds_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, compile_error=KeyError("a fault of ours"))
    with pytest.raises(KeyError, match="a fault of ours"):
        cupy_runtime.current().kernel("finish", "finish")


def test_out_of_memory_and_foreign_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    runtime = cupy_runtime.current()
    assert (runtime.multiprocessors, runtime.shared_bytes, runtime.tensor_cores) == (132, 227 << 10, True)
    with pytest.raises(BackendError, match="num_splits="):
        runtime.zeros(10, np.float32)
    with pytest.raises(ArgumentError, match=r"k is a numpy\.ndarray.*cupy\.asarray"):
        runtime.check("k", np.zeros(1))
    elsewhere = sys.modules["cupy"].ndarray()
    elsewhere.device = SimpleNamespace(id=1)
    with pytest.raises(ArgumentError, match="k lies on GPU 1, but GPU 0 is current"):
        runtime.check("k", elsewhere)


def test_every_allocation_says_when_memory_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    with pytest.raises(BackendError, match="out of GPU memory.*smaller cache, more ranks"):
        cupy_runtime.current().empty((2, 3), np.float32)


def test_ranks_take_the_visible_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, gpus=4)
    assert cupy_runtime.choose(6) == 4
    assert sys.modules["cupy"].cuda.Device.used == [2]


def test_copies_go_by_address_and_length(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    runtime = cupy_runtime.current()
    done: list[tuple[str, int, int]] = []
    array = SimpleNamespace(
        data=SimpleNamespace(
            copy_from_host_async=lambda at, size: done.append(("up", at, size)),
            copy_to_host_async=lambda at, size: done.append(("down", at, size)),
        )
    )
    host = runtime.pinned((3, 5), np.float32)
    assert host.shape == (3, 5)
    assert host.flags.c_contiguous
    runtime.copy(array, host)
    runtime.copy(host, array)
    assert done == [("up", host.ctypes.data, 60), ("down", host.ctypes.data, 60)]
    runtime.copy(array, array)
    assert sys.modules["cupy"].cuda.Stream.log == ["copy"]


def test_a_capture_has_a_stream_of_its_own_and_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)
    runtime, log = cupy_runtime.current(), sys.modules["cupy"].cuda.Stream.log
    launch = runtime.capture(lambda: log.append("run"))
    launch()
    assert log == ["current", "begin", "run", "end", "left", "launch"]
    with pytest.raises(ZeroDivisionError):
        runtime.capture(lambda: 1 / 0)
    assert log[6:] == ["current", "begin", "end", "left"]
    assert (runtime.stream, runtime.identity, runtime.capturing()) == (77, "0000:3B:00.0", False)
