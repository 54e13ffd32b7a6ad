"""What a machine looks like to messages: tiers from the inside out, their prices, who shares which port.

A cluster is a TOML file. Ten lines of one:

    name = "two-tiers"
    about = "nodes of 8 ranks, one network card for each"
    node = "node"                   # the tier whose ranks share network cards
    cards = 8
    [[tiers]]
    name = "node"
    joins = 8                       # ranks; further out: units of the tier before
    latency = 1.0                   # microseconds under way
    overhead = 0.25                 # microseconds of processor at each end
    gap = 0.05                      # microseconds between two messages through one port
    bandwidth = 100.0               # GB/s each way

The model is LogGP (Alexandrov et al., SPAA 1995) with ports. Each shipped file says where its numbers are
from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib import resources
from math import prod
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from treeattn.collectives.catalog import EXECUTORS
from treeattn.errors import ArgumentError

Count = Annotated[int, Meta(ge=1, le=1 << 20)]
Microseconds = Annotated[float, Meta(ge=0, le=1e12)]
Rate = Annotated[float, Meta(ge=1e-9, le=1e12)]
Name = Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9_-]*$")]
Deviation = Annotated[float, Meta(ge=0, le=10)]  # standard, of a logarithm


class _Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Read from TOML; a name that is not a field is an error."""


class Protocol(_Data, frozen=True):
    """How messages of at least `from_bytes` bytes go: they cost another latency, and perhaps bandwidth.

    waits: the sender begins once the receiver is there (rendezvous), as most MPI libraries do for long ones.
    """

    name: str
    from_bytes: Annotated[int, Meta(ge=0)]
    latency: Microseconds
    bandwidth: Rate | None = None
    waits: bool = False


class Tier(_Data, frozen=True):
    """A level of the machine: `joins` units of the level within it, or so many ranks, and what a message
    costs.

    latency, overhead (at each end) and gap in microseconds, bandwidth in GB/s each way. read_latency,
    read_bandwidth: where a receiver that fetches gets other ones than a sender that stores. mesh: every
    pair of ranks has a link of its own. taper: an outer tier's uplink from each unit has the bandwidth of
    its cards divided by this; 0 is a network without any such limit. shared_gap, shared_bandwidth: of what
    all messages within a unit of the tier go through one after the other, such as a bus, or the cores of a
    machine that emulates several. assumed: fields that were neither measured nor published.
    """

    name: Name
    joins: Count
    latency: Microseconds
    overhead: Microseconds
    gap: Microseconds
    bandwidth: Rate
    read_latency: Microseconds | None = None
    read_bandwidth: Rate | None = None
    mesh: bool = False
    taper: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    shared_gap: Microseconds = 0.0
    shared_bandwidth: Rate | None = None
    protocols: tuple[Protocol, ...] = ()
    assumed: tuple[str, ...] = ()


class Executor(_Data, frozen=True):
    """What running a step costs besides messages: microseconds for the call, for each round in which a rank
    has something to do, as much again where it has messages between nodes, and for each message; GB/s at
    which arriving bytes are merged.

    pulls: receivers fetch, so a tier's read prices count. within: the tier that it cannot leave. assumed:
    as of a tier.
    """

    call: Microseconds
    round: Microseconds
    merge_bandwidth: Rate
    message: Microseconds = 0.0
    far_round: Microseconds = 0.0
    pulls: bool = False
    within: str = ""
    assumed: tuple[str, ...] = ()


class Link(msgspec.Struct, frozen=True):
    """What one message of a known size costs on a tier: microseconds, and microseconds for each byte. source:
    the tier's field that the latency is of."""

    latency: float
    overhead: float
    gap: float
    byte: float
    waits: bool
    source: str = "latency"


class Cluster(_Data, frozen=True, dict=True):
    """A machine: tiers from the inside out, network cards of a node, executors by name.

    scatter: standard deviation of the logarithm of what was measured over what was predicted, of schedules
    that no price was fitted to, each by itself; None where it is not known. drift: likewise of all together,
    by another time.
    """

    name: Name
    about: str
    node: str
    tiers: Annotated[tuple[Tier, ...], Meta(min_length=1)]
    executors: Annotated[dict[str, Executor], Meta(min_length=1)]
    executor: str
    cards: Count = 1
    memory: Rate | None = None  # GB/s that one rank reads its keys and values at
    scatter: Deviation | None = None
    drift: Deviation = 0.0
    assumed: tuple[str, ...] = ()

    @cached_property
    def places(self) -> int:
        """How many ranks fit on the whole cluster."""
        return prod(tier.joins for tier in self.tiers)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Ranks of a unit of each tier."""
        return tuple(prod(tier.joins for tier in self.tiers[: at + 1]) for at in range(len(self.tiers)))

    @cached_property
    def node_tier(self) -> int:
        """Index of the tier whose unit is a node."""
        return [tier.name for tier in self.tiers].index(self.node)

    @cached_property
    def slots(self) -> int:
        """How many ranks fit on a node."""
        return self.widths[self.node_tier]

    def tier_between(self, one: int, other: int) -> int:
        """Index of the innermost tier that holds both places."""
        tier = 0
        while one // self.widths[tier] != other // self.widths[tier]:
            tier += 1
        return tier

    def link(self, tier: int, size: float, pulls: bool = False) -> Link:
        """What a message of `size` bytes costs on the tier of that index."""
        prices = self.tiers[tier]
        latency, bandwidth, waits, source = prices.latency, prices.bandwidth, False, "latency"
        if pulls and prices.read_latency is not None:
            latency, source = prices.read_latency, "read_latency"
        if pulls:
            bandwidth = prices.read_bandwidth or bandwidth
        for step in prices.protocols:
            if size >= step.from_bytes:
                latency, waits, source = step.latency, step.waits, "protocols"
                bandwidth = step.bandwidth or bandwidth
        return Link(latency, prices.overhead, prices.gap, 1e-3 / bandwidth, waits, source)

    def shared(self, tier: int, size: float) -> float:
        """Microseconds for which a message of `size` bytes takes what all messages of the tier share."""
        prices = self.tiers[tier]
        return prices.shared_gap + (size * 1e-3 / prices.shared_bandwidth if prices.shared_bandwidth else 0.0)

    def executor_for(self, places: Sequence[int], wanted: str | None = None) -> str:
        """Name of the executor that runs a schedule of ranks at these places: the one that is wanted, or the
        file's own.

        As a `Decoder` does, shared memory gives way to messages alone where every node has one rank, and
        peer memory to peer memory with NCCL where ranks are further apart than it reaches. Raises
        `ArgumentError` for one without prices.
        """
        name = wanted or self.executor
        if name == "slots" and not wanted and len({place // self.slots for place in places}) == len(places):
            name = "program" if "program" in self.executors else name
        if name in self.executors and (within := self.executors[name].within):
            width = self.widths[[tier.name for tier in self.tiers].index(within)]
            name = "peer_nccl" if len({place // width for place in places}) > 1 else name
        if name not in self.executors:
            known = ", ".join(self.executors)
            raise ArgumentError(f"{self.name}: executors: there is no {name!r}; choose from {known}")
        return name


_SHIPPED = resources.files(__package__)


def shipped() -> list[str]:
    """Names of the clusters that come with the package."""
    return sorted(file.name[:-5] for file in _SHIPPED.iterdir() if file.name.endswith(".toml"))


def load(name: str | Path) -> Cluster:
    """A shipped cluster by name, or one from a file that ends in .toml. Raises `ArgumentError` that names the
    file, the key and the remedy.

    >>> cluster = load("laptop")
    >>> cluster.name, cluster.places
    ('laptop', 8)
    """
    text = str(name)
    if not text.endswith(".toml") and text not in shipped():
        raise ArgumentError(
            f"cluster {text!r}: no such cluster; take one of {', '.join(shipped())}, or FILE.toml"
        )
    file = Path(name) if text.endswith(".toml") else _SHIPPED / f"{text}.toml"
    try:
        cluster = msgspec.toml.decode(file.read_bytes(), type=Cluster)
    except OSError as error:
        raise ArgumentError(f"{text}: cannot be read ({error.strerror})") from None
    except msgspec.ValidationError as error:
        raise ArgumentError(f"{text}: {error}; write it as the shipped files have it") from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"{text}: not TOML: {error}") from None
    for wrong in _contradictions(cluster):
        raise ArgumentError(f"{text}: {wrong}")
    return cluster


def _contradictions(cluster: Cluster) -> Iterator[str]:
    """What types cannot say: the key, what is wrong with it, and the remedy."""
    names = [tier.name for tier in cluster.tiers]
    known = ", ".join(names)
    if not cluster.about.isprintable():
        yield f"about: {cluster.about!r:.60} is no line of text: write one"
    if len(set(names)) < len(names):
        yield f"tiers: two have the same name ({known}); rename one"
    if cluster.node not in names:
        yield f"node: no tier is called {cluster.node!r}; take one of {known}"
        return
    for name, executor in cluster.executors.items():
        if name not in EXECUTORS:
            yield f"executors: there is no executor {name!r}; name those of {', '.join(EXECUTORS)}"
        if executor.within and executor.within not in names:
            yield f"executors.{name}.within: no tier is called {executor.within!r}; take one of {known}"
    if cluster.executor not in cluster.executors:
        of = ", ".join(cluster.executors)
        yield f"executor: no [executors.{cluster.executor}]; take one of {of}"
    if cluster.slots % cluster.cards:
        yield (
            f"cards: {cluster.cards} cards are not shared evenly by the {cluster.slots} ranks of a node; "
            "take a divisor"
        )
    parts: tuple[Cluster | Tier | Executor, ...] = (cluster, *cluster.tiers, *cluster.executors.values())
    for part in parts:
        for field in part.assumed:
            if field == "assumed" or field not in part.__struct_fields__:
                yield f"assumed: no key beside it is {field!r}; name those that are"
    for tier in cluster.tiers:
        starts = [step.from_bytes for step in tier.protocols]
        if starts != sorted(set(starts)):
            yield f"tiers ({tier.name}): protocols: from_bytes must grow; sort them"
