"""Prices fitted to measurements, and what is left over learned from rows that are like the one predicted.

The most probable prices of the simulator, given normal beliefs (`prices`) and measured logarithms; what they
leave over is interpolated by resemblance of rows, a Gaussian process: as Kennedy and O'Hagan, "Bayesian
calibration of computer models", 2001. A run that is predicted enters with its given measurements alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from treeattn.collectives.clusters.description import Cluster
from treeattn.collectives.clusters.fit import most_probable
from treeattn.partial import Array
from treeattn.study.published.measurements import Measurement, Run
from treeattn.study.published.prices import Prices

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
