"""How many messages and bytes one step sends, by tier: as it was handed to MPI, and as the schedule says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from treeattn.collectives.parameters import Groups, node_of
from treeattn.collectives.runtime.communicator import MpiCommunicator
from treeattn.collectives.runtime.reducer import Sent
from treeattn.collectives.schedule import Schedule
from treeattn.collectives.traffic import messages

Tiers = dict[str, list[Any]]


def scheduled(schedule: Schedule, rows: int, row_bytes: int, groups: Groups) -> Tiers:
    """Tier -> [messages, bytes] of one step of `schedule`, all ranks together.

    The records are `rows` of `row_bytes` that a chunk never cuts (all records of a head). groups: the ranks
    of each node.
    """
    sent = ((m.src, m.dst, m.records * row_bytes) for m in messages(schedule, rows))
    return _by_tier(sent, groups)


def handed_over(comm: MpiCommunicator, sent: Any, groups: Groups) -> Tiers | None:
    """The same from what each rank handed to MPI: a list of (destination, bytes), one for each message.

    Of a library's collective only the payload is known: its messages are None, its tier is ``unknown``
    unless there is but one node. None where not even that is. Collective.
    """
    everyone: list[Any] = comm.allgather(sent)
    if any(mine is None for mine in everyone):
        return None
    if not isinstance(sent, Sent):
        return _by_tier(((src, dst, size) for src, mine in enumerate(everyone) for dst, size in mine), groups)
    counts, sizes = zip(*everyone, strict=True)
    tier = "intra" if len(groups) == 1 else "unknown"
    return _by_tier((), groups) | {tier: [None if None in counts else sum(counts), sum(sizes)]}


def _by_tier(sent: Iterable[tuple[int, int, int]], groups: Groups) -> Tiers:
    """sent: source, destination, bytes."""
    node = node_of(groups)
    tiers: Tiers = {"intra": [0, 0], "inter": [0, 0]}
    for src, dst, size in sent:
        count = tiers["intra" if node[src] == node[dst] else "inter"]
        count[0] += 1
        count[1] += size
    return tiers
