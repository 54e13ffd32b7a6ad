"""How many messages and bytes one step sends, by tier: as it was handed to MPI, and as the schedule says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treeattn.baselines import Sent
from treeattn.collectives.schedule import Schedule

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["handed_over", "scheduled"]

Groups = tuple[tuple[int, ...], ...]
Tiers = dict[str, list[Any]]


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
                tier = "intra" if node[transfer.src] == node[transfer.dst] else "inter"
                _add(tiers, tier, 1, (part.stop - part.start) * row_bytes)
    return tiers


def handed_over(comm: Intracomm, sent: Any, groups: Groups) -> Tiers | None:
    """The same from what each rank handed to MPI: a list of (destination, bytes), one for each message.

    Of a library's collective only the payload is known: its messages are None, its tier is ``unknown``
    unless there is but one node. None where not even that is. Collective.
    """
    everyone: list[Any] = comm.allgather(sent)
    if any(mine is None for mine in everyone):
        return None
    tiers: Tiers = {"intra": [0, 0], "inter": [0, 0]}
    node = _nodes(groups)
    for source, mine in enumerate(everyone):
        if isinstance(mine, Sent):
            _add(tiers, "intra" if len(groups) == 1 else "unknown", *mine)
            continue
        for destination, size in mine:
            _add(tiers, "intra" if node[source] == node[destination] else "inter", 1, size)
    return tiers


def _add(tiers: Tiers, tier: str, messages: int | None, size: int) -> None:
    count = tiers.setdefault(tier, [0, 0])
    count[0] = None if messages is None or count[0] is None else count[0] + messages
    count[1] += size


def _nodes(groups: Groups) -> dict[int, int]:
    return {rank: index for index, ranks in enumerate(groups) for rank in ranks}
