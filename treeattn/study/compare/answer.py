"""Is one scheme faster than another? Block against block, with an interval, corrected for many questions.

The schemes of a case are measured in turn within each repetition, so that what disturbs the machine meets
the blocks of one repetition alike; a ratio is therefore taken within it. Of their logarithms nothing is
assumed but that they lie symmetrically about their middle (Wilcoxon, "Individual comparisons by ranking
methods", 1945; Hodges and Lehmann, "Estimates of location based on rank tests", 1963). Where nothing
differs, 5 of 100 tables at most hold a verdict, however many schemes they have (Holm, "A simple sequentially
rejective multiple test procedure", 1979).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from treeattn.study.compare.schema import NULL, SUM, Key, Point

#: Repetitions below which no verdict at 95 percent confidence can come out.
FEWEST = 6
_MOST = 500  # of more blocks every second, third and so on is taken

Verdict = Literal["faster", "slower", "cannot be told apart"]


@dataclass(frozen=True, slots=True)
class Answer:
    """How one scheme compares with the baseline.

    ratio: of its time to the baseline's, with its own 95 % interval low to high (None below 6 blocks). p:
    of no difference, corrected for all answers of the case; verdict: by p at 5 %.
    """

    key: Key
    baseline: str
    ratio: float
    low: float | None
    high: float | None
    p: float
    verdict: Verdict
    blocks: int


def answers(points: Iterable[Point], series: str, baseline: str | None = None) -> list[Answer]:
    """Of the schemes of one case against the one that is labelled `baseline`, by default the library's sum
    over the same transport, in the order of their ratios; empty where it was not measured."""
    medians: dict[Key, dict[tuple[str, int, int], float]] = {}
    for point in points:
        if point.key.scheme != NULL and point.samples.get(series):
            block = (point.run, point.launch, point.repetition)
            medians.setdefault(point.key, {})[block] = float(np.median(point.samples[series]))
    found = []
    for key, times in medians.items():
        other = next((base for base in medians if _is_baseline(base, key, baseline)), key)
        if other == key:
            continue
        theirs = medians[other]
        shared = [b for b in sorted(times.keys() & theirs.keys()) if min(times[b], theirs[b]) > 0]
        logs = [math.log(times[block] / theirs[block]) for block in shared[:: 1 + len(shared) // _MOST]]
        if logs:
            found.append((key, other, logs))
    corrected = _holm([_p(logs) for _, _, logs in found])
    made = [_answer(*entry, p) for entry, p in zip(found, corrected, strict=True)]
    return sorted(made, key=lambda answer: answer.ratio)


def _is_baseline(base: Key, key: Key, baseline: str | None) -> bool:
    if baseline is None:
        return base.scheme == SUM and base.transport == key.transport
    return base.label == baseline


def _answer(key: Key, other: Key, logs: Sequence[float], p: float) -> Answer:
    middle, low, high = _location(logs)
    verdict: Verdict = "cannot be told apart" if p > 0.05 else "faster" if middle < 1 else "slower"
    return Answer(key, other.label, middle, low, high, p, verdict, len(logs))


def _signed_ranks(count: int) -> Any:
    """The chance of each sum of positive ranks, 0 to n (n + 1) / 2, if signs fall like coins."""
    chance = np.ones(1)
    for rank in range(1, count + 1):
        longer = np.zeros(len(chance) + rank)
        longer[: len(chance)] += chance / 2
        longer[rank:] += chance / 2
        chance = longer
    return chance


def _p(logs: Sequence[float]) -> float:
    """Two-sided, of Wilcoxon's signed ranks: the sum is the number of Walsh averages above 0, ties half."""
    walsh = _walsh(logs)
    above = float(np.sum(walsh > 0) + np.sum(walsh == 0) / 2)
    chance = np.cumsum(_signed_ranks(len(logs)))
    return min(1.0, 2 * float(chance[math.ceil(min(above, len(walsh) - above))]))


def _location(logs: Sequence[float]) -> tuple[Any, ...]:
    """Hodges' and Lehmann's estimate of the ratio, and its 95 % interval."""
    walsh = np.exp(np.sort(_walsh(logs)))
    chance = np.cumsum(_signed_ranks(len(logs)))
    cut = int(np.searchsorted(chance, 0.025, side="right"))  # P(sum < cut) <= 2.5 %
    ends = (None, None) if cut == 0 else (float(walsh[cut - 1]), float(walsh[-cut]))
    return float(np.median(walsh)), *ends


def _walsh(logs: Sequence[float]) -> Any:
    values = np.asarray(logs)
    first, second = np.triu_indices(len(values))
    return (values[first] + values[second]) / 2


def _holm(chances: Sequence[float]) -> list[float]:
    """Each times the number of those not smaller, and never below a smaller one's."""
    order = sorted(range(len(chances)), key=lambda at: chances[at])
    scaled = (min(1.0, chances[at] * (len(chances) - place)) for place, at in enumerate(order))
    corrected = dict(zip(order, itertools.accumulate(scaled, max), strict=True))
    return [corrected[at] for at in range(len(chances))]
