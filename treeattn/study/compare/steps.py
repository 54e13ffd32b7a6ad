"""What is measured, as planned steps: any scheme, and as a yardstick a library's own sum of as many bytes
over the same wire."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from treeattn.attention.shape import Shape
from treeattn.backends import device as devices
from treeattn.backends.device import Attention
from treeattn.collectives.runtime.memory import HOST
from treeattn.collectives.runtime.reducer import Reducer, ReductionSpec
from treeattn.collectives.schedule import Schedule
from treeattn.decoder.plan import LocalPlan
from treeattn.decoder.planned import PlannedDecode
from treeattn.decoder.request import Reduction, Request
from treeattn.errors import ArgumentError
from treeattn.mpi import library
from treeattn.mpi.communicators import Agreement, MpiCommunicator
from treeattn.partial import Array
from treeattn.selection import select
from treeattn.study.compare.rows import Key


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


def library_sum(key: Key, reduction: ReductionSpec) -> Reducer:
    """As many bytes as the records have, in elements of their own type, by its algorithm. Collective; raises
    `ArgumentError` where they are so few that the library takes another algorithm."""
    mine = reduction.buffer.reshape(-1)
    if key.algorithm in ("ring", "rabenseifner") and mine.size < reduction.comm.size:  # of Open MPI
        raise ArgumentError(
            f"{key.scheme}: {mine.size} elements are fewer than {reduction.comm.size} ranks, and the library "
            "may take another algorithm: give more bytes"
        )
    from treeattn.study.compare.sum_algorithm import nccl_sum, sum_algorithm

    with ExitStack() as ending:
        if key.algorithm:
            ending.callback(sum_algorithm(key.algorithm).leave)
            sum_algorithm(key.algorithm).use()
        if key.transport == "nccl":
            return nccl_sum(key, reduction, mine)
        from treeattn.collectives.runtime import mpi_communicator  # starts MPI

        comm = mpi_communicator.duplicate(reduction.comm)
        call = _sum(comm.unwatched, reduction.memory, mine, key.transport == "host")
        ending.callback(comm.free)
        return OneCall(key.scheme, call, ending.pop_all().close)


def _sum(comm: Any, memory: Any, mine: Array, staged: bool) -> Callable[[], object]:
    """A call that adds up `mine` over the ranks. staged: by way of the host."""
    allocate, operation = memory.pinned if staged else memory.empty, library.load().SUM
    total = allocate(mine.shape, mine.dtype)
    given = allocate(mine.shape, mine.dtype) if staged else mine
    if memory is HOST:
        return lambda: comm.Allreduce(mine, total, operation)

    def add() -> None:
        if staged:
            memory.copy(given, mine)
        memory.synchronize()
        comm.Allreduce(given, total, operation)
        if staged:
            memory.copy(mine, total)

    return add


class _LocalPlan(LocalPlan):
    """A plan of `key`, of which a library's sum adds up the records, whatever its request says. Records that
    are only reduced may have any width, since nothing attends."""

    def __init__(self, agreed: Agreement, request: Request, key: Key) -> None:
        self.key = key
        super().__init__(agreed, request)

    def check_shape(self) -> None:
        if self.key.what == "decode":
            super().check_shape()

    def attention(self) -> Attention:
        return super().attention() if self.key.what == "decode" else _Nothing()

    def reduction(self, spec: ReductionSpec) -> tuple[Schedule | None, str, Any]:
        if self.key.algorithm is not None:
            return None, self.key.transport, library_sum(self.key, spec)
        return super().reduction(spec)


class _Nothing:
    """Leaves the records as they are."""

    compiled = False

    def __call__(self, *_: object) -> None:
        """Attend to nothing."""


class _Records(Shape):
    """Of a reduction alone."""

    def _check_widths(self) -> None:
        """Every width can be reduced."""


def shape_of(key: Key) -> Shape:
    """The shape of a key's q, k and v. Raises `ArgumentError`."""
    kind = Shape if key.what == "decode" else _Records
    return kind(key.batch, key.queries, key.heads, key.kv_heads, key.head_dim, key.dtype)


def plan(comm: MpiCommunicator, key: Key, user_schedules: Mapping[str, Schedule]) -> PlannedDecode:
    """A planned step of the scheme of `key`, perhaps one of `user_schedules`, by name. Collective; raises
    what `Decoder` raises, on every rank."""
    how = Reduction("chain")  # of a library's sum: what excludes nothing
    if key.algorithm is None:
        scheme = user_schedules.get(key.scheme, key.scheme)
        output = "heads" if select(scheme).row.scattered else "replicated"
        how = Reduction(scheme, key.transport, output=output)
    with Agreement(comm) as agreed:
        assert how.scheme is not None
        request = Request(shape_of(key), how, select(how.scheme), None, devices.find(key.device))
        local = _LocalPlan(agreed, request, key)
    return PlannedDecode(local.complete())
