"""An NVIDIA GPU as a decoder sees it."""

from __future__ import annotations

import functools
import math
import operator
import os
import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from treeattn.attention import arrays, pages
from treeattn.attention.arguments import BlockTable
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.shape import CACHE_DTYPES, DTYPES, Shape, bits_of, check_axes, dtype_name
from treeattn.backends.cpu import compile
from treeattn.backends.cuda.arguments import check_rows
from treeattn.backends.cuda.attention import FEW, PlannedAttention, most_queries
from treeattn.backends.cuda.block_table import BlockTables
from treeattn.backends.cuda.records import MergeOperator, planned_finish, planned_pack, planned_scale
from treeattn.backends.cuda.runtime import Runtime, default_runtime
from treeattn.backends.cuda.step import PlannedStep
from treeattn.backends.cuda.variants import (
    TYPES,
    check_head_dim,
    for_tensor_cores,
    kernel_head_dim,
    no_latent_kernel,
)
from treeattn.backends.device import Attention, Device, WholeStep
from treeattn.collectives.runtime.reducer import Reducer
from treeattn.errors import ArgumentError, BackendError
from treeattn.partial import Array


class Cuda(Device):
    """The GPU that is CuPy's current device: CuPy arrays.

    Work goes to the current stream and is not waited for. ``TREEATTN_TENSOR_CORES=0`` in the environment
    keeps to the kernel that holds softmax weights in float32.
    """

    name = "cuda"
    lse_dtypes = ("float32",)
    memory = stream = property(attrgetter("runtime"))
    namespace = property(attrgetter("runtime.namespace"))

    def __init__(self, runtime: Runtime | None = None, *, of_torch: bool = False) -> None:
        """`runtime` None: CuPy's current device. of_torch: caches take memory of torch's pool. Raises
        `BackendError` where there is none, `ArgumentError` for a setting of the environment that cannot be
        read."""
        wanted = os.environ.get("TREEATTN_TENSOR_CORES", "1")
        if wanted not in ("0", "1"):
            raise ArgumentError(f"TREEATTN_TENSOR_CORES={wanted}: use 0 or 1")
        self.runtime = default_runtime() if runtime is None else runtime
        self._tensor_cores = wanted == "1" and self.runtime.tensor_cores
        self._of_torch = of_torch
        self._admitted: tuple[Any, ...] = (None,) * 3
        self._lengths: Any = None
        self._block_tables = BlockTables(self.runtime)

    def large(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Of torch's pool where torch is the caller: a model that fills the GPU leaves no room to another."""
        if not self._of_torch:
            return self.runtime.empty(shape, dtype)
        torch, size = sys.modules["torch"], math.prod(shape) * np.dtype(dtype).itemsize
        try:
            room = torch.empty(max(1, size), dtype=torch.uint8, device=f"cuda:{self.runtime.index}")
        except torch.OutOfMemoryError as error:
            said = str(error).partition("\n")[0]
            raise BackendError(f"out of GPU memory: {said}; use a smaller cache, or more ranks") from error
        array: Array = self.runtime.borrow(room)[:size].view(dtype).reshape(shape)
        return array

    def check_shape(self, shape: Shape) -> None:
        """float64 has no kernels here, nor has every head_dim, nor a latent cache of every type."""
        if shape.dtype == "float64":
            raise ArgumentError("float64 is for device='cpu': on the GPU use float32, float16 or bfloat16")
        check_head_dim(shape.head_dim, shape.v_dim)
        if shape.v_dim != shape.head_dim and not self.rounds_weights(shape):
            raise no_latent_kernel(shape.dtype, str(shape.kv_dtype))

    def rounds_weights(self, shape: Shape) -> bool:
        rows = shape.queries * (shape.heads // shape.kv_heads)
        q_type, kv_type = (
            TYPES.get(kind or "", (kind or "", 0))[0] for kind in (shape.dtype, shape.kv_dtype)
        )
        return self._tensor_cores and for_tensor_cores(q_type, kv_type, rows, shape.v_dim != shape.head_dim)

    def view(self, name: str, array: object) -> Any:
        return arrays.on_gpu(name, array, self.runtime)

    def tensor(self, name: str, array: object, dtype: str | None) -> Array:
        """A device array as it is: the bits of bfloat16 stay uint16, those of 8 bits uint8."""
        taken: Array = self.view(name, array)
        self.runtime.check(name, taken)
        bits = "bfloat16" if name == "q" and taken.dtype == np.uint16 else dtype
        dtype_name(taken, bits, DTYPES if name == "q" else CACHE_DTYPES)
        check_axes(name, taken)
        check_rows(name, taken, self.runtime)
        return taken

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
        """Arrays that passed the last time are not looked at again. A block table of the host is looked at
        and copied; one of the device is used as it is, unread."""
        given = (q, k, v)
        if any(map(operator.is_not, given, self._admitted)):
            for name, array in zip("qkv", given, strict=True):
                self.runtime.check(name, array)
            shape.check_query(q)
            shape.check_cache(k, v)
            self._admitted = given
        if block_table is None:
            return (self.lengths(shape, lengths, k.shape[1]),)
        if tables is None and lengths is None:
            pages.check_lengths(None, k.shape[1], 0)
        table = self._block_tables.admit(
            *(block_table, shape.batch, k.shape[:2]),
            lambda tokens: shape.check_lengths(self.host_lengths(lengths), tokens),  # type: ignore[arg-type]
            tables,
        )
        if tables is None:
            lengths = self.lengths(shape, lengths, k.shape[1] * table.shape[1])
        return lengths, table

    def block_table(self, shape: Shape, block_table: BlockTable | None) -> Any:
        """A block table of the device, or of the host."""
        return self._block_tables.take(block_table, shape.batch)

    def lengths(self, shape: Shape, lengths: Any, tokens: int) -> Any:
        """Lengths of the host become numbers, or are copied into one buffer of the device, without allocating
        after the first time; those of the device are used as they are, unread: kernels clamp them."""
        if lengths is None:
            return None
        if type(lengths) is not list and arrays.lies_on_gpu("lengths", lengths, self.runtime):
            lengths = self.view("lengths", lengths)
            if lengths.dtype != np.int64 or lengths.shape != (shape.batch,):
                got = f"{lengths.dtype} {list(lengths.shape)}"
                raise ArgumentError(f"lengths on the GPU are {got}: int64 [{shape.batch}] is needed")
            return lengths
        if self.runtime.capturing():
            raise ArgumentError(
                "a captured step reads lengths from the GPU: pass them as an int64 device array"
            )
        host = shape.check_lengths(lengths, tokens)
        if shape.batch <= FEW:
            return tuple(host.tolist())
        if self._lengths is None:
            self._lengths = self.runtime.zeros(shape.batch, np.int64)
        self.runtime.upload(self._lengths, host)
        return self._lengths

    def host_lengths(self, lengths: ArrayLike | None) -> ArrayLike | None:
        """Lengths that lie on the GPU are waited for."""
        if arrays.lies_on_gpu("lengths", lengths, self.runtime):
            return self.to_host(self.view("lengths", lengths))
        return lengths

    def from_host(self, array: Array) -> Array:
        """A new device array, there when this returns; bfloat16 and types of 8 bits as their bits."""
        array = np.ascontiguousarray(array.view(bits_of(array.dtype.name) or array.dtype))
        moved = self.runtime.empty(array.shape, array.dtype)
        self.runtime.copy(moved, array)
        self.runtime.synchronize()
        return moved

    def to_host(self, array: Array) -> Array:
        if not array.flags.c_contiguous:
            packed = self.runtime.empty(array.shape, array.dtype)
            self.runtime.copy(packed, array)
            array = packed
        moved = np.empty(array.shape, array.dtype)
        self.runtime.copy(moved, array)
        self.runtime.synchronize()
        return moved

    def kernel_head_dim(self, head_dim: int) -> int:
        """The kernels are built for a few."""
        return kernel_head_dim(head_dim)

    def most_queries(self, heads: int, kv_heads: int) -> int | None:
        """As many as the grid of a launch has tiles for."""
        return most_queries(heads, kv_heads)

    def weights(self, array: Array) -> Array:
        """A new device array of float32, which is what cuBLAS multiplies here."""
        return self.from_host(np.asarray(array, np.float32))

    def product(self, matrices: Sequence[Any]) -> Callable[[Array], Array]:
        """By cuBLAS, in full float32 unless ``CUPY_TF32=1`` stands in the environment. Other counts of
        vectors may have other bits: cuBLAS chooses by the shape."""
        transposed = [matrix.T for matrix in matrices]

        def product(vectors: Array) -> Array:
            made = [vectors @ matrix for matrix in transposed]
            rows: Array = made[0] if len(made) == 1 else self.namespace.concatenate(made, axis=1)
            return rows

        return product

    def attention(
        self, shape: Shape, records: Array, scale: float, tables: MaskTables | None = None
    ) -> Attention:
        """One launch; with `tables` after a copy of what changed of its tables."""
        compile.loaded()  # for `whole_step`: what the environment has against it, all ranks learn here
        return PlannedAttention(
            *(records,),
            scale=scale,
            tables=tables,
            kv_dtype=shape.kv_dtype,
            k_scale=shape.k_scale,
            v_scale=shape.v_scale,
            tensor_cores=self._tensor_cores,
            runtime=self.runtime,
        )

    def finish(self, records: Array, out: Array, lse: Array) -> Callable[[], object]:
        return planned_finish(records, out, lse, runtime=self.runtime)

    def whole_step(
        self, shape: Shape, attention: Any, reducer: Reducer, finish: Any, *results: Array
    ) -> WholeStep | None:
        """Where the reducer does nothing but queue."""
        behind = () if reducer.idle else reducer.queued(finish)
        if behind is None:
            return None
        return PlannedStep(
            *(attention, reducer, finish, behind),
            lengths=functools.partial(self.lengths, shape),
            forget=self._forget,
            runtime=self.runtime,
        )

    def _forget(self) -> None:
        """What `attention` binds is held there, and no longer than it is bound."""
        self._admitted = (None,) * 3

    def pack(self, records: Array, factor: float) -> Callable[[Array, Array], object]:
        return planned_pack(records, factor, runtime=self.runtime)

    def scale(self, lse: Array, factor: float) -> Callable[[], object]:
        return planned_scale(lse, factor, runtime=self.runtime)

    def merge_operator(self, v_dim: int, dtype: DTypeLike) -> MergeOperator:
        """One launch for any number of records."""
        return MergeOperator(v_dim, dtype, runtime=self.runtime)
