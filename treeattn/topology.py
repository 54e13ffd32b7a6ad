"""Where the ranks of a job are: nodes, sockets, GPUs, what the launcher says; and as a cluster to simulate.

Nodes are MPI's shared-memory domains. Of sockets and GPUs is known what the system shows to a rank; what it
does not show is None or empty, and nothing is guessed.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from treeattn import comm as comm_
from treeattn.collectives.clusters import description
from treeattn.collectives.clusters.description import Cluster, Tier
from treeattn.collectives.clusters.placement import Placement, block
from treeattn.errors import ArgumentError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

__all__ = ["Rank", "Topology", "described", "detect"]

#: Whose prices stand in for those of a machine that nobody has measured: of one node, and of several.
ONE_NODE, SEVERAL_NODES = "laptop", "cpu-hdr200"

# What launchers say about place; values are shown as they are.
_LAUNCHERS = (
    "SLURM_JOB_NODELIST", "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN", "SLURM_NODEID",
    "SLURM_LOCALID", "SLURM_DISTRIBUTION", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_NODE_RANK",
    "PMI_RANK", "MPI_LOCALRANKID", "PBS_NODEFILE", "FLUX_TASK_LOCAL_ID", "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
)  # fmt: skip
_PACKAGE = "/sys/devices/system/cpu/cpu{}/topology/physical_package_id"


@dataclass(frozen=True, slots=True)
class Rank:
    """Where one rank is. sockets: those that it may run on; gpus: those that it sees; launcher: variables."""

    rank: int
    host: str
    node: int
    sockets: tuple[int, ...]
    cores: int
    gpus: tuple[str, ...]
    launcher: dict[str, str]

    @property
    def socket(self) -> int | None:
        """The one that it is bound to, if it is."""
        return self.sockets[0] if len(self.sockets) == 1 else None


@dataclass(frozen=True, slots=True)
class Topology:
    """Every rank's place, in order of ranks. links: of the GPUs of rank 0's node, as its driver says."""

    ranks: tuple[Rank, ...]
    links: str

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each node."""
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for rank in self.ranks:
            groups[rank.node].append(rank.rank)
        return tuple(tuple(groups[node]) for node in sorted(groups))

    def drawing(self) -> str:
        """Ranks on sockets on nodes, as text."""
        return "\n".join(line for ranks in self.nodes for line in self._node(ranks))

    def _node(self, ranks: Sequence[int]) -> list[str]:
        first = self.ranks[ranks[0]]
        gpus = dict.fromkeys(name for rank in ranks for name in self.ranks[rank].gpus)
        lines = [f"node {first.node}  {first.host}" + (f"  {', '.join(gpus)}" if gpus else "")]
        bound: defaultdict[int | None, list[int]] = defaultdict(list)
        for rank in ranks:
            bound[self.ranks[rank].socket].append(rank)
        for place in sorted(bound, key=lambda at: (at is None, at)):
            name = "any socket" if place is None else f"socket {place}"
            lines.append(f"  {name:10}  " + " ".join(f"[{rank}]" for rank in bound[place]))
        return lines

    def cluster(self) -> tuple[Cluster, Placement]:
        """As many nodes as there are, as wide as the widest, and the place of each rank. Prices are those
        of a shipped cluster: assumed, not measured."""
        nodes = self.nodes
        widest = max(map(len, nodes))
        if len(nodes) == 1:
            base = description.load(ONE_NODE)
            tiers: tuple[Tier, ...] = (structs.replace(base.tiers[0], joins=widest),)
        else:
            base = description.load(SEVERAL_NODES)
            tiers = tuple(
                structs.replace(tier, joins=joins)
                for tier, joins in zip(base.tiers, (widest, len(nodes)), strict=False)
            )
        about = f"{len(nodes)} x {widest} ranks as detected, with the prices of {base.name}"
        found = structs.replace(base, name="detected", about=about, tiers=tiers, cards=1)
        where = {
            rank: at * widest + slot for at, ranks in enumerate(nodes) for slot, rank in enumerate(ranks)
        }
        return found, tuple(where[rank] for rank in range(len(self.ranks)))

    def places_on(self, cluster: Cluster) -> Placement:
        """The place of each rank: by the nodes that they are on if those fit, else in blocks. Raises
        `ArgumentError` for more ranks than places."""
        nodes = self.nodes
        if len(nodes) * cluster.slots > cluster.places or max(map(len, nodes)) > cluster.slots:
            return block(cluster, len(self.ranks))
        where = {
            rank: node * cluster.slots + slot
            for node, ranks in enumerate(nodes)
            for slot, rank in enumerate(ranks)
        }
        return tuple(where[rank] for rank in range(len(self.ranks)))


def described(name: str | None) -> Cluster | None:
    """The cluster that is named, else the one of ``TREEATTN_CLUSTER``; None where neither is. Raises as
    `description.load`."""
    if name:
        return description.load(name)
    preset = os.environ.get("TREEATTN_CLUSTER")
    try:
        return description.load(preset) if preset else None
    except ArgumentError as error:  # nobody typed it just now
        raise ArgumentError(f"TREEATTN_CLUSTER: {error}") from None


def detect(comm: Intracomm) -> Topology:
    """Collective: the same on every rank."""
    groups = comm_.node_groups(comm)
    node = next(index for index, ranks in enumerate(groups) if comm.rank in ranks)
    cores = os.sched_getaffinity(0)
    launcher = {name: os.environ[name] for name in _LAUNCHERS if name in os.environ}
    here = Rank(comm.rank, socket.gethostname(), node, _sockets(cores), len(cores), _gpus(), launcher)
    links = comm.bcast(_nvidia("topo", "-m") if comm.rank == 0 else "")
    return Topology(tuple(comm.allgather(here)), links)


def _sockets(cores: set[int]) -> tuple[int, ...]:
    found = set()
    for core in cores:
        try:
            found.add(int(Path(_PACKAGE.format(core)).read_text()))
        except (OSError, ValueError):
            return ()
    return tuple(sorted(found))


def _gpus() -> tuple[str, ...]:
    listed = _nvidia("--query-gpu=index,name", "--format=csv,noheader")
    return tuple(f"GPU {line.strip().replace(', ', ': ', 1)}" for line in listed.splitlines() if line.strip())


def _nvidia(*words: Any) -> str:
    """What the driver's tool prints; nothing where there is none, or no GPU."""
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        done = subprocess.run(
            ["nvidia-smi", *words], capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.rstrip() if done.returncode == 0 else ""
