"""Prices of a machine from what probes took on it: those with which the simulator says the same.

The most probable prices, as logarithms, given wide beliefs around first guesses and measured logarithms, with
slopes from differences. Measurements far from the rest count less (Cauchy's weights, iterated: Holland and
Welsch, 1977), since on a machine with other work some always are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp
from typing import Any

import numpy as np
from msgspec import structs

from treeattn.collectives.clusters.description import Cluster, Executor, Protocol, Tier
from treeattn.collectives.clusters.placement import Placement
from treeattn.collectives.clusters.probes import Probe
from treeattn.collectives.clusters.simulate import simulate
from treeattn.collectives.traffic import Payload

__all__ = ["Residual", "fit", "left_out", "most_probable"]

#: Messages of so many bytes and more may cost another latency: eager, rendezvous, windows of TCP.
_STEPS = (4096, 16384, 65536)

_NOISE, _BELIEF = 0.05, 1.5  # standard deviations, of logarithms
_ITERATIONS, _LONGEST, _DIFFERENCE = 15, 1.0, 1e-3

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


def fit(
    shape: Cluster, places: Placement, record_bytes: int, measured: Mapping[Probe, float]
) -> tuple[Cluster, list[Residual]]:
    """`shape` with prices by which `measured` microseconds come out, and what is left over.

    Of `shape` tiers, places and the executor's name are kept. Raises `ValueError` for no measurements.
    """
    if not measured:
        raise ValueError("nothing was measured")
    guess = _first_guess(shape, record_bytes, measured)
    names, mean = list(guess), np.log(list(guess.values()))
    schedules = {probe: probe.schedule(len(places)) for probe in measured}

    def times(parameters: Any) -> Any:
        cluster = _priced(shape, dict(zip(names, np.exp(parameters), strict=True)))
        return np.log([
            simulate(schedules[probe], cluster, places, Payload(probe.records, record_bytes)).time
            if probe.groups else cluster.executors[cluster.executor].call
            for probe in measured
        ])  # fmt: skip

    def sloped(parameters: Any) -> tuple[Any, Any]:
        at = times(parameters)
        nudged = (times(parameters + step) for step in _DIFFERENCE * np.eye(len(mean)))
        return at, np.stack([(one - at) / _DIFFERENCE for one in nudged], axis=1)

    def noise(left: Any) -> Any:
        return np.diag(_NOISE**2 * (1 + (left / (2 * _NOISE)) ** 2))

    belief = _BELIEF**2 * np.eye(len(mean))
    found = most_probable(sloped, mean, belief, np.log(list(measured.values())), noise)
    residuals = [
        Residual(probe, took, exp(time))
        for (probe, took), time in zip(measured.items(), times(found).tolist(), strict=True)
    ]
    return _priced(shape, dict(zip(names, np.exp(found).tolist(), strict=True))), residuals


def left_out(
    shape: Cluster, places: Placement, record_bytes: int, measured: Mapping[Probe, float], parts: int = 4
) -> list[Residual]:
    """The errors of probes that a fit has not seen: each part of them is predicted from the other parts.

    Parameters and errors as of `fit`; the fit's own residuals are smaller than what it would do elsewhere.
    """
    found, probes = [], list(measured)
    for part in range(parts):
        held = probes[part::parts]
        rest = {probe: took for probe, took in measured.items() if probe not in held}
        cluster, _ = fit(shape, places, record_bytes, rest)
        for probe in held:
            payload = Payload(probe.records, record_bytes)
            took = cluster.executors[cluster.executor].call
            if probe.groups:
                took = simulate(probe.schedule(len(places)), cluster, places, payload).time
            found.append(Residual(probe, measured[probe], took))
    return found


def most_probable(
    times: Callable[[Any], tuple[Any, Any]],
    mean: Any,
    covariance: Any,
    measured: Any,
    noise: Callable[[Any], Any],
) -> Any:
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
