"""How many messages and bytes one step sends, by tier: as it was handed to MPI, and as the schedule says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treeattn.collectives.schedule import Schedule

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["handed_over", "scheduled"]

Groups = tuple[tuple[int, ...], ...]
Tiers = dict[str, list[int]]


def scheduled(schedule: Schedule, rows: int, row_bytes: int, groups: Groups) -> Tiers:
    """Tier -> [messages, bytes] of one step of `schedule`, all ranks together.

    The records are `rows` of `row_bytes` that a chunk never cuts (all records of a head); a chunk without
    rows is not sent. groups: the ranks of each node.
    """
    tiers: Tiers = {"intra": [0, 0], "inter": [0, 0]}
    node = _nodes(groups)
    for round_ in schedule.rounds:
        for transfer in round_:
            part = schedule.chunk_slice(transfer.chunks, rows)
            if part.stop > part.start:
                tier = tiers["intra" if node[transfer.src] == node[transfer.dst] else "inter"]
                tier[0] += 1
                tier[1] += (part.stop - part.start) * row_bytes
    return tiers


def handed_over(comm: Intracomm, sent: list[tuple[int, int]] | None, groups: Groups) -> Tiers | None:
    """The same from what each rank's planned step hands to MPI: (destination, bytes) of each message.

    None where a library decides. Collective.
    """
    everyone: list[Any] = comm.allgather(sent)
    if any(messages is None for messages in everyone):
        return None
    tiers: Tiers = {"intra": [0, 0], "inter": [0, 0]}
    node = _nodes(groups)
    for source, messages in enumerate(everyone):
        for destination, size in messages:
            tier = tiers["intra" if node[source] == node[destination] else "inter"]
            tier[0] += 1
            tier[1] += size
    return tiers


def _nodes(groups: Groups) -> dict[int, int]:
    return {rank: index for index, ranks in enumerate(groups) for rank in ranks}
