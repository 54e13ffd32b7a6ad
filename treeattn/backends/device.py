"""Where a step computes: one object for each kind of device, with the same names.

The verbs in `treeattn.decoder` ask their device for memory, kernels and checks, and never which one it is.
A GPU is looked for, and CuPy imported, only when ``device="cuda"`` is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from treeattn.attention.arguments import BlockTable, Shard
from treeattn.attention.mask_tables import MaskTables
from treeattn.attention.pages import check_lengths
from treeattn.attention.shape import CACHE_DTYPES, Shape, check_grouping, dtype_name, query_dtype, values_of
from treeattn.collectives.runtime.memory import Memory, Stream
from treeattn.collectives.runtime.operator import Operator
from treeattn.collectives.runtime.reducer import Reducer
from treeattn.errors import ArgumentError, RestrictionError
from treeattn.partial import Array

Attention = Callable[[Any, Any, Any, Any], None]


class WholeStep(Protocol):
    """Attention, reduction and finish together."""

    def __call__(self, q: Any, k: Any, v: Any, lengths: Any) -> bool:
        """Whether it made the step. Else `run` is to make it, or the three parts: they take whatever a step
        can have, and say what is wrong with the rest."""

    @property
    def run(self) -> Attention | None:
        """The step, over what `Device.check` let pass; None where there are the three parts alone."""


def find(name: str, reproducible: str | None = None, ranks: int = 1) -> Device:
    """The device that ``device=`` names, a word or an object of torch, for results of so many ranks as
    ``reproducible=`` says. Raises `ArgumentError`, `RestrictionError`; `BackendError` where there is none."""
    of_torch = hasattr(name, "type")  # torch has objects for them
    index = getattr(name, "index", None) if of_torch else None
    name = str(getattr(name, "type", name))
    if name not in ("cpu", "cuda"):
        raise ArgumentError(
            f"device {name!r:.60} is unknown: use 'cpu' or 'cuda', which is CuPy's current device "
            "(cupy.cuda.Device(1).use() makes GPU 1 that)"
        )
    if reproducible is not None:
        from treeattn.backends.cpu import reproducible as bits

        found = bits.device(reproducible, ranks)
        if name == "cuda":
            raise RestrictionError(
                "reproducible= is for device='cpu': there are no such kernels for a GPU yet"
            )
        return found
    if name == "cpu":
        from treeattn.backends.cpu.device import Cpu

        return Cpu()
    from treeattn.backends.cuda.device import Cuda

    gpu = Cuda(of_torch=of_torch)
    if index not in (None, gpu.runtime.index):
        raise ArgumentError(
            f"device cuda:{index} is not CuPy's current device, which is {gpu.runtime.index}: "
            f"cupy.cuda.Device({index}).use() makes it that"
        )
    return gpu


class Admitted(NamedTuple):
    """The arrays of a call as the device's, that fit each other; tokens: of a sequence, at most."""

    q: Array
    shard: Shard
    shape: Shape
    tokens: int


class Device(Protocol):
    """What a decoder needs of a device; what has a body is so unless a device says else."""

    @property
    def name(self) -> str:
        """What ``device=`` calls it."""

    @property
    def lse_dtypes(self) -> tuple[str, ...]:
        """The types of logsumexp that `pack` takes, as other kernels write it."""

    @property
    def memory(self) -> Memory:
        """Its memory: allocates, copies, and knows addresses."""

    def large(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A new array of a cache, which may be most of the memory."""

    @property
    def stream(self) -> Stream | None:
        """Its stream, where work is queued and can be recorded; None where work is done at once."""

    @property
    def namespace(self) -> Any:
        """Functions on its arrays, by the names that NumPy gives them: NumPy itself, or CuPy."""

    def check_shape(self, shape: Shape) -> None:
        """Raise `ArgumentError` or `BackendError` where this device cannot serve the shape."""

    def slow_because(self) -> str | None:
        """Why it is several times slower here than it could be, in one line; None where it is not."""
        return None

    def rounds_weights(self, shape: Shape) -> bool:
        """Whether softmax weights may be rounded to 16 bits: then |out - exact| can reach 4e-3 * max|v|."""

    def view(self, name: str, array: object) -> Array:
        """An array of any library that lies on this device as one of this device, not copied.
        Raises `ArgumentError`."""

    def tensor(self, name: str, array: object, dtype: str | None) -> Array:
        """The `view` if it has four axes and a dtype that is served, perhaps viewed as another dtype.
        Raises `ArgumentError`."""

    def admit(self, q: object, shard: Shard, scale: float | None) -> Admitted:
        """What a call is given, looked at once, and the shape that it has. scale: as of `treeattn.decode`.

        Raises `ArgumentError`.
        """
        k = self.tensor("k", shard.k, shard.dtype)
        v = None if shard.v is None else self.tensor("v", shard.v, shard.dtype)
        v = values_of(k, v, shard.v_dim, scale)
        query = self.tensor("q", q, None)
        batch, queries, heads, head_dim = query.shape
        check_grouping(query.shape, k.shape)
        stored = dtype_name(k, "bfloat16" if k.dtype == np.uint16 else shard.dtype, CACHE_DTYPES)
        page_size = None if shard.block_table is None else k.shape[1]
        cache = stored, shard.k_scale, shard.v_scale, v.shape[3], page_size
        shape = Shape(batch, queries, heads, k.shape[2], head_dim, query_dtype(query), *cache)
        shape.check_query(query)
        shape.check_cache(k, v)
        tokens = k.shape[1]
        if shard.block_table is not None:
            pages = self.block_table(shape, shard.block_table).shape[1]
            check_lengths(self.host_lengths(shard.lengths), tokens, pages)
            tokens *= pages
        lengths = self.lengths(shape, shard.lengths, tokens)
        held = shard.holding(k=k, v=v, lengths=lengths, v_dim=None, positions=None)
        return Admitted(query, held, shape, tokens)

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
        """Check the arrays of a step: what attention takes behind v, lengths, and the block table of a paged
        cache. tables: the tables of the step, with the lengths in them. Raises `ArgumentError`."""

    def block_table(self, shape: Shape, block_table: BlockTable | None) -> Array:
        """A block table of this device or of the host; int32 [batch, pages of a sequence]. Raises
        `ArgumentError`."""

    def lengths(self, shape: Shape, lengths: ArrayLike | None, tokens: int) -> Array | None:
        """The lengths of a shard of `tokens` tokens as attention takes them. Raises `ArgumentError`."""

    def host_lengths(self, lengths: ArrayLike | None) -> ArrayLike | None:
        """The lengths where the host can read them, which makes the mask tables."""
        return lengths

    def from_host(self, array: Array) -> Array:
        """A NumPy array as one of the device."""
        return array

    def to_host(self, array: Array) -> Array:
        """An array of the device as a NumPy array of its own."""

    def readable(self, array: Array) -> Array:
        """An array of the device where the host can read it: itself on the processor, else `to_host`."""
        return self.to_host(array)

    def kernel_head_dim(self, head_dim: int) -> int:
        """The least head_dim from this one on that there is a kernel for: zeros fill heads up to it.
        Raises `BackendError`."""
        return head_dim

    def most_queries(self, heads: int, kv_heads: int) -> int | None:
        """How many queries attention takes at once; None for any number."""
        return None

    def weights(self, array: Array) -> Array:
        """An array of the host as `product` reads it, there."""

    def product(self, matrices: Sequence[Any]) -> Callable[[Array], Array]:
        """Called with vectors [count, columns]: vectors @ matrix.T of each matrix, side by side: a new array
        [count, rows], in float32."""

    def attention(
        self, shape: Shape, records: Array, scale: float, tables: MaskTables | None = None
    ) -> Attention:
        """Called with q, k, v and lengths: writes `records`. With `tables` it reads what these tables hold
        then, lengths among it."""

    def finish(self, records: Array, out: Array, lse: Array) -> Callable[[], object]:
        """Writes out and lse from the folded records."""

    def whole_step(
        self,
        shape: Shape,
        attention: Any,
        reducer: Reducer,
        finish: Any,
        records: Array,
        out: Array,
        lse: Array,
    ) -> WholeStep | None:
        """Attention, reducer and finish at once; None where three calls are the best there is."""
        return None

    def pack(self, records: Array, factor: float) -> Callable[[Array, Array], object]:
        """Called with out and lse: writes records of them, lse times `factor`, as `planned_pack` of
        `treeattn.backends.cpu` does, to the bit."""

    def scale(self, lse: Array, factor: float) -> Callable[[], object]:
        """Multiplies lse by `factor`, in place."""

    def merge_operator(self, v_dim: int, dtype: DTypeLike) -> Operator:
        """How the records merge: a `treeattn.collectives.runtime.operator.Operator`."""
