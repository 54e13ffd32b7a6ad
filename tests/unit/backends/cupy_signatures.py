"""How CuPy declares what this package calls of it, and a CuPy made up of that: it refuses what CuPy would.

`SIGNATURES` and `ATTRIBUTES` hold for CuPy 14.2; `test_cupy_signatures.py` compares them with a CuPy that is
installed, for which no GPU is needed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

#: Dotted name below ``cupy`` -> its parameters, without ``self``; None: a property or a type.
SIGNATURES: dict[str, str | None] = {
    "RawModule": "code=None, *, path=None, options=(), backend='nvrtc', translate_cucomplex=False, "
    "enable_cooperative_groups=False, name_expressions=None, jitify=False",
    "RawModule.get_function": "name",
    "RawKernel.kernel": None,
    "RawKernel.max_dynamic_shared_size_bytes": None,
    "arange": "start, stop=None, step=1, dtype=None",
    "asarray": "a, dtype=None, order=None, *, copy=None, blocking=False",
    "ascontiguousarray": "a, dtype=None",
    "concatenate": "tup, axis=0, out=None, *, dtype=None, casting='same_kind'",
    "copyto": "dst, src, casting='same_kind', where=None",
    "cumsum": "a, axis=None, dtype=None, out=None",
    "empty": "shape, dtype=float, order='C'",
    "exp": "x, /, out=None, *, casting='same_kind', dtype=None",
    "lexsort": "keys",
    "nonzero": "a",
    "ones": "shape, dtype=float, order='C'",
    "repeat": "a, repeats, axis=None",
    "sqrt": "x, /, out=None, *, casting='same_kind', dtype=None",
    "take_along_axis": "a, indices, axis",
    "unique": "ar, return_index=False, return_inverse=False, return_counts=False, axis=None, *, "
    "equal_nan=True",
    "zeros": "shape, dtype=float, order='C'",
    "ndarray": None,
    "ndarray.T": None,
    "ndarray.astype": "dtype, order='K', casting=None, subok=None, copy=True",
    "ndarray.copy": "order='C'",
    "ndarray.dtype": None,
    "ndarray.flags": None,
    "ndarray.get": "stream=None, order='C', out=None, blocking=True",
    "ndarray.itemsize": None,
    "ndarray.max": "axis=None, out=None, keepdims=False",
    "ndarray.min": "axis=None, out=None, keepdims=False",
    "ndarray.nbytes": None,
    "ndarray.ndim": None,
    "ndarray.reshape": "*shape, order='C', copy=None",
    "ndarray.shape": None,
    "ndarray.size": None,
    "ndarray.strides": None,
    "ndarray.sum": "axis=None, dtype=None, out=None, keepdims=False",
    "ndarray.transpose": "*axes",
    "ndarray.view": "dtype=None, type=None",
    "cuda.Device": "device=None",
    "cuda.Device.compute_capability": None,
    "cuda.Device.id": None,
    "cuda.Device.use": "",
    "cuda.Event": "block=False, disable_timing=False, interprocess=False",
    "cuda.Event.done": None,
    "cuda.Event.record": "stream=None",
    "cuda.Event.synchronize": "",
    "cuda.ExternalStream": "ptr, device_id=-1",
    "cuda.Graph.graphExec": None,
    "cuda.Graph.launch": "stream=None",
    "cuda.MemoryPointer.copy_from_host_async": "mem, size, stream=None",
    "cuda.MemoryPointer.copy_to_host_async": "mem, size, stream=None",
    "cuda.Stream": "null=False, non_blocking=False, ptds=False, priority=None",
    "cuda.Stream.begin_capture": "mode=None",
    "cuda.Stream.done": None,
    "cuda.Stream.end_capture": "",
    "cuda.Stream.is_capturing": "",
    "cuda.Stream.synchronize": "",
    "cuda.Stream.wait_event": "event",
    "cuda.alloc_pinned_memory": "size",
    "cuda.compiler.CompileException": None,
    "cuda.driver.CUDADriverError": None,
    "cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor": "func, blockSize, dynamicSMemSize",
    "cuda.get_current_stream": "device_id=-1",
    "cuda.get_elapsed_time": "start_event, end_event",
    "cuda.is_available": "",
    "cuda.memory.OutOfMemoryError": None,
    "cuda.runtime.CUDARuntimeError": None,
    "cuda.runtime.deviceSynchronize": "",
    "cuda.runtime.free": "ptr",
    "cuda.runtime.getDevice": "",
    "cuda.runtime.getDeviceCount": "",
    "cuda.runtime.getDeviceProperties": "device",
    "cuda.runtime.ipcCloseMemHandle": "devPtr",
    "cuda.runtime.ipcGetMemHandle": "devPtr",
    "cuda.runtime.ipcOpenMemHandle": "handle, flags=1",
    "cuda.runtime.is_hip": None,
    "cuda.runtime.malloc": "size",
    "cuda.runtime.memcpy": "dst, src, size, kind",
    "cuda.runtime.memcpyDeviceToHost": None,
    "cuda.runtime.memset": "ptr, value, size",
    "cuda.nccl.NCCL_FLOAT32": None,
    "cuda.nccl.NCCL_MAX": None,
    "cuda.nccl.NCCL_SUM": None,
    "cuda.nccl.NcclCommunicator": "ndev, commId, rank, config=None",
    "cuda.nccl.NcclCommunicator.abort": "",
    "cuda.nccl.NcclCommunicator.allReduce": "sendbuf, recvbuf, count, datatype, op, stream",
    "cuda.nccl.NcclCommunicator.check_async_error": "",
    "cuda.nccl.NcclCommunicator.destroy": "",
    "cuda.nccl.NcclCommunicator.recv": "recvbuf, count, datatype, peer, stream",
    "cuda.nccl.NcclCommunicator.send": "sendbuf, count, datatype, peer, stream",
    "cuda.nccl.get_unique_id": "",
    "cuda.nccl.get_version": "",
    "cuda.nccl.groupEnd": "",
    "cuda.nccl.groupStart": "",
}
#: Keys of ``cupy.cuda.Device.attributes``: "cudaDevAttr" and these are in ``cupy.cuda.runtime``.
ATTRIBUTES = ("L2CacheSize", "MaxSharedMemoryPerBlockOptin", "MultiProcessorCount")


def strict(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which gets what is given to the function of this name, in CuPy's order, without defaults.

    Raises `TypeError` for what CuPy does not take.
    """
    declared = signature(name)

    @functools.wraps(function)
    def call(*positional: Any, **named: Any) -> Any:
        given = declared.bind(*positional, **named).arguments
        return function(*given.values())

    return call


def signature(name: str) -> inspect.Signature:
    """Of the function of this name, as CuPy declares it."""
    parameters = SIGNATURES[name]
    assert parameters is not None, name
    declared: dict[str, Any] = {}
    exec(f"def declared({parameters}): ...", declared)
    return inspect.signature(declared["declared"])


class _CUDARuntimeError(RuntimeError):
    """As in cupy.cuda.runtime."""


#: Of a machine with one GPU and CUDA 13: what is looked at, returned or raised, by dotted name.
_ANSWERS: dict[str, Any] = {
    "__version__": "14.2.0",
    "ndarray": type("ndarray", (), {}),
    "cuda.Device.attributes": dict.fromkeys(ATTRIBUTES, 1 << 18),
    "cuda.Device.compute_capability": "90",
    "cuda.Device.id": 0,
    "cuda.Stream.done": True,
    "cuda.Stream.is_capturing": False,
    "cuda.Stream.ptr": 77,
    "cuda.Event.done": False,
    "cuda.compiler.CompileException": type("CompileException", (Exception,), {}),
    "cuda.is_available": True,
    "cuda.memory.OutOfMemoryError": type("OutOfMemoryError", (MemoryError,), {}),
    "cuda.runtime.CUDARuntimeError": _CUDARuntimeError,
    "cuda.runtime.getDevice": 0,
    "cuda.runtime.getDeviceCount": 1,
    "cuda.runtime.getDeviceProperties": {
        "name": b"Made up",
        "major": 9,
        "minor": 0,
        "totalGlobalMem": 1 << 36,
    },
    "cuda.runtime.is_hip": False,
}


class MadeUpCupy:
    """``cupy``, a part of it, or an object of one of its classes: what is called is written down in `log`, by
    dotted name and with what was given, and returns what `answers` says: a value, an error to raise, or a
    function to call; a new object where a class is called."""

    def __init__(self, name: str = "", answers: dict[str, Any] | None = None, log: list[Any] | None = None):
        self._name, self.answers = name, {**_ANSWERS} if answers is None else answers
        self.log: list[Any] = [] if log is None else log

    def __getattr__(self, attribute: str) -> Any:
        name = f"{self._name}.{attribute}".lstrip(".")
        if SIGNATURES.get(name) is not None:
            return strict(name, functools.partial(self._called, name))
        if name in self.answers:
            answer = self.answers[name]
            return answer(self) if inspect.isfunction(answer) else answer
        if not any(known.startswith(f"{name}.") for known in SIGNATURES):
            raise AttributeError(f"cupy.{name} is not among the signatures, or has no answer here")
        return self._part(name)

    def _part(self, name: str) -> MadeUpCupy:
        return MadeUpCupy(name, self.answers, self.log)

    def _called(self, name: str, *given: Any) -> Any:
        self.log.append((name, *given))
        made = any(known.startswith(f"{name}.") for known in SIGNATURES)
        if name == "cuda.get_current_stream":
            return self.answers.get(name) or self._part("cuda.Stream")
        answer = self.answers.get(name, self._part(name) if made else None)
        if isinstance(answer, Exception):
            raise answer
        return answer(*given) if inspect.isfunction(answer) else answer

    def __enter__(self) -> MadeUpCupy:
        self.log.append(f"in {self._name}")
        return self

    def __exit__(self, *_: Any) -> None:
        self.log.append(f"out of {self._name}")
