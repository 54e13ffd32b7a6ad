"""A schedule over virtual ranks in one process: the definition that other executors are tested against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from treeattn.collectives.check import Fold, prove
from treeattn.collectives.operator import Operator
from treeattn.collectives.schedule import Schedule
from treeattn.errors import ArgumentError

__all__ = ["run"]


def run(schedule: Schedule, partials: Sequence[Any], operator: Operator) -> list[Any]:
    """Reduce `partials`, one array [records, operator.width] per rank, which are left as they are.

    Returns one new array per rank: [records, width] if the result is replicated, the records of its own
    chunk if it is scattered. Raises `ScheduleError` for a schedule that does not check and
    `ArgumentError` for partials that do not fit it.
    """
    held = _copies(schedule, partials, operator)
    records = held[0].shape[0]
    keeps_apart = schedule.keeps_apart
    gathered: dict[tuple[int, range], Any] = {}  # without what the rank brought, where that is kept apart
    for round_, folds in zip(schedule.rounds, prove(schedule).folds, strict=True):
        before, apart = [array.copy() for array in held], dict(gathered)
        without = {(t.src, t.dst, chunk) for t in round_ if not t.own for chunk in t.chunks}
        for transfer in round_:
            if not transfer.merge:
                part = schedule.chunk_slice(transfer.chunks, records)
                held[transfer.dst][part] = before[transfer.src][part]
        for dst, chunks, sources in _pieces(folds, chunk_by_chunk=keeps_apart):
            part = schedule.chunk_slice(chunks, records)
            if part.start == part.stop:
                continue  # a chunk without records is not sent
            values = [
                apart[source, chunks] if (source, dst, chunks.start) in without else before[source][part]
                for source in sources
            ]
            held[dst][part] = _folded(values, operator)
            if keeps_apart:
                values[sources.index(dst)] = apart.get((dst, chunks))
                gathered[dst, chunks] = _folded([v for v in values if v is not None], operator)
    if schedule.result == "replicated":
        return held
    return [array[schedule.chunk_slice(range(r, r + 1), records)] for r, array in enumerate(held)]


def _pieces(
    folds: Mapping[int, Sequence[Fold]], chunk_by_chunk: bool
) -> Iterator[tuple[int, range, tuple[int, ...]]]:
    """The folds of a round as (dst, chunks, sources)."""
    for dst, its_folds in folds.items():
        for chunks, sources in its_folds:
            for piece in [range(c, c + 1) for c in chunks] if chunk_by_chunk else [chunks]:
                yield dst, piece, sources


def _folded(values: Sequence[Any], operator: Operator) -> Any:
    total = values[0].copy()
    for value in values[1:]:
        operator.planned_merge(total, value)()
    return total


def _copies(schedule: Schedule, partials: Sequence[Any], operator: Operator) -> list[Any]:
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
    return [np.array(partial, order="C") for partial in partials]
