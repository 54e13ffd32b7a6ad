"""Where a step computes: one object for each kind of device, with the same names.

The verbs in `treeattn.decoder` ask their device for memory, kernels and checks, and never which one it is.
A GPU is looked for, and CuPy imported, only when ``device="cuda"`` is asked for.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from treeattn.attention import arrays, pages
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.shape import CACHE_DTYPES, DTYPES, Shape, as_tensor, bits_of, check_axes, dtype_name
from treeattn.backends import cpu, cuda
from treeattn.collectives.runtime.memory import HOST, Memory, Stream
from treeattn.collectives.runtime.reducer import Reducer
from treeattn.errors import ArgumentError

__all__ = ["Cpu", "Cuda", "Device", "WholeStep", "find"]

Attention = Callable[[Any, Any, Any, Any], None]

#: Called with q, k, v and lengths: whether it made the step. Else nothing was done, and the three parts are
#: to be called: they take whatever a step can have, and say what is wrong with the rest.
WholeStep = Callable[[Any, Any, Any, Any], bool]


class Device(Protocol):
    """What a decoder needs of the place where it computes."""

    @property
    def name(self) -> str:
        """What ``device=`` calls it."""

    @property
    def lse_dtypes(self) -> tuple[str, ...]:
        """Of the logsumexp that other kernels wrote, as `pack` takes it."""

    @property
    def memory(self) -> Memory:
        """Where its arrays lie."""

    @property
    def stream(self) -> Stream | None:
        """The same where work is queued, and can be recorded; None where it is done at once."""

    @property
    def namespace(self) -> Any:
        """Functions on its arrays, by the names that NumPy gives them: NumPy itself, or CuPy."""

    def check_shape(self, shape: Shape) -> None:
        """Raise `ArgumentError` or `BackendError` where this device cannot serve the shape."""

    def slow_because(self) -> str | None:
        """Why it is several times slower here than it could be, in one line; None where it is not."""

    def rounds_weights(self, shape: Shape) -> bool:
        """Whether softmax weights may be rounded to 16 bits: then |out - exact| can reach 4e-3 * max|v|."""

    def view(self, name: str, array: Any) -> Any:
        """An array of any library that lies on this device as one of this device, not copied.
        Raises `ArgumentError`."""

    def tensor(self, name: str, array: Any, dtype: str | None) -> Any:
        """The `view` if it has four axes and a dtype that is served, perhaps viewed as another dtype.
        Raises `ArgumentError`."""

    def admit(self, shape: Shape, q: Any, k: Any, v: Any, lengths: Any) -> Any:
        """Check the arrays of a step; the lengths as attention takes them. Raises `ArgumentError`."""

    def admit_pages(
        self, shape: Shape, q: Any, k: Any, v: Any, lengths: Any, block_table: Any, tables: MaskTables | None
    ) -> tuple[Any, Any]:
        """The same for a paged cache: lengths and block table as attention takes them. tables: the tables of
        the step, with the lengths in them."""

    def block_table(self, shape: Shape, block_table: Any) -> Any:
        """A block table of this device or of the host; int32 [batch, pages of a sequence]. Raises
        `ArgumentError`."""

    def lengths(self, shape: Shape, lengths: Any, tokens: int) -> Any:
        """The lengths of a shard of `tokens` tokens as attention takes them. Raises `ArgumentError`."""

    def host_lengths(self, lengths: Any) -> Any:
        """The same for tables of what queries see, which are made on the host."""

    def from_host(self, array: Any) -> Any:
        """A NumPy array as one of the device."""

    def to_host(self, array: Any) -> Any:
        """An array of the device as a NumPy array of its own."""

    def readable(self, array: Any) -> Any:
        """An array of the device where the host can read it: itself on the processor, else `to_host`."""

    def kernel_head_dim(self, head_dim: int) -> int:
        """The least head_dim from this one on that there is a kernel for: zeros fill heads up to it.
        Raises `BackendError`."""

    def most_queries(self, heads: int, kv_heads: int) -> int | None:
        """How many queries attention takes at once; None for any number."""

    def product(self, matrix: Any) -> Callable[[Any], Any]:
        """Called with vectors [count, columns]: vectors @ matrix.T [count, rows], a new array, in float32."""

    def attention(
        self, shape: Shape, records: Any, scale: float, tables: MaskTables | None = None
    ) -> Attention:
        """Called with q, k, v and lengths: writes `records`. With `tables` it reads what these tables hold
        then, lengths among it."""

    def finish(self, records: Any, out: Any, lse: Any) -> Callable[[], object]:
        """Writes out and lse from the folded records."""

    def whole_step(
        self, attention: Any, reducer: Reducer, records: Any, out: Any, lse: Any
    ) -> WholeStep | None:
        """Attention, reducer and finish at once; None where three calls are the best there is."""

    def pack(self, records: Any, factor: float) -> Callable[[Any, Any], object]:
        """Called with out and lse: writes records of them, lse times `factor`."""

    def scale(self, lse: Any, factor: float) -> Callable[[], object]:
        """Multiplies lse by `factor`, in place."""

    def merge_operator(self, v_dim: int, dtype: Any) -> Any:
        """How the records merge: a `treeattn.collectives.runtime.operator.Operator`."""


def find(name: str) -> Device:
    """The device that ``device=`` names. Raises `ArgumentError`; `BackendError` where it is not there."""
    if name == "cpu":
        return Cpu()
    if name == "cuda":
        return Cuda()
    raise ArgumentError(f"device {name!r} is unknown: use 'cpu' or 'cuda'")


class Cpu:
    """The processor: NumPy arrays, the kernels of `treeattn.backends.cpu`."""

    name = "cpu"
    lse_dtypes = ("float32", "float64")
    memory = HOST
    stream = None
    namespace: Any = np

    def check_shape(self, shape: Shape) -> None:
        """Every shape is served; settings of the environment may be wrong."""
        cpu.check_environment()

    def slow_because(self) -> str | None:
        """Why there are no compiled kernels."""
        return cpu.compiled_kernels_problem()

    def rounds_weights(self, shape: Shape) -> bool:
        """Never."""
        return False

    def view(self, name: str, array: Any) -> Any:
        """A NumPy array."""
        return arrays.on_host(name, array)

    def tensor(self, name: str, array: Any, dtype: str | None) -> Any:
        """A NumPy array; uint16 becomes bfloat16 if `dtype` says so."""
        return as_tensor(name, self.view(name, array), dtype)

    def admit(self, shape: Shape, q: Any, k: Any, v: Any, lengths: Any) -> Any:
        """A few comparisons; attention checks shape and range of the lengths itself."""
        self._check(shape, q, k, v)
        if lengths is None or (type(lengths) is np.ndarray and lengths.dtype == np.int64):
            return lengths
        return self.lengths(shape, lengths, k.shape[1])

    def _check(self, shape: Shape, q: Any, k: Any, v: Any) -> None:
        if not shape.accepts(q, k, v):
            # Say what is wrong; what passes is rare but right (bfloat16 as uint16, no tokens).
            raw, kv_raw = (name if bits_of(name) else None for name in (shape.dtype, shape.kv_dtype))
            shape.check_query(as_tensor("q", q, raw))
            shape.check_cache(as_tensor("k", k, kv_raw), as_tensor("v", v, kv_raw))

    def admit_pages(
        self, shape: Shape, q: Any, k: Any, v: Any, lengths: Any, block_table: Any, tables: MaskTables | None
    ) -> tuple[Any, Any]:
        """Attention looks at the pages itself."""
        self._check(shape, q, k, v)
        table = self.block_table(shape, block_table)
        if tables is None:
            pages.check_lengths(lengths, k.shape[1], table.shape[1])
            lengths = self.lengths(shape, lengths, k.shape[1] * table.shape[1])
        return lengths, table

    def block_table(self, shape: Shape, block_table: Any) -> Any:
        """Of the host."""
        return pages.as_table(block_table, shape.batch)

    def lengths(self, shape: Shape, lengths: Any, tokens: int) -> Any:
        """int64, looked at."""
        return None if lengths is None else shape.check_lengths(lengths, tokens)

    def host_lengths(self, lengths: Any) -> Any:
        """As they are."""
        return lengths

    def from_host(self, array: Any) -> Any:
        """The array itself."""
        return array

    def to_host(self, array: Any) -> Any:
        """A copy."""
        return array.copy()

    def readable(self, array: Any) -> Any:
        """The array itself."""
        return array

    def kernel_head_dim(self, head_dim: int) -> int:
        """Itself: every one is served."""
        return head_dim

    def most_queries(self, heads: int, kv_heads: int) -> int | None:
        """Any."""
        return None

    def product(self, matrix: Any) -> Callable[[Any], Any]:
        """The compiled kernel for a few vectors, or NumPy."""
        return cpu.PlannedProduct(matrix)

    def attention(
        self, shape: Shape, records: Any, scale: float, tables: MaskTables | None = None
    ) -> Attention:
        """The compiled kernel, or NumPy."""
        return cpu.PlannedAttention(
            records,
            scale=scale,
            tables=tables,
            kv_dtype=shape.kv_dtype,
            k_scale=shape.k_scale,
            v_scale=shape.v_scale,
        )

    def finish(self, records: Any, out: Any, lse: Any) -> Callable[[], object]:
        """The compiled kernel, or NumPy."""
        return cpu.planned_finish(records, out, lse)

    def whole_step(
        self, attention: Any, reducer: Reducer, records: Any, out: Any, lse: Any
    ) -> WholeStep | None:
        """One C call, where one C call is all that the reducer is."""
        native = reducer.native_step()
        if native is None or not attention.compiled:
            return None
        return cpu.PlannedStep(attention, native, records, out, lse)

    def pack(self, records: Any, factor: float) -> Callable[[Any, Any], object]:
        """NumPy."""
        return cpu.planned_pack(records, factor)

    def scale(self, lse: Any, factor: float) -> Callable[[], object]:
        """NumPy."""
        return cpu.planned_scale(lse, factor)

    def merge_operator(self, v_dim: int, dtype: Any) -> cpu.MergeOperator:
        """The compiled merge, or NumPy's: the same bits."""
        return cpu.MergeOperator(v_dim, dtype)


class Cuda:
    """The GPU that is CuPy's current device: CuPy arrays, the kernels of `treeattn.backends.cuda`.

    Work goes to the current stream and is not waited for. ``TREEATTN_TENSOR_CORES=0`` in the environment
    keeps to the kernel that holds softmax weights in float32.
    """

    name = "cuda"
    lse_dtypes = ("float32",)

    def __init__(self, runtime: cuda.Runtime | None = None) -> None:
        """`runtime` None: CuPy's current device. Raises `BackendError` where there is none, `ArgumentError`
        for a setting of the environment that cannot be read."""
        wanted = os.environ.get("TREEATTN_TENSOR_CORES", "1")
        if wanted not in ("0", "1"):
            raise ArgumentError(f"TREEATTN_TENSOR_CORES={wanted}: use 0 or 1")
        self.runtime = cuda.default_runtime() if runtime is None else runtime
        self._tensor_cores = wanted == "1" and self.runtime.tensor_cores
        self._admitted: tuple[Any, ...] = (None,) * 3
        self._lengths: Any = None
        self._block_tables = cuda.BlockTables(self.runtime)

    @property
    def memory(self) -> Memory:
        """The runtime."""
        return self.runtime

    @property
    def stream(self) -> Stream:
        """The runtime."""
        return self.runtime

    @property
    def namespace(self) -> Any:
        """CuPy."""
        return self.runtime.namespace

    def check_shape(self, shape: Shape) -> None:
        """float64 has no kernels here, nor has every head_dim."""
        if shape.dtype == "float64":
            raise ArgumentError("float64 is for device='cpu': on the GPU use float32, float16 or bfloat16")
        cuda.check_head_dim(shape.head_dim, shape.v_dim)

    def slow_because(self) -> str | None:
        """Kernels are always compiled here."""
        return None

    def rounds_weights(self, shape: Shape) -> bool:
        """Where tensor cores are used."""
        rows = shape.queries * (shape.heads // shape.kv_heads)
        wide = shape.dtype == "float32" or shape.mixed or rows < cuda.TENSOR_CORES_FROM_ROWS
        return self._tensor_cores and not wide

    def view(self, name: str, array: Any) -> Any:
        """A CuPy array."""
        return arrays.on_gpu(name, array, self.runtime)

    def tensor(self, name: str, array: Any, dtype: str | None) -> Any:
        """A device array as it is: the bits of bfloat16 stay uint16, those of 8 bits uint8."""
        array = self.view(name, array)
        self.runtime.check(name, array)
        bits = "bfloat16" if name == "q" and array.dtype == np.uint16 else dtype
        dtype_name(array, bits, DTYPES if name == "q" else CACHE_DTYPES)
        check_axes(name, array)
        cuda.check_rows(name, array, self.runtime)
        return array

    def admit(self, shape: Shape, q: Any, k: Any, v: Any, lengths: Any) -> Any:
        """Arrays that passed the last time are not looked at again."""
        self._check(shape, q, k, v)
        return self.lengths(shape, lengths, k.shape[1])

    def _check(self, shape: Shape, q: Any, k: Any, v: Any) -> None:
        given = (q, k, v)
        if any(map(operator.is_not, given, self._admitted)):
            for name, array in zip("qkv", given, strict=True):
                self.runtime.check(name, array)
            shape.check_query(q)
            shape.check_cache(k, v)
            self._admitted = given

    def admit_pages(
        self, shape: Shape, q: Any, k: Any, v: Any, lengths: Any, block_table: Any, tables: MaskTables | None
    ) -> tuple[Any, Any]:
        """A table of the host is looked at and copied; one of the device is used as it is, unread."""
        self._check(shape, q, k, v)
        if tables is None and lengths is None:
            pages.check_lengths(None, k.shape[1], 0)

        def host_lengths(tokens: int) -> Any:
            return shape.check_lengths(self.host_lengths(lengths), tokens)

        table = self._block_tables.admit(block_table, shape.batch, k.shape[:2], host_lengths, tables)
        if tables is None:
            lengths = self.lengths(shape, lengths, k.shape[1] * table.shape[1])
        return lengths, table

    def block_table(self, shape: Shape, block_table: Any) -> Any:
        """Of the device, or of the host."""
        return self._block_tables.take(block_table, shape.batch)

    def lengths(self, shape: Shape, lengths: Any, tokens: int) -> Any:
        """Lengths of the host are copied into one buffer of the device, without allocating after the first
        time; those of the device are used as they are, unread: kernels clamp them."""
        if lengths is None:
            return None
        if not self.runtime.holds(lengths) and hasattr(lengths, "__cuda_array_interface__"):
            lengths = self.view("lengths", lengths)
        if self.runtime.holds(lengths):
            if lengths.dtype != np.int64 or lengths.shape != (shape.batch,):
                got = f"{lengths.dtype} {list(lengths.shape)}"
                raise ArgumentError(f"lengths on the GPU are {got}: int64 [{shape.batch}] is needed")
            return lengths
        if self.runtime.capturing():
            raise ArgumentError(
                "a captured step reads lengths from the GPU: pass them as an int64 device array"
            )
        host = shape.check_lengths(lengths, tokens)
        if self._lengths is None:
            self._lengths = self.runtime.zeros(shape.batch, np.int64)
        self.runtime.upload(self._lengths, host)
        return self._lengths

    def host_lengths(self, lengths: Any) -> Any:
        """Lengths that lie on the GPU are waited for."""
        array = hasattr(lengths, "__dlpack_device__") or hasattr(lengths, "__cuda_array_interface__")
        if not array or arrays.device_of("lengths", lengths) == "cpu":
            return lengths
        return self.to_host(self.view("lengths", lengths))

    def from_host(self, array: Any) -> Any:
        """A new device array, there when this returns; bfloat16 and types of 8 bits as their bits."""
        array = np.ascontiguousarray(array.view(bits_of(array.dtype.name) or array.dtype))
        moved = self.runtime.empty(array.shape, array.dtype)
        self.runtime.copy(moved, array)
        self.runtime.synchronize()
        return moved

    def to_host(self, array: Any) -> Any:
        """Waits for what was queued before."""
        if not array.flags.c_contiguous:
            packed = self.runtime.empty(array.shape, array.dtype)
            self.runtime.copy(packed, array)
            array = packed
        moved = np.empty(array.shape, array.dtype)
        self.runtime.copy(moved, array)
        self.runtime.synchronize()
        return moved

    def readable(self, array: Any) -> Any:
        """A copy."""
        return self.to_host(array)

    def kernel_head_dim(self, head_dim: int) -> int:
        """The kernels are built for a few."""
        return cuda.kernel_head_dim(head_dim)

    def most_queries(self, heads: int, kv_heads: int) -> int | None:
        """As many as the grid of a launch has tiles for."""
        return cuda.most_queries(heads, kv_heads)

    def product(self, matrix: Any) -> Callable[[Any], Any]:
        """cuBLAS, through CuPy."""
        return cuda.PlannedProduct(matrix)

    def attention(
        self, shape: Shape, records: Any, scale: float, tables: MaskTables | None = None
    ) -> Attention:
        """One launch; with `tables` after a copy of what changed of its tables."""
        return cuda.PlannedAttention(
            *(records,),
            scale=scale,
            tables=tables,
            kv_dtype=shape.kv_dtype,
            k_scale=shape.k_scale,
            v_scale=shape.v_scale,
            tensor_cores=self._tensor_cores,
            runtime=self.runtime,
        )

    def finish(self, records: Any, out: Any, lse: Any) -> Callable[[], object]:
        """One launch."""
        return cuda.planned_finish(records, out, lse, runtime=self.runtime)

    def whole_step(
        self, attention: Any, reducer: Reducer, records: Any, out: Any, lse: Any
    ) -> WholeStep | None:
        """A captured step is one launch."""
        return None

    def pack(self, records: Any, factor: float) -> Callable[[Any, Any], object]:
        """One launch."""
        return cuda.planned_pack(records, factor, runtime=self.runtime)

    def scale(self, lse: Any, factor: float) -> Callable[[], object]:
        """One launch."""
        return cuda.planned_scale(lse, factor, runtime=self.runtime)

    def merge_operator(self, v_dim: int, dtype: Any) -> cuda.MergeOperator:
        """One launch for any number of records."""
        return cuda.MergeOperator(v_dim, dtype, runtime=self.runtime)
