"""What is measured, behind one face: any scheme, one with bfloat16 records, the library's sum, and nothing.

Each has the parts of a `treeattn.Decoder`: ``local``, ``reduce`` and ``finish``, and ``sent``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from treeattn import comm as comm_
from treeattn.attention.shape import Shape
from treeattn.backends.cpu import MergeOperator
from treeattn.collectives.reducer import Reducer, Reduction
from treeattn.decoder import Decoder
from treeattn.decoder.plan import schedule as schedule_of
from treeattn.decoder.plan import select
from treeattn.errors import RestrictionError
from treeattn.study.compare import wire as wire_
from treeattn.study.compare.schema import NULL, SUM, Key

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["Around", "plan", "plan_null_merge", "reduces", "shape_of"]


def shape_of(key: Key) -> Shape:
    """The shape of a key's q, k and v. Raises `ArgumentError`."""
    return Shape(key.batch, key.queries, key.heads, key.kv_heads, key.head_dim, key.dtype)


def reduces(scheme: str) -> bool:
    """Whether it has a reduction apart from the step: fused schemes attend while they communicate."""
    return scheme in (NULL, SUM) or not select(scheme).row.fused


def plan(comm: Intracomm, key: Key) -> Any:
    """A planned step of the scheme of `key`: a `Decoder`, or an `Around`. Collective.

    Raises what `Decoder` raises, on every rank alike.
    """
    if key.scheme == SUM:
        return Around(comm, key, _sum)
    if key.scheme == NULL:
        return Around(comm, key, _nothing)
    if key.wire == "bfloat16":
        return Around(comm, key, _bfloat16)
    output = "heads" if select(key.scheme).row.scattered else "replicated"
    return Decoder(comm, **asdict(shape_of(key)), scheme=key.scheme, output=output)


class Around:
    """A step whose reduction is not a scheme: the parts of a `Decoder` of one rank around it."""

    def __init__(self, comm: Intracomm, key: Key, plan_reduction: Callable[..., Any]) -> None:
        self._comm = comm.Dup()
        self._alone = Decoder(comm_.mpi().COMM_SELF, **asdict(shape_of(key)), scheme="chain")
        self.records, self.heads = self._alone.records, self._alone.heads
        self.local, self.finish = self._alone.local, self._alone.finish
        self.schedule: Any = None
        self.certificate: Any = None
        self.sent: Any = None
        self._reducer: Reducer | None = None
        self.reduce: Callable[[], object] = plan_reduction(self, key)

    def close(self) -> None:
        """Release communicator and requests. Collective."""
        if self._reducer is not None:
            self._reducer.close()
        self._alone.close()
        self._comm.Free()

    def reducer(self, schedule: Any, operator: Any, buffer: Any, group: int) -> Reducer:
        """Plan a schedule as this step's reduction."""
        from treeattn.collectives.executors import mpi  # here: help needs no MPI library

        self._reducer = mpi.Reducer(Reduction(self._comm, operator, buffer, group), schedule)
        self.schedule, self.certificate = schedule, self._reducer.certificate
        self.sent = self._reducer.sent
        return self._reducer


def plan_null_merge(comm: Intracomm, key: Key) -> Around:
    """The same schedule, messages and executor with merges that do nothing. Collective."""
    return Around(comm, key, _null_merge)


class _NullOperator(MergeOperator):
    def planned_merge(self, into: Any, other: Any) -> Callable[[], object]:
        return tuple  # a callable that does nothing


def _sum(step: Around, key: Key) -> Callable[[], object]:
    """As many bytes as the records have under way, in elements of the records' own type."""
    elements = step.records.size // (2 if key.wire == "bfloat16" else 1)
    mine, total = step.records.reshape(-1)[:elements], np.empty(elements, step.records.dtype)
    allreduce, operation = step._comm.Allreduce, comm_.mpi().SUM
    return lambda: allreduce(mine, total, operation)


def _nothing(step: Around, key: Key) -> Callable[[], object]:
    return lambda: None


def _null_merge(step: Around, key: Key) -> Callable[[], object]:
    schedule = schedule_of(select(key.scheme), step._comm)
    operator = _NullOperator(key.head_dim, step.records.dtype)
    return step.reducer(schedule, operator, step.records, key.batch * key.queries)


def _bfloat16(step: Around, key: Key) -> Callable[[], object]:
    schedule = schedule_of(select(key.scheme), step._comm)
    if schedule is None or schedule.result == "scattered" or step.records.dtype != np.float32:
        raise RestrictionError(
            f"{key.scheme} cannot send bfloat16: that takes a schedule which leaves every rank all heads, "
            "and inputs other than float64"
        )
    buffer = np.zeros(step.records.shape, np.uint16)
    reducer = step.reducer(schedule, wire_.Bfloat16Operator(key.head_dim), buffer, key.batch * key.queries)

    def reduce() -> None:
        wire_.narrow(step.records, buffer)
        reducer()
        wire_.widen(buffer, step.records)

    return reduce
