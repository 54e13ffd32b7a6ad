"""Prices of a machine from what probes took on it: those with which the simulator says the same.

The most probable prices, as logarithms, given wide beliefs around first guesses and measured logarithms, with
slopes from differences. Measurements far from the rest count less (Cauchy's weights, iterated: Holland and
Welsch, 1977), since on a machine with other work some always are. Standard errors are those of the posterior
near its maximum, with as much noise as what is left over of probes that the prices had not seen.

What is measured are probes, small reductions over a few ranks: a scheme of the catalogue over some groups of
ranks at once, so it runs as all schedules run, and the simulator can say what it would take with any prices.
On each tier: one message there and back (the ping-pong of Hockney, 1994), all pairs at once, and a rank with
several partners in one round and in several: what a message costs its ends where many are under way.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import exp
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from treeattn.collectives.catalog import build
from treeattn.collectives.clusters.description import Cluster, Executor, Protocol, Tier
from treeattn.collectives.clusters.placement import Placement
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.clusters.uncertainty import MEDIAN, prices
from treeattn.collectives.combinators import on_ranks, side_by_side
from treeattn.collectives.schedule import Round, Schedule
from treeattn.collectives.traffic import Payload

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
_ITERATIONS, _LONGEST, _DIFFERENCE = 15, 1.0, 1e-3
_LEAST_CORRELATION, _TINY = 0.02, 1e-30

Prices = dict[str, float]


@dataclass(frozen=True, slots=True)
class Residual:
    """What a probe took, and what it takes with the fitted prices; microseconds."""

    probe: Probe
    measured: float
    fitted: float

    @property
    def error(self) -> float:
        """Of the fit, relative to what was measured."""
        return self.fitted / self.measured - 1


class Fitted(NamedTuple):
    """A cluster with prices by which what was measured comes out, how sure they are, and what is left over.

    left_out: of probes that the prices had not seen: each kind on each tier is predicted from the others.
    """

    cluster: Cluster
    residuals: list[Residual]
    left_out: list[Residual]


def fit(shape: Cluster, places: Placement, record_bytes: int, measured: Mapping[Probe, float]) -> Fitted:
    """`shape` with prices by which `measured` microseconds come out.

    Of `shape` tiers, places and the executor's name are kept. Raises `ValueError` for no measurements.
    """
    if not measured:
        raise ValueError("nothing was measured")
    guess = _first_guess(shape, record_bytes, measured)
    names, mean = list(guess), np.log(list(guess.values()))
    schedules = {probe: probe.schedule(len(places)) for probe in measured}

    def priced(parameters: Numbers) -> Cluster:
        return _priced(shape, dict(zip(names, np.exp(parameters).tolist(), strict=True)))

    def times(parameters: Numbers, probes: Iterable[Probe] = measured) -> Numbers:
        cluster = priced(parameters)
        return np.log([
            simulate(schedules[probe], cluster, places, Payload(probe.records, record_bytes)).time
            if probe.groups else cluster.executors[cluster.executor].call
            for probe in probes
        ])  # fmt: skip

    def sloped(parameters: Numbers) -> tuple[Numbers, Numbers]:
        at = times(parameters)
        return at, _slopes(times, parameters, at)

    def noise(left: Numbers) -> Numbers:
        return np.diag(_NOISE**2 * (1 + (left / (2 * _NOISE)) ** 2))

    belief, wanted = _BELIEF**2 * np.eye(len(mean)), np.log(list(measured.values()))
    found = most_probable(sloped, mean, belief, wanted, noise)
    at, slopes = sloped(found)
    kept = np.diag(1 / np.diag(noise(wanted - at)))  # weights of the measurements
    unseen, held_out = [], []
    for held in _kinds(measured):
        rest = np.array([probe not in held for probe in measured])
        weighed = slopes[rest].T @ kept[np.ix_(rest, rest)]
        surprise = wanted[rest] - at[rest] + slopes[rest] @ (found - mean)
        known = weighed @ slopes[rest]
        moved = mean + np.linalg.solve(known + np.linalg.inv(belief), weighed @ surprise)
        predicted = times(moved, held).tolist()
        unseen += [Residual(p, measured[p], exp(time)) for p, time in zip(held, predicted, strict=True)]
        held_out.append(_HeldOut(np.log([measured[p] for p in held]) - predicted, slopes[~rest], known))
    scatter = _scatter(held_out, np.linalg.inv(belief))
    precision = (_NOISE / scatter) ** 2 * slopes.T @ kept @ slopes + np.linalg.inv(belief)
    covariance = np.linalg.inv(precision)
    residuals = [
        Residual(probe, took, exp(time))
        for (probe, took), time in zip(measured.items(), at.tolist(), strict=True)
    ]
    return Fitted(_with_errors(priced, found, covariance, scatter), residuals, unseen)


def _kinds(measured: Iterable[Probe]) -> list[list[Probe]]:
    """Probes of one kind on one tier, where a tier has several kinds."""
    found: defaultdict[tuple[str, str], list[Probe]] = defaultdict(list)
    for probe in measured:
        found[probe.tier, probe.kind].append(probe)
    per_tier = Counter(tier for tier, _ in found)
    return [held for (tier, _), held in found.items() if per_tier[tier] > 1]


class _HeldOut(NamedTuple):
    """Errors of a kind of probes that was left out, as logarithms; how they depend on prices; how precisely
    the others tell those, with noise of `_NOISE`."""

    errors: Numbers
    slopes: Numbers
    known: Numbers


def _scatter(held_out: Sequence[_HeldOut], belief: Numbers) -> float:
    """The standard deviation of what is missed of a schedule where prices are right, and no less than is
    believed: with it, and the errors that prices have without a kind, half of the errors of kinds left out
    are as large as they are. belief: precision of prices before anything was measured."""

    def too_large(scatter: float) -> bool:
        share = []
        for errors, slopes, known in held_out:
            covariance = np.linalg.inv((_NOISE / scatter) ** 2 * known + belief)
            together = slopes @ covariance @ slopes.T + scatter**2 * np.eye(len(errors))
            share += np.abs(np.linalg.solve(np.linalg.cholesky(together), errors)).tolist()
        return float(np.median(share)) < MEDIAN

    low, high = _NOISE, 10.0
    if not held_out or too_large(low):
        return low
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if too_large(middle) else (middle, high)
    return high


def _slopes(of: Callable[[Numbers], Numbers], parameters: Numbers, at: Numbers) -> Numbers:
    """Derivatives [values, parameters], by differences."""
    steps = _DIFFERENCE * np.eye(len(parameters))
    return np.stack([(of(parameters + step) - at) / _DIFFERENCE for step in steps], axis=1)


def _with_errors(
    priced: Callable[[Numbers], Cluster], found: Numbers, covariance: Numbers, scatter: float
) -> Cluster:
    """The cluster with standard errors of its prices, and correlations of more than a few percent."""

    def logs(parameters: Numbers) -> Numbers:
        return np.log([price.value for price in prices(priced(parameters)).values()])

    cluster = priced(found)
    names, slopes = list(prices(cluster)), _slopes(logs, found, logs(found))
    covariance = slopes @ covariance @ slopes.T
    deviations = np.sqrt(np.diag(covariance))
    together = np.round(covariance / np.maximum(np.outer(deviations, deviations), _TINY), 2)
    of_table: defaultdict[str, dict[str, float]] = defaultdict(dict)
    correlations: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for at, name in enumerate(names):
        table, _, field = name.partition(".")
        of_table[table][field] = round(float(deviations[at]), 3)
        for other in range(at):
            if abs(together[at, other]) >= _LEAST_CORRELATION:
                correlations[name][names[other]] = float(together[at, other])
    return structs.replace(
        cluster, scatter=round(scatter, 3), correlations=dict(correlations),
        tiers=tuple(structs.replace(t, errors=of_table[t.name] | t.errors) for t in cluster.tiers),
        executors={n: structs.replace(of, errors=of_table[n]) for n, of in cluster.executors.items()},
    )  # fmt: skip


def most_probable(
    times: Callable[[Numbers], tuple[Numbers, Numbers]],
    mean: Numbers,
    covariance: Numbers,
    measured: Numbers,
    noise: Callable[[Numbers], Numbers],
) -> Numbers:
    """The most probable parameters, given that they are thought to be normal, by Gauss and Newton.

    times: parameters -> logarithms of times, and their derivatives [times, parameters]. measured: logarithms.
    noise: what is left over -> covariance of what may be.
    """
    found = mean
    for _ in range(_ITERATIONS):
        at, slopes = times(found)
        left = noise(measured - at)
        surprise = measured - at + slopes @ (found - mean)
        gain = np.linalg.solve(slopes @ covariance @ slopes.T + left, surprise)
        step = mean + covariance @ slopes.T @ gain - found
        found = found + step * min(1.0, _LONGEST / max(np.abs(step).max(), 1e-12))
    return found


def _first_guess(shape: Cluster, record_bytes: int, measured: Mapping[Probe, float]) -> Prices:
    """From the empty call, and from the smallest and the largest ping-pong of each tier."""
    call = next((took for probe, took in measured.items() if not probe.groups), 1.0)
    guess = {"call": call, "round": 0.02 * call + 0.1, "merge": 1e-4}
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
        guess[f"{tier.name} latency"] = latency
        guess[f"{tier.name} overhead"] = 0.1 * latency
        guess[f"{tier.name} byte"] = max(late - soon, 0.1 * late) / max(large - small, 1)
        guess[f"{tier.name} shared gap"] = 0.03 * latency
        guess[f"{tier.name} shared byte"] = 0.1 * guess[f"{tier.name} byte"]
        guess |= {f"{tier.name} from {size}": 0.05 * latency for size in _STEPS}
    return guess


def _priced(shape: Cluster, prices: Mapping[str, float]) -> Cluster:
    name = shape.executor
    executor = Executor(call=prices["call"], round=prices["round"], merge_bandwidth=1e-3 / prices["merge"])
    tiers = tuple(_priced_tier(tier, prices) for tier in shape.tiers)
    return structs.replace(shape, tiers=tiers, executors={name: executor})


def _priced_tier(tier: Tier, prices: Mapping[str, float]) -> Tier:
    """As it is where nothing of it was measured."""
    if f"{tier.name} latency" not in prices:
        return tier
    latency = prices[f"{tier.name} latency"]
    steps = [prices[f"{tier.name} from {size}"] for size in _STEPS]
    sums = np.cumsum(steps).tolist()
    protocols = tuple(
        Protocol(f"from-{size}", size, latency + more) for size, more in zip(_STEPS, sums, strict=True)
    )
    return Tier(
        tier.name, tier.joins, latency, prices[f"{tier.name} overhead"], 0.0,
        1e-3 / prices[f"{tier.name} byte"], protocols=protocols,
        shared_gap=prices[f"{tier.name} shared gap"],
        shared_bandwidth=1e-3 / prices[f"{tier.name} shared byte"],
    )  # fmt: skip
