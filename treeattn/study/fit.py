"""Prices of a machine from what probes took on it: those with which the simulator says the same.

The most probable prices by `scipy.optimize.least_squares`: logarithms, given wide beliefs around first
guesses, and measured logarithms, of which those far from the rest count less (Cauchy's loss), since on a
machine with other work some always are. How sure predictions with these prices are is measured: each kind of
probes is predicted from the others.

What is measured are probes, small reductions over a few ranks: a scheme of the catalogue over some groups of
ranks at once, so it runs as all schedules run, and the simulator can say what it would take with any prices.
On each tier: one message there and back (the ping-pong of Hockney, 1994), all pairs at once, and a rank with
several partners in one round and in several: what a message costs its ends where many are under way.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from treeattn.collectives.catalog import build
from treeattn.collectives.clusters.description import Cluster, Executor, Protocol, Tier
from treeattn.collectives.clusters.placement import Placement
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.combinators import on_ranks, side_by_side
from treeattn.collectives.schedule import Payload, Round, Schedule
from treeattn.study import extra
from treeattn.study.intervals import MEDIAN

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


Numbers = NDArray[np.floating[Any]]

#: Messages of so many bytes and more may cost another latency: eager, rendezvous, windows of TCP.
_STEPS = (4096, 16384, 65536)

_NOISE, _BELIEF = 0.05, 1.5  # standard deviations, of logarithms
_FAR = 2.0  # standard deviations, from which on a measurement counts less
_ITERATIONS = 15

Prices = dict[str, float]


@dataclass(frozen=True, slots=True)
class Residual:
    """What a probe took, and what it takes with the fitted prices; microseconds."""

    probe: Probe
    measured: float
    fitted: float

    @property
    def error(self) -> float:
        """The error of the fit, relative to what was measured."""
        return self.fitted / self.measured - 1


class Fitted(NamedTuple):
    """A cluster with prices by which what was measured comes out, and what is left over.

    prices: by name, microseconds and GB/s; errors: of each, the standard error of its logarithm, while the
    others may be wrong too. left_out: of probes that the prices had not seen: each kind on each tier is
    predicted from the others. The cluster's `scatter` is what these miss.
    """

    cluster: Cluster
    prices: Prices
    errors: Prices
    residuals: list[Residual]
    left_out: list[Residual]


def fit(shape: Cluster, places: Placement, record_bytes: int, measured: Mapping[Probe, float]) -> Fitted:
    """`shape` with prices by which `measured` microseconds come out.

    Of `shape` tiers, places and the executor's name are kept. Raises `ValueError` for no measurements, and
    `MissingPackageError` without scipy.
    """
    if not measured:
        raise ValueError("nothing was measured")
    least_squares = extra("scipy.optimize").least_squares
    guess = _first_guess(shape, record_bytes, measured)
    names, mean = list(guess), np.log(list(guess.values()))
    schedules = {probe: probe.schedule(len(places)) for probe in measured}
    wanted = np.log(list(measured.values()))

    def prices(logs: Numbers) -> Prices:
        return dict(zip(names, np.exp(logs).tolist(), strict=True))

    def times(logs: Numbers, probes: Iterable[Probe] = measured) -> Numbers:
        cluster = _priced(shape, prices(logs))
        return np.log([
            simulate(schedules[probe], cluster, places, Payload(probe.records, record_bytes)).time
            if probe.groups else cluster.executors[cluster.executor].call
            for probe in probes
        ])  # fmt: skip

    def off(logs: Numbers) -> Numbers:
        """Standard deviations from what was measured, and from the first guess."""
        return np.concatenate([(times(logs) - wanted) / _NOISE, (logs - mean) / _BELIEF])

    robust = least_squares(off, mean, loss="cauchy", f_scale=_FAR, max_nfev=_ITERATIONS)
    found, weights = robust.x, 1 / np.sqrt(1 + (robust.fun / _FAR) ** 2)
    near = least_squares(lambda logs: weights * off(logs), found, max_nfev=1)  # linear from here on
    left_out: list[Residual] = []
    for held in _kinds(measured):
        rest = np.array([probe not in held for probe in measured] + [True] * len(names))
        moved = found - np.linalg.lstsq(near.jac[rest], near.fun[rest])[0]
        left_out += _residuals(measured, held, times(moved, held))
    missed = [abs(np.log(one.fitted / one.measured)) for one in left_out]
    scatter = max(_NOISE, float(np.median(missed)) / MEDIAN if missed else 0.0)
    noisy = np.where(np.arange(len(near.fun)) < len(measured), _NOISE / scatter, 1.0)[:, None] * near.jac
    errors = np.sqrt(np.diag(np.linalg.inv(noisy.T @ noisy))).tolist()
    cluster = structs.replace(_priced(shape, prices(found)), scatter=round(scatter, 3))
    residuals = _residuals(measured, measured, times(found))
    return Fitted(cluster, prices(found), dict(zip(names, errors, strict=True)), residuals, left_out)


def _residuals(measured: Mapping[Probe, float], probes: Iterable[Probe], logs: Numbers) -> list[Residual]:
    times = np.exp(logs).tolist()
    return [Residual(probe, measured[probe], time) for probe, time in zip(probes, times, strict=True)]


def _kinds(measured: Iterable[Probe]) -> list[list[Probe]]:
    """Probes of one kind on one tier, where a tier has several kinds."""
    found: defaultdict[tuple[str, str], list[Probe]] = defaultdict(list)
    for probe in measured:
        found[probe.tier, probe.kind].append(probe)
    per_tier = Counter(tier for tier, _ in found)
    return [held for (tier, _), held in found.items() if per_tier[tier] > 1]


def _first_guess(shape: Cluster, record_bytes: int, measured: Mapping[Probe, float]) -> Prices:
    """From the empty call, and from the smallest and the largest ping-pong of each tier."""
    call, name = next((took for probe, took in measured.items() if not probe.groups), 1.0), shape.executor
    guess = {f"{name}.call": call, f"{name}.round": 0.02 * call + 0.1, f"{name}.merge_bandwidth": 10.0}
    for tier in shape.tiers:
        trips = sorted(
            (probe.records * record_bytes, took / 2)
            for probe, took in measured.items()
            if (probe.kind, probe.tier) == ("ping-pong", tier.name)
        )
        if not trips:
            continue
        (small, soon), (large, late) = trips[0], trips[-1]
        latency = max(soon - call / 2, 0.2 * soon)
        bandwidth = 1e-3 * max(large - small, 1) / max(late - soon, 0.1 * late)
        guess[f"{tier.name}.latency"] = latency
        guess[f"{tier.name}.overhead"] = 0.1 * latency
        guess[f"{tier.name}.bandwidth"] = bandwidth
        guess[f"{tier.name}.shared_gap"] = 0.03 * latency
        guess[f"{tier.name}.shared_bandwidth"] = 10 * bandwidth
        guess |= {f"{tier.name}.more from {size}": 0.05 * latency for size in _STEPS}
    return guess


def _priced(shape: Cluster, prices: Prices) -> Cluster:
    name = shape.executor
    executor = Executor(prices[f"{name}.call"], prices[f"{name}.round"], prices[f"{name}.merge_bandwidth"])
    tiers = tuple(_priced_tier(tier, prices) for tier in shape.tiers)
    return structs.replace(shape, tiers=tiers, executors={name: executor})


def _priced_tier(tier: Tier, prices: Prices) -> Tier:
    """As it is where nothing of it was measured."""
    if f"{tier.name}.latency" not in prices:
        return tier
    latency = prices[f"{tier.name}.latency"]
    sums = np.cumsum([prices[f"{tier.name}.more from {size}"] for size in _STEPS]).tolist()
    protocols = tuple(
        Protocol(f"from-{size}", size, latency + more) for size, more in zip(_STEPS, sums, strict=True)
    )
    return Tier(
        tier.name,
        tier.joins,
        latency,
        prices[f"{tier.name}.overhead"],
        0.0,
        prices[f"{tier.name}.bandwidth"],
        protocols=protocols,
        shared_gap=prices[f"{tier.name}.shared_gap"],
        shared_bandwidth=prices[f"{tier.name}.shared_bandwidth"],
    )
