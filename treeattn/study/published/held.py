"""Runs held out one after the other, predicted from all others and a few measurements of their own, and the
score.

Of a held run are given, where it has them: recursive doubling nearest 256 bytes and at its largest size up
to 128 KiB, and the ring nearest 2 KiB. The library's own programs are asked first. Everything else is
predicted.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from treeattn.partial import Array
from treeattn.study.published.measurements import Measurement
from treeattn.study.published.prices import Fit
from treeattn.study.published.rounds import sums

SMALL, LARGE, OF_RING = 256, 128 << 10, 2048


class Predicted(NamedTuple):
    """A row, its predicted microseconds, and those of the two-parameter model."""

    row: Measurement
    microseconds: float
    two_parameters: float

    @property
    def error(self) -> float:
        """As a fraction of what was measured."""
        return abs(self.microseconds / self.row.microseconds - 1)


class Score(NamedTuple):
    """Errors as fractions: median, 90th percentile; the fraction of rows within 25 percent; of how many."""

    median: float
    p90: float
    within_25: float
    rows: int


def given(rows: Sequence[Measurement]) -> list[Measurement]:
    """What is known of a run that is held."""
    own = sorted(
        (row for row in rows if row.predicted and row.stack == "mpi"), key=lambda row: row.preference
    )
    found = []
    whole = _of_one_program([row for row in own if "doubling" in row.algorithm])
    if whole:
        found = [min(whole, key=lambda row: abs(math.log(row.bytes / SMALL)))]
        if upto := [row for row in whole if row.bytes <= LARGE and row not in found]:
            found.append(max(upto, key=lambda row: row.bytes))
    ring = _of_one_program([row for row in own if "ring" in row.algorithm])
    return found + ([min(ring, key=lambda row: abs(math.log(row.bytes / OF_RING)))] if ring else [])


def _of_one_program(rows: Sequence[Measurement]) -> list[Measurement]:
    return [row for row in rows if row.algorithm == rows[0].algorithm]


def held_out(
    known: Sequence[Measurement], held: Sequence[Measurement], blind: bool = False
) -> Iterator[Predicted]:
    """Each run of `held`, predicted from the rows of `known` that are of other runs, and from what is
    given of it (nothing if `blind`)."""
    runs = dict.fromkeys(row.run for row in held)
    for run in runs:
        rows = [row for row in held if row.run == run]
        others = [row for row in known if (row.run.name, row.run.ranks) != (run.name, run.ranks)]
        told = [] if blind else given(rows)
        asked = [row for row in rows if row.predicted and row not in told]
        if not asked:
            continue
        times = Fit([*others, *told], rows).predict(asked)
        simple = two_parameters(others, told, asked)
        for row, time, other in zip(asked, times, simple, strict=True):
            yield Predicted(row, float(time), float(other))


def score(errors: Sequence[float]) -> Score:
    """Of errors as fractions."""
    if not errors:
        return Score(math.nan, math.nan, math.nan, 0)
    within = sum(error <= 0.25 for error in errors) / len(errors)
    return Score(float(np.median(errors)), float(np.quantile(errors, 0.9)), within, len(errors))


def ratio_error(rows: Sequence[Predicted], two: bool = False) -> float:
    """Median error of the ratio of two schemes' times, over all pairs of a run and size."""
    errors = []
    pairs = (pair for several in _alike(rows) for pair in itertools.combinations(several, 2))
    for one, other in pairs:
        if one.row.scheme == other.row.scheme:
            continue
        times = [row.two_parameters if two else row.microseconds for row in (one, other)]
        errors.append(abs(times[0] / times[1] / (one.row.microseconds / other.row.microseconds) - 1))
    return float(np.median(errors)) if errors else math.nan


def winners(rows: Sequence[Predicted]) -> tuple[int, int]:
    """(cases where the program predicted fastest is the fastest or within 5 percent of it, cases): runs
    and sizes with more than one scheme."""
    named = cases = 0
    for several in _alike(rows):
        if len({row.row.scheme for row in several}) > 1:
            chosen = min(several, key=lambda row: row.microseconds)
            cases += 1
            named += chosen.row.microseconds <= 1.05 * min(row.row.microseconds for row in several)
    return named, cases


def _alike(rows: Sequence[Predicted]) -> list[list[Predicted]]:
    cases: defaultdict[tuple[object, ...], list[Predicted]] = defaultdict(list)
    for row in rows:
        cases[row.row.run, row.row.bytes].append(row)
    return list(cases.values())


def two_parameters(
    known: Sequence[Measurement], told: Sequence[Measurement], asked: Sequence[Measurement]
) -> Array:
    """Microseconds by the model to be beaten: rounds times a latency plus bytes times a price (Hockney,
    1994). Both from what is told of the run, by least relative squares; from all known runs of the machine,
    or of all machines, where fewer than two are told."""
    system = asked[0].run.system
    same = [row for row in known if row.run.system == system and row.predicted]
    rows = told if len(told) > 1 else same or [row for row in known if row.predicted]
    features, times = _features(rows), np.array([row.microseconds for row in rows])
    found, *_ = np.linalg.lstsq(features / times[:, None], np.ones(len(rows)), rcond=None)
    return np.asarray(np.maximum(_features(asked) @ found, 1e-3))


def _features(rows: Sequence[Measurement]) -> Array:
    return np.array([(one.all_rounds, one.sent) for one in map(sums, rows)])
