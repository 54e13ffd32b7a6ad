"""A reduction of ``reproducible=`` in which results are copied instead of records, a quarter of their bytes.

Behind the last round of a schedule that merges, all that counts is complete. So each rank finishes there what
it has and what others take of it, and the rounds that are left copy float32 out and lse. Finishing is a
function of the record, which is the same on every rank: the bits are those of copied records. What each rank
finishes follows from the schedule, and either part is run by whatever executor would run the whole.

Two reductions and what lies between them cost some microseconds more than one C call. Measured on emulated
nodes that pays from `_FROM` bytes on where copies leave a node; within one, where ranks read one another's
memory, at no size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from treeattn import bins, communicators
from treeattn.attention.shape import Shape
from treeattn.backends import cpu
from treeattn.collectives.combinators import runs_of
from treeattn.collectives.runtime.communicator import Communicator
from treeattn.collectives.runtime.reducer import Reducer, ReductionSpec
from treeattn.collectives.schedule import Schedule
from treeattn.partial import Array

_FROM = 100_000  # bytes of a rank's records


def copied_bytes(records: Array) -> int | None:
    """Of one record [.., width] in copies that leave a node; None where there are too few of them."""
    if records.nbytes < _FROM:
        return None
    return 4 * cpu.ResultOperator((records.shape[-1] - bins.EXTRA) // 2).width


def pays(comm: Communicator, records: Array, schedule: Schedule) -> bool:
    """Whether it is done for such records, as many on every rank."""
    node = {rank: index for index, ranks in enumerate(communicators.node_groups(comm)) for rank in ranks}
    copies = (t for number in schedule.rounds_of("copying") for t in schedule.rounds[number - 1])
    return copied_bytes(records) is not None and any(node[t.src] != node[t.dst] for t in copies)


class FinishedCopies(Reducer):
    """Folds records in place as far as the rounds that merge do, and leaves `results` on every rank."""

    def __init__(
        self, merging: Reducer, finish: list[Callable[[], object]], copying: Reducer, results: Array
    ) -> None:
        """results: [batch, heads, queries, v_dim + 1], out then lse; `finish` writes what this rank has of
        them between `merging` and `copying`."""
        super().__init__(merging.name)
        self._merging, self._finish, self._copying, self._results = merging, finish, copying, results
        self.certificate, self.executor = merging.certificate, merging.executor
        self.fallback = merging.fallback
        assert isinstance(merging.sent, list)
        assert isinstance(copying.sent, list)
        self.sent = merging.sent + copying.sent
        self._copies = False

    def finish(self, out: Array, lse: Array) -> Callable[[], object]:
        """A call that writes what came into out [batch, queries, heads, v_dim] and lse [batch, heads,
        queries]."""
        ours, theirs = self._results[..., :-1].swapaxes(1, 2), self._results[..., -1]

        def unpack() -> None:
            out[...] = ours
            lse[...] = theirs

        return unpack

    def waits_for(self) -> tuple[str, str]:
        return (self._copying if self._copies else self._merging).waits_for()

    def _begin(self) -> None:
        self._copies = False
        self._merging.start()

    def _advance(self) -> bool:
        if not self._copies:
            if not self._merging.test():
                return False
            self._go_on()
        return self._copying.test()

    def _complete(self) -> None:
        if not self._copies:
            self._go_on()
        self._copying.wait()

    def _go_on(self) -> None:
        self._merging.wait()
        for work in self._finish:
            work()
        self._copies = True
        self._copying.start()

    def _release(self) -> None:
        self._merging.close()
        self._copying.close()

    def _abandon(self) -> None:
        for part in (self._merging, self._copying):
            part.__exit__(RuntimeError)


def plan(
    reduce: Callable[[ReductionSpec], Reducer], spec: ReductionSpec, schedule: Schedule, shape: Shape
) -> FinishedCopies:
    """The reduction of a schedule with rounds that only copy. Collective.

    reduce: plans what it is given. spec: of `bins` records.
    """
    operator = cpu.ResultOperator(shape.v_dim)
    batch, heads, queries = shape.lse_shape
    results = np.empty((batch * heads * queries, operator.width), np.float32)
    merging = reduce(spec._replace(part="merging"))
    copying = reduce(spec._replace(part="copying", operator=operator, buffer=results))
    records, finish = spec.records(schedule.name), []
    for chunks in _finished(schedule, spec.comm.rank):
        part = schedule.chunk_slice(chunks, len(records) // spec.granularity)
        own = slice(part.start * spec.granularity, part.stop * spec.granularity)
        if part.stop > part.start:
            finish.append(_planned_finish(records[own], results[own]))
    return FinishedCopies(merging, finish, copying, results.reshape(batch, heads, queries, -1))


def _planned_finish(records: Array, results: Array) -> Callable[[], object]:
    out = np.empty((1, 1, len(results), results.shape[1] - 1), np.float32)
    lse = np.empty((1, len(results), 1), np.float32)
    divide = cpu.planned_finish(records[None, :, None], out, lse)

    def finish() -> None:
        divide()
        results[:, :-1] = out[0, 0]
        results[:, -1] = lse[0, :, 0]

    return finish


def _finished(schedule: Schedule, rank: int) -> Iterator[range]:
    """The chunks of a rank that are looked at, by others or in the end, before a copy overwrites them."""
    looked_at: set[int] = set()
    overwritten: set[int] = set()
    for number in schedule.rounds_of("copying"):
        round_ = schedule.rounds[number - 1]
        for t in round_:
            if t.src == rank:
                looked_at |= set(t.chunks) - overwritten
        for t in round_:
            if t.dst == rank:
                overwritten |= set(t.chunks)
    looked_at |= set(schedule.promised(rank)) - overwritten
    return runs_of(looked_at)
