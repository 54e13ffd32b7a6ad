"""The simulator's prices of machines that others measured: what is thought of them before, and how they are
fitted.

What the simulator says of schedules whose ranks all do alike is a sum over rounds, which needs no simulation:

    time = call * C  +  latency * l * sum over rounds of step(size) (1 + hop * reach + leave)
         + bytes * (b * sent (1 + load * log2 of the busiest link's) + g * merged)

A round's latency by size and by whether it leaves a group, bytes, merges and call are prices of a
`Cluster` (`Prices.cluster`). What a torus adds, hops and the load of its links, is a correction on top: the
score of runs held out needs it (docs/predicted.md). Capitals and small letters are prices of a machine and
its software; call, latency and bytes are factors of a run, which has its own state: the same machine took 6.0
or 2.2 microseconds a round on different days.
Everything that must be positive is a logarithm. What is thought beforehand is a normal distribution: prices
of machines resemble each other somewhat, factors of runs do when day, library and number of nodes are near.

`Fit` finds the most probable prices, given those beliefs and measured logarithms; what they leave over is
interpolated by resemblance of rows, a Gaussian process: as Kennedy and O'Hagan, "Bayesian calibration of
computer models", 2001. A run that is predicted enters with its given measurements alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from treeattn.collectives.clusters.description import Cluster, Executor, Protocol, Tier
from treeattn.collectives.clusters.fit import most_probable
from treeattn.partial import Array
from treeattn.study.published.measurements import Measurement, Run
from treeattn.study.published.rounds import STEPS, sums


class Prior(NamedTuple):
    """Of one price: where it is thought to lie, how far machines differ, how far all of them may be off.
    Half of the variance between machines is between families of libraries."""

    mean: float
    own: float
    shared: float


# Logarithms of microseconds (a round, a call) and of microseconds a byte, unless said otherwise.
_PRICES = {
    "round": Prior(math.log(2.5), 0.7, 0.35),
    "call": Prior(math.log(1.5), 0.6, 0.3),
    "sent": Prior(math.log(1e-4), 0.8, 0.4),
    "merged": Prior(math.log(1e-4), 0.6, 0.3),
    # logarithm of the factor that a size class has over the one before
    "step 0": Prior(0.2, 0.25, 0.3),
    "step 1": Prior(0.2, 0.25, 0.3),
    "step 2": Prior(0.5, 0.35, 0.3),
    # fractions, for each doubling of the hops or of the load of a link; for leaving a group
    "hop": Prior(0.2, 0.15, 0.075),
    "load": Prior(0.7, 0.4, 0.2),
    "leave": Prior(0.2, 0.15, 0.075),
}
#: Of a message's latency, so much is the processor's at each end: assumed, as `clusters.fit` guesses first.
_OVERHEAD = 0.1
#: Standard deviation of the logarithm of what these prices miss of runs that were held out: half are off by
#: 7.3 percent (docs/predicted.md).
_SCATTER = 0.108
#: Nobody measured messages within a node.
_OF_NODE = ("latency", "overhead", "gap", "bandwidth")
#: How far runs differ in the logarithm of their factors.
_FACTORS = {"latency": 0.6, "bytes": 0.35, "calls": 0.6}


class Prices:
    """The parameters of a set of measurements, and the times that they give."""

    def __init__(self, rows: Sequence[Measurement]) -> None:
        families = {(row.run.system, row.stack): (row.run.family, row.stack) for row in rows}
        stacks = list(families)
        runs = list(dict.fromkeys(row.run for row in rows))
        names: list[tuple[str, Any]] = [(price, stack) for price in _PRICES for stack in stacks]
        names += [(factor, run) for factor in _FACTORS for run in runs]
        self._at = {name: index for index, name in enumerate(names)}
        self.mean = np.array([_PRICES[name].mean if name in _PRICES else 0.0 for name, _ in names])
        self.covariance = np.zeros((len(names), len(names)))
        related = np.array([[families[one] == families[other] for other in stacks] for one in stacks])
        for price, prior in _PRICES.items():
            of = [self._at[price, stack] for stack in stacks]
            own = prior.own**2 * (np.eye(len(of)) + related) / 2
            self.covariance[np.ix_(of, of)] = prior.shared**2 + own
        alike = np.array([[resemblance(one, other) for other in runs] for one in runs])
        for factor, deviation in _FACTORS.items():
            of = [self._at[factor, run] for run in runs]
            self.covariance[np.ix_(of, of)] = deviation**2 * alike

    def sheet(self, rows: Sequence[Measurement]) -> Sheet:
        """The sums of rows, and where their parameters are."""
        found = [sums(row) for row in rows]
        where = {price: [self._at[price, (row.run.system, row.stack)] for row in rows] for price in _PRICES}
        where |= {factor: [self._at[factor, row.run] for row in rows] for factor in _FACTORS}
        return Sheet(
            np.array([one.rounds for one in found]), np.array([one.reach for one in found]),
            np.array([one.leaving for one in found]),
            np.array([[one.sent, one.sent_loaded, one.merged] for one in found]),
            {name: np.array(index) for name, index in where.items()}, len(self._at),
        )  # fmt: skip

    def cluster(self, parameters: Array, run: Run) -> Cluster:
        """The machine of a run over MPI, one rank on each node, in groups where the allocation is known."""
        of = {price: parameters[self._at[price, (run.system, "mpi")]] for price in _PRICES}
        state = {factor: parameters[self._at[factor, run]] for factor in _FACTORS}
        classes = np.exp(np.cumsum([0.0, *(of[f"step {at}"] for at in range(len(STEPS)))]))
        sizes = Counter(run.groups)
        widths = [("network", run.ranks, 0.0)]
        if sizes:
            widths = [("group", max(sizes.values()), 0.0), ("network", len(sizes), of["leave"])]
        bandwidth = 1e-3 / math.exp(state["bytes"] + of["sent"])
        tiers = [Tier("node", 1, 0.0, 0.0, 0.0, bandwidth, errors=dict.fromkeys(_OF_NODE))]
        for name, joins, more in widths:
            latencies = math.exp(state["latency"] + of["round"]) * classes * (1 + more)
            overhead = _OVERHEAD * float(latencies[0])
            first, *rest = (float(one) - 2 * overhead for one in latencies)
            protocols = tuple(
                Protocol(f"from-{size}", size, latency) for size, latency in zip(STEPS, rest, strict=True)
            )
            prices = first, overhead, 0.0, bandwidth
            tiers.append(
                Tier(name, joins, *prices, protocols=protocols, errors={"overhead": None, "gap": None})
            )
        call = math.exp(state["calls"] + of["call"])
        merging = 1e-3 / math.exp(state["bytes"] + of["merged"])
        about = f"{run.system} as PICO's run {run.name} on {run.ranks} nodes found it, over {run.library}"
        executors = {"program": Executor(call, 0.0, merging)}
        return Cluster(run.system, about, "node", tuple(tiers), executors, "program", scatter=_SCATTER)


class Sheet(NamedTuple):
    """Sums of several rows as columns."""

    rounds: Array
    reach: Array
    leaving: Array
    bytes: Array
    where: dict[str, Array]
    parameters: int

    def log_times(self, parameters: Array) -> tuple[Array, Array]:
        """Logarithms of microseconds, and their derivatives by the parameters."""
        p = {name: parameters[index] for name, index in self.where.items()}
        steps = [p[f"step {at}"] for at in range(len(STEPS))]
        classes = np.exp(np.cumsum([np.zeros_like(steps[0]), *steps], axis=0)).T
        per_class = self.rounds + p["hop"][:, None] * self.reach + p["leave"][:, None] * self.leaving
        unit = np.exp(p["latency"] + p["round"])[:, None] * classes
        latency = unit * per_class
        state = np.exp(p["bytes"])
        sent, loaded = (state * np.exp(p["sent"]) * self.bytes[:, column] for column in (0, 1))
        merged = state * np.exp(p["merged"]) * self.bytes[:, 2]
        call = np.exp(p["calls"] + p["call"])
        travelled = sent + p["load"] * loaded
        by = {
            "round": latency.sum(1), "latency": latency.sum(1), "call": call, "calls": call,
            "sent": travelled, "merged": merged, "bytes": travelled + merged,
            "hop": (unit * self.reach).sum(1), "leave": (unit * self.leaving).sum(1), "load": loaded,
        }  # fmt: skip
        by |= {f"step {at}": latency[:, at + 1 :].sum(1) for at in range(len(STEPS))}
        times = latency.sum(1) + call + travelled + merged
        slopes = np.zeros((len(times), self.parameters))
        for name, part in by.items():
            slopes[np.arange(len(times)), self.where[name]] += part / times
        return np.log(times), slopes


def resemblance(one: Run, other: Run) -> float:
    """Correlation of two runs' factors."""
    if one == other:
        return 1.0
    if one.system != other.system:
        return 0.0
    near = math.exp(-abs(math.log2(one.ranks / other.ranks)) / 2)
    return 0.2 + 0.3 * near + 0.3 * near * (one.day == other.day) + 0.1 * (one.library == other.library)


# Standard deviations, of logarithms.
_NOISE = 0.05
_OF_SCHEME = 0.10  # what a scheme has in common everywhere
_OF_PROGRAM = 0.15  # on one machine
_OF_DAY = 0.12
_OF_RUN = 0.05

_FAMILY = {"recursive_doubling": "whole", "bine": "whole", "ring": "ring"}


class Fit:
    """Fitted to `known` rows; `predict` takes rows of the runs among `rows`."""

    def __init__(self, known: Sequence[Measurement], rows: Sequence[Measurement]) -> None:
        self._known = list(known)
        self.prices = Prices([*known, *rows])
        sheet = self.prices.sheet(known)
        measured = np.log([row.microseconds for row in known])
        left = _likeness(known, known) + _NOISE**2 * np.eye(len(known))
        mean, covariance = self.prices.mean, self.prices.covariance
        self.parameters = most_probable(sheet.log_times, mean, covariance, measured, lambda _: left)
        times, _ = sheet.log_times(self.parameters)
        self._weights = np.linalg.solve(left, measured - times)

    def cluster(self, run: Run) -> Cluster:
        """What the simulator takes: the machine of a run over MPI, as it was then."""
        return self.prices.cluster(self.parameters, run)

    def predict(self, rows: Sequence[Measurement]) -> Array:
        """Microseconds of each row. Their own times are not looked at."""
        times, _ = self.prices.sheet(rows).log_times(self.parameters)
        return np.asarray(np.exp(times + _likeness(rows, self._known) @ self._weights))


def _likeness(some: Sequence[Measurement], others: Sequence[Measurement]) -> Array:
    """Covariance of what prices leave over: rows of one kind of schedule, of sizes and numbers of ranks
    near each other (e-folding at about 8 times), the more the same machine, program, day and run they
    have."""

    def same(of: Callable[[Measurement], object]) -> Array:
        codes: dict[object, int] = {}
        left, right = ([codes.setdefault(of(row), len(codes)) for row in rows] for rows in (some, others))
        return np.equal.outer(left, right).astype(float)

    def near(of: Callable[[Measurement], float]) -> Array:
        left, right = (np.log2([of(row) for row in rows], dtype=float) for rows in (some, others))
        return np.exp(-(((left.reshape(-1, 1) - right.reshape(1, -1)) / 3) ** 2) / 2)

    sizes, ranks = near(lambda row: row.bytes), near(lambda row: row.run.ranks)
    machine, stack, run = same(lambda r: r.run.system), same(lambda r: r.stack), same(lambda r: r.run)
    kind = same(lambda row: _FAMILY.get(row.scheme, "halves")) * stack
    day, program = same(lambda r: (r.run.system, r.run.day)), same(lambda r: r.algorithm)
    of_scheme = _OF_SCHEME**2 * ranks * (0.5 + 0.5 * machine)
    library = same(lambda row: row.run.family)
    of_program = _OF_PROGRAM**2 * ranks * np.maximum(machine, library / 2) * (0.3 + 0.7 * program)
    of_day = _OF_DAY**2 * day
    return sizes * (kind * (of_scheme + of_program + of_day) + _OF_RUN**2 * run * stack)
