"""Where the ranks of a job are: nodes and sockets, and how that fits a cluster that somebody described.

Nodes are MPI's shared-memory domains, sockets what the cores that a rank may use belong to, by sysfs. Nothing
is guessed: sockets are a level of reductions only where each rank is seen to be bound to one.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from treeattn.collectives.clusters import description
from treeattn.collectives.clusters.description import Cluster
from treeattn.collectives.clusters.placement import Placement, block
from treeattn.collectives.runtime.communicator import Communicator
from treeattn.errors import ArgumentError

#: Names the cluster where no option does.
PRESET = "TREEATTN_CLUSTER"

_SOCKET = "socket"  # the tier of that name in a cluster file
_ROOT = Path("/")

Group = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rank:
    """Where one rank is. sockets: those whose cores it may run on; nics: network cards of its node that have
    a link."""

    rank: int
    node: int
    sockets: tuple[int, ...]
    nics: int = 0

    @property
    def socket(self) -> int | None:
        """The one that it is bound to, if it is."""
        return self.sockets[0] if len(self.sockets) == 1 else None


@dataclass(frozen=True, slots=True)
class Topology:
    """Every rank's place, in order of ranks."""

    ranks: tuple[Rank, ...]

    @property
    def nodes(self) -> tuple[Group, ...]:
        """The ranks of each node, nodes in order of their lowest rank."""
        return tuple(_grouped((rank.node, rank.rank) for rank in self.ranks).values())

    @property
    def sockets(self) -> tuple[tuple[Group, ...], ...]:
        """Ranks of each socket of each node, where that is a level: every rank is bound to one socket, some
        socket has several ranks, and some node several sockets. Else empty."""
        if any(rank.socket is None for rank in self.ranks):
            return ()
        found = tuple(
            tuple(_grouped((self.ranks[rank].socket, rank) for rank in node).values()) for node in self.nodes
        )
        return found if max(map(len, found)) > 1 and _widest(found) > 1 else ()

    @property
    def binding(self) -> str:
        """Whether sockets are a level, in words."""
        loose = [rank for rank in self.ranks if len(rank.sockets) > 1]
        if self.sockets:
            return "sockets are a level: every rank is bound to one, and shares it or the node with others"
        if loose:
            names = ", ".join(str(rank.rank) for rank in loose[:8]) + (", .." if len(loose) > 8 else "")
            return (
                f"sockets are no level: not bound to one are ranks {names} (mpiexec -bind-to socket, "
                "srun --cpu-bind=sockets)"
            )
        if any(not rank.sockets for rank in self.ranks):
            return "sockets are no level: the system does not say to which one cores belong"
        return "sockets are no level: one in each node, or one for each rank"

    def levels(self) -> tuple[tuple[tuple[str, int], ...], Placement]:
        """Name of each level from the inside out, and how many units of the one before it joins at most; and
        the place of each rank in them."""
        units = self.sockets or tuple((node,) for node in self.nodes)
        width, count = _widest(units), max(map(len, units))
        found = [("socket", width), ("node", count)] if self.sockets else [("node", width)]
        if len(self.nodes) > 1:
            found.append(("network", len(self.nodes)))
        return tuple(found), _placed(units, width, width * count)

    @property
    def nics(self) -> int:
        """Network cards of each node, as many as its places share evenly."""
        units = self.sockets or tuple((node,) for node in self.nodes)
        slots = _widest(units) * max(map(len, units))
        seen = min(rank.nics for rank in self.ranks)
        return max((count for count in range(1, seen + 1) if slots % count == 0), default=1)

    def places_on(self, cluster: Cluster) -> Placement:
        """The place of each rank: by the nodes that they are on if those fit, and within by sockets if the
        cluster has a tier of that name and those fit; else in blocks. Raises `ArgumentError` for more ranks
        than places."""
        nodes, inner = self.nodes, cluster.node_tier - 1
        if self.misfit(cluster):
            return block(cluster, len(self.ranks))
        if self.sockets and inner >= 0 and cluster.tiers[inner].name == _SOCKET:
            width, most = cluster.widths[inner], cluster.tiers[cluster.node_tier].joins
            if _widest(self.sockets) <= width and max(map(len, self.sockets)) <= most:
                return _placed(self.sockets, width, cluster.slots)
        return _placed(tuple((node,) for node in nodes), cluster.slots, cluster.slots)

    def misfit(self, cluster: Cluster) -> str:
        """Why the nodes of this job are not those of the cluster; nothing where they fit."""
        widest, most = max(map(len, self.nodes)), cluster.places // cluster.slots
        if widest <= cluster.slots and len(self.nodes) <= most:
            return ""
        return (
            f"ranks are taken to fill its {most} nodes of {cluster.slots} one after the other, which is not "
            f"how this job has them ({len(self.nodes)} of up to {widest})"
        )


def _grouped(pairs: Iterable[tuple[int | None, int]]) -> dict[int | None, Group]:
    """Key -> ranks, by ascending keys."""
    groups: defaultdict[int | None, list[int]] = defaultdict(list)
    for key, rank in pairs:
        groups[key].append(rank)
    return {key: tuple(groups[key]) for key in sorted(groups, key=lambda at: (at is None, at))}


def _widest(units: Sequence[Sequence[Group]]) -> int:
    return max(len(group) for of_node in units for group in of_node)


def _placed(units: Sequence[Sequence[Group]], width: int, slots: int) -> Placement:
    """units: groups of ranks of each node, each on places of its own, `width` of them; a node has `slots`."""
    where = {
        rank: node * slots + unit * width + slot
        for node, groups in enumerate(units)
        for unit, group in enumerate(groups)
        for slot, rank in enumerate(group)
    }
    return tuple(where[rank] for rank in range(len(where)))


class Described(NamedTuple):
    """A cluster that somebody named. by: the option or the variable that did."""

    cluster: Cluster
    by: str

    @property
    def shown(self) -> str:
        """For a report: name and description, and who named it if that was not the one who asks now."""
        preset = f" ({PRESET})" if self.by == PRESET else ""
        return f"{self.cluster.name}{preset}: {self.cluster.about}"


def described(name: str | None, option: str = "--cluster") -> Described | None:
    """The cluster that `option` names, else the one of ``TREEATTN_CLUSTER``; None where neither does: the one
    rule of all commands. Raises as `description.load`."""
    if name:
        return Described(description.load(name), option)
    preset = os.environ.get(PRESET)
    try:
        return Described(description.load(preset), PRESET) if preset else None
    except ArgumentError as error:  # nobody typed it just now
        raise ArgumentError(f"{PRESET}: {error}") from None


def needed(name: str | None) -> Described:
    """`described` for a command that needs a cluster. Raises `ArgumentError` where there is none, too."""
    if (found := described(name)) is not None:
        return found
    known = ", ".join(description.shipped())
    raise ArgumentError(
        f"--cluster NAME: for which machine? One of {known}, or FILE.toml as treeattn calibrate writes it; "
        f"or set {PRESET}"
    )


def detect(comm: Communicator, root: Path = _ROOT) -> Topology:
    """Where the ranks are. root: of the file system that is read. Collective: the same on every rank."""
    groups = comm.nodes
    node = next(index for index, ranks in enumerate(groups) if comm.rank in ranks)
    return Topology(tuple(comm.allgather(Rank(comm.rank, node, sockets_of(root), _nics(root)))))


def sockets_of(root: Path = _ROOT) -> tuple[int, ...]:
    """Sockets of the cores that this process may run on; empty where the system does not say it of each."""
    cores = root / "sys/devices/system/cpu"
    found = {_number(cores / f"cpu{core}/topology/physical_package_id") for core in os.sched_getaffinity(0)}
    return () if -1 in found else tuple(sorted(found))


def _number(path: Path) -> int:
    """What a file says; -1 where it does not, as some virtual machines do."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return -1


def _nics(root: Path) -> int:
    """Network cards with a link: InfiniBand's, RoCE's and Slingshot's."""
    states = root.glob("sys/class/infiniband/*/ports/*/state")
    linked = {path.parents[2].name for path in states if "ACTIVE" in path.read_text()}
    return len(linked) + len(list(root.glob("sys/class/cxi/*")))
