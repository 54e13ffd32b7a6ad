"""The processor as a decoder sees it, and a decoder's step there as one C call."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from treeattn.attention import arrays, pages
from treeattn.attention.arguments import BlockTable
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.shape import Shape, as_tensor, bits_of
from treeattn.backends.cpu import compile
from treeattn.backends.cpu.attention import PlannedAttention, process_threads
from treeattn.backends.cpu.multiply_rows import PlannedProduct
from treeattn.backends.cpu.records import (
    MergeOperator,
    address,
    code_address,
    planned,
    planned_finish,
    planned_pack,
    planned_scale,
)
from treeattn.backends.device import Attention, Device, WholeStep
from treeattn.collectives.runtime.memory import HOST
from treeattn.collectives.runtime.reducer import NativeStep, Reducer
from treeattn.partial import Array

_PIECE = 64 << 20  # bytes asked for at once: small matrices share pages
_LINE = 64


class LargePages:
    """Where arrays are put one behind the other; they keep the memory alive. With small pages prefetchers
    stop every 4 KiB, and matrices are read half as fast."""

    def __init__(self) -> None:
        self._rest: Array = np.empty(0, np.uint8)

    def put(self, array: Array) -> Array:
        """A copy of an array, C-contiguous, which begins with a line of memory."""
        if array.nbytes + _LINE > len(self._rest):
            self._rest = HOST.large((max(_PIECE, array.nbytes + _LINE),), np.uint8)
        begin = -self._rest.ctypes.data % _LINE
        end = begin + array.nbytes
        copy = self._rest[begin:end].view(array.dtype).reshape(array.shape)
        copy[...] = array
        self._rest = self._rest[end:]
        return copy


class Cpu(Device):
    """The processor: NumPy arrays and compiled kernels."""

    name = "cpu"
    lse_dtypes = ("float32", "float64")
    memory = HOST
    stream = None
    namespace: Any = np
    finish = staticmethod(planned_finish)
    pack = staticmethod(planned_pack)
    scale = staticmethod(planned_scale)
    #: Of `PlannedAttention`, where shards may not be of any length or cut.
    bounds: Mapping[str, Any] = MappingProxyType({})

    @functools.cached_property
    def _weights(self) -> LargePages:
        return LargePages()

    def check_shape(self, shape: Shape) -> None:
        """Every shape is served; settings of the environment may be wrong."""
        process_threads()

    def large(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return HOST.large(shape, dtype)

    def slow_because(self) -> str | None:
        return compile.compiled_kernels_problem()

    def rounds_weights(self, shape: Shape) -> bool:
        return False

    def view(self, name: str, array: object) -> Array:
        return arrays.on_host(name, array)

    def tensor(self, name: str, array: object, dtype: str | None) -> Array:
        """A NumPy array; uint16 becomes bfloat16 if `dtype` says so."""
        return as_tensor(name, self.view(name, array), dtype)

    def check(
        self,
        shape: Shape,
        q: Array,
        k: Array,
        v: Array,
        lengths: ArrayLike | None,
        block_table: BlockTable | None = None,
        tables: MaskTables | None = None,
    ) -> tuple[Any, ...]:
        """A few comparisons; attention checks shape and range of the lengths itself."""
        if not shape.accepts(q, k, v):
            # Say what is wrong; what passes is rare but right (bfloat16 as uint16, no tokens).
            raw, kv_raw = (name if bits_of(name) else None for name in (shape.dtype, shape.kv_dtype))
            shape.check_query(as_tensor("q", q, raw))
            shape.check_cache(as_tensor("k", k, kv_raw), as_tensor("v", v, kv_raw))
        if block_table is not None:
            table = self.block_table(shape, block_table)
            if tables is None:
                pages.check_lengths(lengths, k.shape[1], table.shape[1])
                lengths = self.lengths(shape, lengths, k.shape[1] * table.shape[1])
            return lengths, table
        if lengths is None or (type(lengths) is np.ndarray and lengths.dtype == np.int64):
            return (lengths,)
        return (self.lengths(shape, lengths, k.shape[1]),)

    def block_table(self, shape: Shape, block_table: BlockTable | None) -> Array:
        return pages.as_table(block_table, shape.batch)

    def lengths(self, shape: Shape, lengths: ArrayLike | None, tokens: int) -> Array | None:
        return None if lengths is None else shape.check_lengths(lengths, tokens)

    def to_host(self, array: Array) -> Array:
        return array.copy()

    def readable(self, array: Array) -> Array:
        return array

    def weights(self, array: Array) -> Array:
        """A copy of the same type in `LargePages`."""
        return self._weights.put(array)

    def attention(
        self, shape: Shape, records: Array, scale: float, tables: MaskTables | None = None
    ) -> Attention:
        stored = {"kv_dtype": shape.kv_dtype, "k_scale": shape.k_scale, "v_scale": shape.v_scale}
        return PlannedAttention(records, scale=scale, tables=tables, **stored, **self.bounds)

    def product(self, matrices: Sequence[Any]) -> Callable[[Array], Array]:
        """The compiled kernel for a few vectors, or NumPy."""
        return PlannedProduct(matrices)

    def merge_operator(self, v_dim: int, dtype: DTypeLike) -> MergeOperator:
        """The compiled merge, or NumPy's: the same bits."""
        return MergeOperator(v_dim, dtype)

    def whole_step(
        self, shape: Shape, attention: Any, reducer: Reducer, finish: Any, *results: Array
    ) -> WholeStep | None:
        """One C call, where one C call is all that the reducer is."""
        native = reducer.native_step()
        if native is None or not attention.compiled:
            return None
        return PlannedStep(attention, native, *results)


class _StepStruct(ctypes.Structure):
    """struct decode_step of kernels/cpu/decode_step.c."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("attention", "reduce", "reduction")]
        + [("nanoseconds", ctypes.c_int64)]
        + [(name, ctypes.c_void_p) for name in ("finish", "records", "out", "lse")]
        + [(name, ctypes.c_int64) for name in ("batch", "heads", "queries", "width")]
    )


class PlannedStep:
    """`attention`, the reduction that `native` tells of, and `planned_finish`: the same bits in one call."""

    run = None

    def __init__(
        self, attention: PlannedAttention, native: NativeStep, records: Array, out: Array, lse: Array
    ) -> None:
        """For compiled kernels. records: [batch, heads, queries, head_dim + 2], which `attention` writes."""
        compiled = compile.loaded()[0]
        assert compiled is not None, "a native step without compiled kernels"
        finish = compiled.finish_bins if records.dtype == np.int64 else compiled.finish
        self._takes = attention.takes
        self._owned = attention, records, out, lse
        self._struct = _StepStruct(
            *(attention.address, *native[:3], code_address(finish)),
            *(*map(address, (records, out, lse)), *records.shape),
        )
        self._call = functools.partial(compiled.decode_step, ctypes.byref(self._struct))
        self._step = native.as_step(self._call)
        self._finish = planned(finish, records, out, lse, *records.shape)

    def __call__(self, q: Array, k: Array, v: Array, lengths: Array | None = None) -> bool:
        """One step. False: nothing was done, since these arrays or the state of the reducer need a closer
        look, which the three parts take."""
        if not self._takes(q, k, v, lengths):
            return False
        result = self._step()
        if result > 0:  # the reduction took longer than one call
            self._finish()
        return result >= 0
