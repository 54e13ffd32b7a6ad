"""Where the ranks of a job are: nodes, sockets, devices, what the launcher says; and as a cluster.

Nodes are MPI's shared-memory domains, sockets what the cores that a rank may use belong to. What the system
does not show is None or empty, and nothing is guessed: sockets are a level of reductions only where each
rank is seen to be bound to one.
"""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from treeattn import hardware
from treeattn.backends.cuda import driver
from treeattn.collectives import build
from treeattn.collectives.clusters import description
from treeattn.collectives.clusters.description import Cluster
from treeattn.collectives.clusters.levels import nested
from treeattn.collectives.clusters.placement import Placement, block
from treeattn.collectives.runtime.communicator import Communicator
from treeattn.errors import ArgumentError, BackendError
from treeattn.hardware import ROOT, Devices, PciDevice
from treeattn.mpi import communicators

#: Names the cluster where no option does.
PRESET = "TREEATTN_CLUSTER"

#: Whose prices stand in for those of a machine that nobody has measured: of one node, of several, with
#: sockets.
ONE_NODE, SEVERAL_NODES, SOCKETS = "laptop", "cpu-hdr200", "dual-socket"
_SOCKET = "socket"  # the tier of that name in a cluster file

# What launchers say about place; values are shown as they are.
_LAUNCHERS = (
    "SLURM_JOB_NODELIST", "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN", "SLURM_NODEID",
    "SLURM_LOCALID", "SLURM_DISTRIBUTION", "SLURM_CPU_BIND", "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_NODE_RANK", "PMI_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID",
    "PBS_NODEFILE", "FLUX_TASK_LOCAL_ID", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
)  # fmt: skip

Group = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rank:
    """Where one rank is. sockets, numa: those whose cores it may run on; cards: names of the node's network
    cards; gpus: PCI addresses of those that its driver lets it use; launcher: variables."""

    rank: int
    host: str
    node: int
    sockets: tuple[int, ...]
    numa: tuple[int, ...]
    cores: int
    cards: tuple[str, ...]
    gpus: tuple[str, ...]
    launcher: dict[str, str]

    @property
    def socket(self) -> int | None:
        """The one that it is bound to, if it is."""
        return self.sockets[0] if len(self.sockets) == 1 else None


@dataclass(frozen=True, slots=True)
class Topology:
    """Every rank's place, in order of ranks. devices: of each node, where they were looked for."""

    ranks: tuple[Rank, ...]
    devices: tuple[Devices, ...] = ()

    @property
    def nodes(self) -> tuple[Group, ...]:
        """Ranks of each node."""
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

    @property
    def over_sockets(self) -> str:
        """The scheme over sockets, nodes and the network that `hierarchical` can be, as it is named. Empty
        where sockets are no level, and where ranks of a socket do not follow one another: no name says it."""
        if not self.sockets:
            return ""
        one = next(one for one in nested(*self.cluster()) if one.tier == _SOCKET)
        name = build(one.text, len(self.ranks), nodes=one.groups).name
        in_order = [rank for group in one.groups for rank in group] == list(range(len(self.ranks)))
        return name if in_order else ""

    def drawing(self) -> str:
        """Ranks and devices on sockets on nodes, and what joins GPUs, as text."""
        return "\n".join(line for node in range(len(self.nodes)) for line in self._node(node))

    def _node(self, node: int) -> Iterator[str]:
        ranks = [self.ranks[rank] for rank in self.nodes[node]]
        devices = self.devices[node] if self.devices else Devices()
        everything = (*devices.gpus, *devices.cards)
        yield f"node {node}  {ranks[0].host}"
        places = {rank.socket for rank in ranks} | {device.socket for device in everything}
        for place in sorted(places, key=lambda at: (at is None, at)):
            here = " ".join(f"[{rank.rank}]" for rank in ranks if rank.socket == place)
            name = "any socket" if place is None else f"socket {place}"
            yield f"  {name:10}  {here}".rstrip()
            for device in everything:
                if device.socket == place:
                    yield f"    {device.name:8}  {device.model}{_users(device, ranks)}"
        yield from _matrix(devices)

    def cluster(self) -> tuple[Cluster, Placement]:
        """As many nodes as there are, as wide as the widest, and the place of each rank; sockets are a tier
        where they are a level. Prices are those of a shipped cluster: assumed, not measured."""
        units, several = self._units(), len(self.nodes) > 1
        base = description.load(SOCKETS if self.sockets else SEVERAL_NODES if several else ONE_NODE)
        joins = [_widest(units), *([max(map(len, units))] if self.sockets else []), len(units)]
        slots = prod(joins[:-1])
        tiers = tuple(
            structs.replace(tier, joins=count)
            for tier, count in zip(base.tiers, joins if several else joins[:-1], strict=False)
        )
        seen = min(len(rank.cards) for rank in self.ranks)
        cards = max((count for count in range(1, seen + 1) if slots % count == 0), default=1)
        shape, each = " x ".join(map(str, reversed(joins))), f", {cards} cards a node" if cards > 1 else ""
        about = f"{shape} ranks{each} as detected, with the prices of {base.name}"
        found = structs.replace(base, name="detected", about=about, tiers=tiers, cards=cards)
        return description.wholly_assumed(found), _placed(units, joins[0], slots)

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

    def _units(self) -> tuple[tuple[Group, ...], ...]:
        """What is innermost, of each node: its sockets, or all of it."""
        return self.sockets or tuple((node,) for node in self.nodes)


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


def _users(device: PciDevice, ranks: Sequence[Rank]) -> str:
    """Which ranks their driver lets use it."""
    users = [str(rank.rank) for rank in ranks if device.address in rank.gpus]
    return f"  (for {' '.join(users)})" if users else ""


def _matrix(devices: Devices) -> Iterator[str]:
    """What joins GPUs to one another and to cards."""
    names = [device.name for device in (*devices.gpus, *devices.cards)]
    if len(names) < 2 or not devices.links:
        return
    width = max(map(len, names))
    for name, cells in (("links", names), *zip(names, devices.links, strict=False)):
        yield "  " + "  ".join(f"{cell:>{width}}" for cell in (f"{name:{width}}", *cells))


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


def detect(comm: Communicator, devices: bool = False, root: Path = ROOT) -> Topology:
    """Where the ranks are, and the `devices` of their nodes if they are asked for. root: of the file system
    that is read. Collective: the same on every rank."""
    groups = communicators.node_groups(comm)
    node = next(index for index, ranks in enumerate(groups) if comm.rank in ranks)
    cores = os.sched_getaffinity(0)
    here = Rank(
        comm.rank,
        socket.gethostname(),
        node,
        hardware.sockets(cores, root),
        hardware.numa_nodes(cores, root),
        len(cores),
        hardware.active_cards(root),
        _usable() if devices else (),
        {name: os.environ[name] for name in _LAUNCHERS if name in os.environ},
    )
    of_node = hardware.devices(root) if devices and comm.rank == groups[node][0] else None
    everyone = comm.allgather((here, of_node))
    found = tuple(of_node for _, of_node in everyone if of_node is not None)
    return Topology(tuple(rank for rank, _ in everyone), found)


def _usable() -> tuple[str, ...]:
    try:
        return driver.addresses()
    except BackendError:
        return ()
