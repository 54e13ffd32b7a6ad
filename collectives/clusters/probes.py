"""What is measured of a machine to know its prices: small reductions over a few of its ranks.

A probe is a scheme of the catalogue over some groups of ranks at once, so it runs as all schedules run, and
the simulator can say what it would take with any prices. On each tier: one message there and back (the
ping-pong of Hockney, 1994), all pairs at once, and a rank with several partners in one round and in several:
what a message costs its ends where many are under way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from treeattn.collectives.catalog import build
from treeattn.collectives.combinators import on_ranks, side_by_side
from treeattn.collectives.schedule import Round, Schedule

Group = tuple[int, ...]

#: Sizes of the payload, in records.
RECORDS = (1, 4, 16, 64, 256)

_MOST_PARTNERS = 8
_LARGEST_FAN = 64  # records: of p (p - 1) messages


@dataclass(frozen=True, slots=True)
class Probe:
    """`scheme` over each of `groups` at once, `records` records of each rank; no groups: an empty call.

    tier: "socket", "node" or "network".
    """

    kind: str
    tier: str
    scheme: str
    groups: tuple[Group, ...]
    records: int

    def schedule(self, size: int) -> Schedule:
        """All groups side by side, for the simulator; no reduction over all ranks."""
        return Schedule(self.kind, size, 1, side_by_side(*map(self._rounds, self.groups)))

    def _rounds(self, group: Group) -> tuple[Round, ...]:
        return on_ranks(build(self.scheme, len(group)).rounds, group)


def probes(nodes: Sequence[Group], sockets: Sequence[Sequence[Group]] = ()) -> Iterator[Probe]:
    """What to measure where nodes hold these ranks, and the sockets of each those, if they are a tier. At
    least two ranks are needed."""
    yield Probe("call", "", "", (), RECORDS[0])
    if sockets:
        yield from _of_tier("socket", [socket for of_node in sockets for socket in of_node])
    joined = [column for of_node in sockets for column in _columns(of_node)] if sockets else nodes
    yield from _of_tier("node", joined)
    yield from _of_tier("network", _columns(nodes))


def _columns(units: Sequence[Group]) -> list[Group]:
    """The first of each unit, the second of each that has one, and so on."""
    return [tuple(rank for rank in column if rank is not None) for column in zip_longest(*units)]


def _of_tier(tier: str, units: Sequence[Group]) -> Iterator[Probe]:
    """units: disjoint groups of ranks, each of which is joined by this tier; those of one rank tell
    nothing."""
    units = [unit for unit in units if len(unit) > 1]
    if not units:
        return
    pairs = tuple(unit[at : at + 2] for unit in units for at in range(0, len(unit) - 1, 2))
    wide = tuple(unit[:_MOST_PARTNERS] for unit in units if len(unit) > 2)
    for records in RECORDS:
        yield Probe("ping-pong", tier, "chain", pairs, records)
        yield Probe("exchange", tier, "recursive_doubling", pairs, records)
        if wide and records <= _LARGEST_FAN:
            yield Probe("fan", tier, "all_gather_merge", wide, records)
            yield Probe("rounds", tier, "k_nomial_tree", wide, records)
