"""What the CUDA backend needs of a device, and what all of its launches share."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from treeattn import partial
from treeattn.collectives.runtime.memory import PeerMemory
from treeattn.errors import ArgumentError
from treeattn.partial import Array

#: Threads of a block, in every kernel.
THREADS = 128


def structure(
    pointers: str, longs: str, integers: str, floats: str = "", *, doubles: str = "", unsigned: str = ""
) -> np.dtype[Any]:
    """The argument structure of a kernel, C layout: names of its fields by type, in their order there.

    Doubles stand behind the pointers, unsigned integers behind the others.
    """
    fields = {"u8": pointers, "f8": doubles, "i8": longs, "i4": integers, "u4": unsigned, "f4": floats}
    return np.dtype([(name, kind) for kind, names in fields.items() for name in names.split()], align=True)


class Runtime(PeerMemory, Protocol):
    """What this backend needs of a device, and of the library that reaches it: a stream, memory that other
    processes can read, and kernels.

    Arrays have NumPy's ``shape``, ``dtype``, ``strides`` and ``flags``. `empty` raises `BackendError` where
    memory is out. `copy` takes a C-contiguous NumPy array on either side; the device array is so then too.
    """

    #: What the device calls itself, and which of this process's it is.
    name: str
    index: int
    #: How many the device has.
    multiprocessors: int
    #: The most shared memory that a block can have, opted in.
    shared_bytes: int
    #: Whether mma.m16n8k16 and cp.async exist: compute capability 8.0 and above.
    tensor_cores: bool
    #: Whether blocks can be clusters: compute capability 9.0 and above.
    clusters: bool
    #: What tells this GPU, or this partition of one, from the others of its host.
    identity: str
    #: Functions on its arrays, by NumPy's names: CuPy.
    namespace: Any
    #: The library of the driver, through which compiled code launches; None where that cannot be.
    driver: Any

    def kernel(self, module: str, expression: str, shared_bytes: int = 0) -> Callable[..., object]:
        """The kernel `expression` of kernels/cuda/<module>.cu, compiled at its first use, allowed
        `shared_bytes` of dynamic shared memory: called with (grid, block, arguments, shared_mem=)."""

    def handle(self, launch: Any) -> int:
        """What the driver knows a kernel by, or the graph that `capture` made, for as long as that lives."""

    def resident_blocks(self, kernel: Any, threads: int, shared_bytes: int) -> int:
        """How many blocks of a kernel one multiprocessor holds at once, at least 1."""

    def zeros(self, size: int, dtype: Any) -> Array:
        """A new device array [size] of zeros. BackendError where memory is out."""

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A new NumPy array in page-locked memory, for copies that are not waited for."""

    def upload(self, into: Array, source: Array) -> None:
        """Queue a copy from a NumPy array, which may change as soon as this returns. Both C-contiguous."""

    def on_stream(self, stream: int) -> contextlib.AbstractContextManager[object]:
        """Queue to this stream, of whatever library, what is queued within."""

    def holds(self, array: Array) -> bool:
        """Whether `array` is a device array."""

    def borrow(self, array: Array) -> Array:
        """A device array over the memory of one with the CUDA array interface, which it keeps alive."""

    def check(self, name: str, array: Array) -> None:
        """ArgumentError unless `array` is a device array of this device."""


def default_runtime() -> Runtime:
    """CuPy's current device. Raises `BackendError` where there is none, or no CuPy."""
    from treeattn.backends.cuda import cupy_runtime  # CuPy is only looked for when a GPU is asked for

    return cupy_runtime.current()


def as_bytes(structure: Any) -> Any:
    """The memory of an argument structure as plain bytes, as which CuPy passes it on at once.

    Of a structured type it asks NumPy for a description at every launch, which Python spells out in 30
    microseconds.
    """
    return structure.view((np.void, structure.dtype.itemsize))


def planned_launch(
    kernel: Callable[..., object], blocks: int, arguments: Any, arrays: tuple[Any, ...]
) -> Callable[[], object]:
    """A launch with its argument structure, and the arrays that it points into tied to its life."""
    given: Any = (kernel, (blocks,), (THREADS,), (as_bytes(arguments),)) if blocks else (tuple,)
    launch: Any = functools.partial(*given)
    launch.arguments, launch.arrays = arguments, arrays
    planned: Callable[[], object] = launch
    return planned


def planned_kernel(
    runtime: Runtime, name: str, blocks: int, arguments: np.dtype[Any], **fields: Any
) -> Callable[[], object]:
    """A launch of the kernel that its file is named after. fields: of its argument structure, numbers, or
    arrays, of which it gets the addresses."""
    filled, arrays = np.zeros(1, arguments), []
    for field, value in fields.items():
        if not isinstance(value, int | float):
            arrays.append(value)
            value = runtime.address(value)
        filled[field] = value
    return planned_launch(runtime.kernel(name, name), blocks, filled, tuple(arrays))


def check_float32(
    runtime: Runtime, name: str, array: Array, shape: tuple[int, ...], strided: bool = False
) -> None:
    """Raise `ArgumentError` unless it is a C-contiguous float32 array of this device and of this shape;
    strided: only its last axis of several has to be contiguous."""
    runtime.check(name, array)
    lies = array.flags.c_contiguous or (strided and (array.ndim == 1 or array.strides[-1] == array.itemsize))
    if array.shape != shape or array.dtype != np.float32 or not lies:
        raise ArgumentError(
            f"{name} must be C-contiguous float32 of shape {shape}, not {array.dtype} {array.shape}"
        )


def check_records(records: Array, runtime: Runtime) -> None:
    """Raise `ArgumentError` unless they are [batch, heads, queries, head_dim + 2] of this device, float32."""
    if records.ndim != 4 or records.shape[3] <= partial.EXTRA:
        raise ArgumentError(
            f"records have shape {records.shape}: [batch, heads, queries, head_dim + 2] is needed"
        )
    check_float32(runtime, "records", records, records.shape)
