"""What is measured, as decoders: any scheme, one with bfloat16 records, and as yardsticks a library's own sum
of as many bytes over the same wire, and nothing.

Records that travel as bfloat16 are half the bytes. A record (m, d, n) is the same partial as (m', d c, n c)
with c = exp(m - m'). So the maximum is rounded first and the rest is rescaled to the rounded maximum before
it is rounded too: the error stays that of rounding d and n, 2^-9 for each rounding, instead of growing with
the logit. A receiver widens both operands to float32, merges, and rounds the result. Both are NumPy and the
compiled merge; not a path that `decode` offers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from treeattn import mpi_library
from treeattn.attention.shape import Shape
from treeattn.backends import device as devices
from treeattn.backends.cpu import MergeOperator, NullOperator
from treeattn.collectives.catalog import Selection
from treeattn.collectives.runtime.communicator import MpiCommunicator
from treeattn.collectives.runtime.cuda_graph import CudaGraphReducer
from treeattn.collectives.runtime.memory import HOST, Memory
from treeattn.collectives.runtime.reducer import Reducer, ReductionSpec, duplicate
from treeattn.collectives.schedule import Schedule
from treeattn.decoder import Decoder, gpu_reducers, reducers
from treeattn.decoder import plan as routes
from treeattn.decoder.planned import PlannedDecode
from treeattn.decoder.request import Reduction, Request
from treeattn.errors import RestrictionError
from treeattn.partial import Array
from treeattn.selection import CATALOG, select
from treeattn.study.compare.schema import NULL, SUM, Key

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Bfloat16Operator:
    """A `collectives.runtime.operator.Operator` on records of bfloat16, held as the uint16 of their bits
    because MPI has no name for them. Commutative to the bit, as the float32 merge is."""

    dtype = np.dtype(np.uint16)

    def __init__(self, head_dim: int) -> None:
        self._merge = MergeOperator(head_dim)
        self.width = self._merge.width

    def planned_merge(self, into: Any, other: Any) -> Callable[[], object]:
        """A call that folds `other` into `into`: C-contiguous [records, width], which never move. The float32
        copies are allocated here, once."""
        left, right = np.empty(into.shape, np.float32), np.empty(other.shape, np.float32)
        merge = self._merge.planned_merge(left, right)
        into, other = into.view(_BFLOAT16), other.view(_BFLOAT16)

        def run() -> None:
            np.copyto(left, into)
            np.copyto(right, other)
            merge()
            np.copyto(into, left, casting="same_kind")

        return run


def narrow(records: Any, wire: Any) -> None:
    """Float32 records [..., width] into uint16 `wire` of the same shape: the nearest bfloat16 records."""
    rounded = wire.view(_BFLOAT16)
    maximum = records[..., :1].astype(_BFLOAT16)
    rounded[..., :1] = maximum
    with np.errstate(invalid="ignore"):  # -inf - -inf, of records that saw nothing: all 0, whatever c
        scale = np.exp(records[..., :1] - maximum.astype(np.float32))
    scale[records[..., :1] == -np.inf] = 1
    rounded[..., 1:] = records[..., 1:] * scale


def widen(wire: Any, records: Any) -> None:
    """What `narrow` wrote, as float32."""
    np.copyto(records, wire.view(_BFLOAT16))


class OneCall(Reducer):
    """A reduction that is `call`; `end` releases what it uses."""

    def __init__(self, name: str, call: Callable[[], object], end: Callable[[], object] = tuple) -> None:
        super().__init__(name)
        self._call, self._end = call, end

    def __call__(self) -> None:
        """As bare as a caller's own, which schemes are compared with, but for the count that ends a wait."""
        self._running = self._number = self._number + 1
        self._call()
        self._running = 0

    def _begin(self) -> None:
        """Nothing goes ahead."""

    def _complete(self) -> None:
        self._call()

    def _release(self) -> None:
        self._end()


def nothing(*_: object) -> Reducer:
    """A reduction that does nothing."""
    return OneCall(NULL, tuple)


def library_sum(key: Key, reduction: ReductionSpec, *_: object) -> Reducer:
    """As many bytes as the records have under way, in elements of the records' own type. Collective."""
    elements = reduction.buffer.size // (2 if key.wire == "bfloat16" else 1)
    mine = reduction.buffer.reshape(-1)[:elements]
    if key.transport == "nccl":
        return _nccl_sum(reduction, mine)
    comm = duplicate(reduction.comm)
    add = _by_way_of_the_host if key.transport == "host" else _where_it_lies
    return OneCall(SUM, add(comm.unwatched, reduction.memory, mine), comm.free)


def _where_it_lies(comm: Any, memory: Memory, mine: Array) -> Callable[[], object]:
    total, operation = memory.empty(mine.shape, mine.dtype), mpi_library.load().SUM
    if memory is HOST:
        return lambda: comm.Allreduce(mine, total, operation)

    def add() -> None:
        memory.synchronize()
        comm.Allreduce(mine, total, operation)

    return add


def _by_way_of_the_host(comm: Any, memory: Any, mine: Array) -> Callable[[], object]:
    given, total = (memory.pinned(mine.shape, mine.dtype) for _ in range(2))
    operation = mpi_library.load().SUM

    def add() -> None:
        memory.copy(given, mine)
        memory.synchronize()
        comm.Allreduce(given, total, operation)
        memory.copy(mine, total)

    return add


def _nccl_sum(reduction: ReductionSpec, mine: Array) -> Reducer:
    """ncclAllReduce in place, as one CUDA graph from the second step on, as schedules are."""
    connected = gpu_reducers.connected_by_nccl(reduction.comm, reduction.memory)
    return CudaGraphReducer(SUM, connected, reduction.memory, lambda: connected.all_reduce(mine, "sum"))


def shape_of(key: Key) -> Shape:
    """The shape of a key's q, k and v. Raises `ArgumentError`."""
    return Shape(key.batch, key.queries, key.heads, key.kv_heads, key.head_dim, key.dtype)


def reduces(scheme: str) -> bool:
    """Whether it has a reduction apart from the step: fused schemes attend while they communicate."""
    row = CATALOG.get(scheme.partition(":")[0])
    return row is None or not row.fused


def plan(comm: MpiCommunicator, key: Key, own: Mapping[str, Schedule]) -> PlannedDecode:
    """A planned step of the scheme of `key`, perhaps one of one's `own`, by name. Collective; raises what
    `Decoder` raises, on every rank."""
    if key.scheme in (SUM, NULL):
        return _around(comm, key, None, library_sum if key.scheme == SUM else nothing)
    scheme = own.get(key.scheme, key.scheme)
    if key.wire == "bfloat16":
        return _around(comm, key, select(scheme), _bfloat16)
    output = "heads" if select(scheme).row.scattered else "replicated"
    how = Reduction(scheme, key.transport, key.executor, output)
    return Decoder(comm, **shape_of(key).plain, scheme=how, device=key.device)


def plan_null_merge(comm: MpiCommunicator, key: Key, own: Mapping[str, Schedule]) -> PlannedDecode:
    """The same schedule, messages and executor with merges that do nothing. Collective."""
    return _around(comm, key, select(own.get(key.scheme, key.scheme)), _null_merge)


def _around(
    comm: MpiCommunicator, key: Key, scheme: Selection | None, reducer: Callable[..., Reducer]
) -> PlannedDecode:
    """A decoder around a reduction of another kind."""
    device = devices.find(key.device)
    request = Request(shape_of(key), Reduction("chain"), select("chain"), None, device)

    def route(reduction: ReductionSpec) -> tuple[Schedule | None, Reducer]:
        schedule = scheme and routes.schedule(scheme, comm)
        return schedule, reducer(key, reduction, scheme, schedule)

    return PlannedDecode(routes.plan(comm, lambda: request, route))


def _bfloat16(key: Key, reduction: ReductionSpec, scheme: Selection, schedule: Schedule | None) -> Reducer:
    records = reduction.buffer
    unfit = schedule is None or schedule.result == "scattered" or key.device != "cpu"
    if unfit or records.dtype != np.float32:
        raise RestrictionError(
            f"{key.scheme} cannot send bfloat16: that takes a schedule which leaves every rank all heads, "
            "device='cpu', and inputs other than float64"
        )
    wire = np.zeros(records.shape, np.uint16)
    of_narrow = reduction._replace(operator=Bfloat16Operator(key.head_dim), buffer=wire)
    inner = reducers.plan("mpi", scheme, schedule, of_narrow, key.executor)

    def reduce() -> None:
        narrow(records, wire)
        inner()
        widen(wire, records)

    around = OneCall(key.scheme, reduce, inner.close)
    around.certificate, around.sent, around.executor = inner.certificate, inner.sent, inner.executor
    around.waits_for = inner.waits_for  # type: ignore[method-assign]
    return around


def _null_merge(key: Key, reduction: ReductionSpec, scheme: Selection, schedule: Schedule | None) -> Reducer:
    operator = NullOperator(key.head_dim, reduction.buffer.dtype)
    return reducers.plan("mpi", scheme, schedule, reduction._replace(operator=operator), key.executor)
