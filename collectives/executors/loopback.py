"""A schedule over virtual ranks in one process: the definition that other executors are tested against."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treeattn.collectives.check import prove
from treeattn.collectives.runtime.memory import Array
from treeattn.collectives.runtime.operator import Operator
from treeattn.collectives.schedule import Schedule
from treeattn.errors import ArgumentError


def run(schedule: Schedule, partials: Sequence[Array], operator: Operator) -> list[Array]:
    """Reduce `partials`, one array [records, operator.width] per rank, which are left as they are.

    Returns one new array per rank, [records, width] of the chunks that it is promised: all, its own, or on
    ranks other than the root none. Raises `ScheduleError` for a schedule that does not check and
    `ArgumentError` for partials that do not fit it.
    """
    _check(schedule, partials, operator)
    folds_of = prove(schedule).folds
    held = [np.array(partial, order="C") for partial in partials]
    records = len(held[0])
    for round_, folds in zip(schedule.rounds, folds_of, strict=True):
        before = [array.copy() for array in held]
        for transfer in round_:
            if not transfer.merge:
                part = schedule.chunk_slice(transfer.chunks, records)
                held[transfer.dst][part] = before[transfer.src][part]
        for rank, its_folds in folds.items():
            for chunks, sources in its_folds:
                part = schedule.chunk_slice(chunks, records)
                if part.stop > part.start:  # a chunk without records is not sent
                    held[rank][part] = _folded([before[source][part] for source in sources], operator)
    own = (schedule.chunk_slice(schedule.promised(rank), records) for rank in range(schedule.size))
    return [array[part] for array, part in zip(held, own, strict=False)]


def _folded(values: Sequence[Array], operator: Operator) -> Array:
    total = values[0].copy()
    for value in values[1:]:
        operator.planned_merge(total, value)()
    return total


def _check(schedule: Schedule, partials: Sequence[Array], operator: Operator) -> None:
    if len(partials) != schedule.size:
        raise ArgumentError(
            f"{schedule.name} is for {schedule.size} ranks, but there are {len(partials)} partials"
        )
    shape = (len(partials[0]), operator.width)
    for rank, partial in enumerate(partials):
        if partial.shape != shape or partial.dtype != operator.dtype:
            raise ArgumentError(
                f"the partial of rank {rank} is {partial.dtype} {list(partial.shape)}, "
                f"the reduction needs {np.dtype(operator.dtype)} {list(shape)}"
            )
