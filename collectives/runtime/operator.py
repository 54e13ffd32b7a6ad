"""What reducers need to know of the records that they move: their type, width and how two merge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from treeattn.collectives.program import Program
from treeattn.collectives.runtime.memory import Array


class Operator(Protocol):
    """A commutative, associative merge of records.

    An array of records is C-contiguous with shape [records, width]. The merge must give the same bits
    whichever operand comes first: schedules of class A and C rest on it. One that folds several arrays in
    one go has ``planned_merge_many(into, others)``, too: [count, records, width] into [records, width].
    """

    #: Element type of a record.
    dtype: np.dtype[Any]
    #: Elements of one record.
    width: int

    def planned_merge(self, into: Array, other: Array) -> Callable[[], object]:
        """A call that folds `other` into `into`, in place. Both are [records, width] and never move."""


class OneSidedStep(Protocol):
    """A program of one-sided gets, planned over memory that never moves."""

    #: [program.landing, width]: where messages of other nodes land.
    landed: Array

    def __call__(self, part: int = 0) -> None:
        """Queue what runs before the first of `Program.exchanges` (part 0), or behind one of them; without
        messages part 0 is a whole step."""

    def fuse_epilogue(self, work: Any) -> Callable[[], object] | None:
        """What queues a step and then `work`, planned on the same device over the same records, at once; None
        where that cannot be."""

    def timed_out_peer(self) -> tuple[int, int] | None:
        """(rank, round) that did not come in time, as far as what was queued is done; else None."""


class OneSidedOperator(Operator, Protocol):
    """An operator that merges records straight out of the memory of other ranks."""

    def window_bytes(self, program: Program) -> int:
        """Bytes of the memory that every rank exposes."""

    def resident_blocks(self, records: int) -> int:
        """In how many parts this rank's device can work on that many records, all of them at once."""

    def planned_gets(
        self, records: Array, program: Program, windows: list[int], seconds: float, blocks: int
    ) -> OneSidedStep:
        """`program` over records [records, width], C-contiguous, which never move.

        windows: where those of all ranks are, all zeros before any rank's first step. seconds: that another
        rank is waited for, or infinity; where it does not come in time, the records become NaN, in later
        steps too. blocks: `resident_blocks` of the rank that has fewest.
        """


class NativeCode(NamedTuple):
    """Addresses of C functions, which live as long as the process."""

    #: ``int64_t run_step(struct step *, int64_t nanoseconds)`` of kernels/cpu/step.c.
    run_step: int
    #: ``void merge(void *into, const void *other, int64_t records, int64_t width)``.
    merge: int


class NativeOperator(Operator, Protocol):
    """An operator of records in the memory of the host that compiled code can call without Python."""

    def native_code(self) -> NativeCode:
        """The merge, and what runs a whole step of it. Raises `BackendError` where there is none."""

    def mpi_function(self) -> int:
        """Address of an MPI_User_function that merges records. Raises as `native_code`."""


class Columns(NamedTuple):
    """Views of records [records, width]: `maximum` [records]; what adds up once the maxima are shared,
    `denominator` [records] and `numerator` [records, ..]."""

    maximum: Array
    denominator: Array
    numerator: Array


class RescalingOperator(Operator, Protocol):
    """An operator that can put records on the scale of given maxima, after which they merge by adding."""

    def columns(self, records: Array) -> Columns:
        """What a record is made of."""

    def planned_maxima(self, records: Array, maxima: Array) -> Callable[[], object]:
        """Copy the maxima of `records` into `maxima` [records], NaN as +inf: libraries may drop NaN, and a
        record of either maximum has no result. Neither array ever moves."""

    def planned_rescale(
        self, records: Array, maxima: Array, denominators: Array, numerators: Array
    ) -> Callable[[], object]:
        """Write denominators and numerators of `records` on the scale of `maxima` [records].

        All arrays never move; the last two may be the records' own parts, or of any stride between records.
        """
