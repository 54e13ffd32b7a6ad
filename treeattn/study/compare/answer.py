"""Is one scheme faster than another? Block against block, with an interval, corrected for many questions.

The schemes of a case are measured in turn within each repetition, so that what disturbs the machine meets
the blocks of one repetition alike; a ratio is therefore taken within it. Of their logarithms nothing is
assumed but that they lie symmetrically about their middle (Wilcoxon, "Individual comparisons by ranking
methods", 1945; Hodges and Lehmann, "Estimates of location based on rank tests", 1963). Where nothing
differs, 5 of 100 tables at most hold a verdict, however many schemes they have (Holm, "A simple sequentially
rejective multiple test procedure", 1979).

Who looks at the answer to decide whether to go on must pay for each look (Armitage, McPherson and Rowe,
"Repeated significance tests on accumulating data", 1969). So where blocks end with the answer, an answer is
of the first 8, 16, 32 .. blocks alone, and the n-th look is tested at a share 1 / (n (n + 1)) of the 5 %: all
shares together are the whole, so whenever a measurement ends, and for whatever reason, 5 of 100 tables at
most hold a verdict where nothing differs.

Blocks of one launch share what only a launch changes, such as where ranks were put, so many blocks do not
make up for few launches (Hunold and Carpen-Amarie, "Reproducible MPI benchmarking is still not as easy as you
think", TPDS 27(12), 2016). Where one launch alone says the opposite of all together, there is no verdict.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from treeattn.study.compare.schema import NULL, SUM, Key, Point

#: Repetitions below which no verdict at 95 percent confidence can come out.
FEWEST = 6
_MOST = 500  # of more blocks every second, third and so on is taken
#: Blocks after which it is looked whether the answer is there; nothing is decided between two looks.
LOOKS = tuple(8 << look for look in range(7))

Verdict = Literal["faster", "slower", "cannot be told apart"]
UNTOLD: Verdict = "cannot be told apart"


@dataclass(frozen=True, slots=True)
class Answer:
    """How one scheme compares with the baseline.

    ratio: of its time to the baseline's, with its own 95 % interval low to high (None below 6 blocks). p:
    of no difference, corrected for all answers of the case and for all looks; verdict: by p at 5 %, and none
    where launches disagree. blocks, launches: that it is of.
    """

    key: Key
    baseline: str
    ratio: float
    low: float | None
    high: float | None
    p: float
    verdict: Verdict
    blocks: int
    launches: int
    disagree: bool


def answers(
    points: Iterable[Point], series: str, baseline: str | None = None, early: bool = False
) -> list[Answer]:
    """Of the schemes of one case against the one that is labelled `baseline`, by default the library's sum
    over the same transport, in the order of their ratios; empty where it was not measured.

    early: blocks may have ended with the answer, so it is that of the last of `LOOKS`.
    """
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
        shared = [b for b in times if b in theirs and min(times[b], theirs[b]) > 0]
        logs = [math.log(times[block] / theirs[block]) for block in shared]
        if logs:
            parts = {
                launch: [log for log, b in zip(logs, shared, strict=True) if b[1] == launch]
                for launch in {block[1] for block in shared}
            }
            found.append((key, other, parts.values(), *(_looked(logs) if early else _at_once(logs))))
    corrected = _holm([p for *_, p in found])
    made = [_answer(*entry[:-1], p) for entry, p in zip(found, corrected, strict=True)]
    return sorted(made, key=lambda answer: answer.ratio)


def _at_once(logs: list[float]) -> tuple[list[float], float, float]:
    """What an answer is of, at which level, and its p."""
    logs = logs[:: 1 + len(logs) // _MOST]
    return logs, 0.05, _p(logs)


def _looked(logs: list[float]) -> tuple[list[float], float, float]:
    """Likewise of the last look, if there was one; p is the least of all looks, each by its share."""
    looks = [look for look in LOOKS if look <= len(logs)]
    shares = [1 / (n * (n + 1)) for n in range(1, len(looks) + 1)]
    if not looks:
        return logs, 0.0, 1.0
    p = min(_p(logs[:look]) / share for look, share in zip(looks, shares, strict=True))
    return logs[: looks[-1]], 0.05 * shares[-1], min(1.0, p)


def _is_baseline(base: Key, key: Key, baseline: str | None) -> bool:
    if baseline is None:
        return base.scheme == SUM and base.transport == key.transport
    return base.label == baseline


def _answer(
    key: Key, other: Key, parts: Collection[Sequence[float]], logs: Sequence[float], level: float, p: float
) -> Answer:
    middle, low, high = _location(logs, level)
    disagree = any(_p(part) <= 0.05 and (_location(part, 0.05)[0] < 1) != (middle < 1) for part in parts)
    verdict: Verdict = UNTOLD if p > 0.05 or disagree else "faster" if middle < 1 else "slower"
    return Answer(key, other.label, middle, low, high, p, verdict, len(logs), len(parts), disagree)


@functools.lru_cache(maxsize=16)
def _signed_ranks(count: int) -> Any:
    """The chance of at most each sum of positive ranks, 0 to n (n + 1) / 2, if signs fall like coins."""
    chance = np.ones(1)
    for rank in range(1, count + 1):
        longer = np.zeros(len(chance) + rank)
        longer[: len(chance)] += chance / 2
        longer[rank:] += chance / 2
        chance = longer
    return np.cumsum(chance)


def _p(logs: Sequence[float]) -> float:
    """Two-sided, of Wilcoxon's signed ranks: the sum is the number of Walsh averages above 0, ties half."""
    walsh = _walsh(logs)
    above = float(np.sum(walsh > 0) + np.sum(walsh == 0) / 2)
    chance = _signed_ranks(len(logs))
    return min(1.0, 2 * float(chance[math.ceil(min(above, len(walsh) - above))]))


def _location(logs: Sequence[float], level: float) -> tuple[Any, ...]:
    """Hodges' and Lehmann's estimate of the ratio, and an interval that misses it in so many of all cases."""
    walsh = np.exp(np.sort(_walsh(logs)))
    # P(sum < cut) <= level / 2
    cut = int(np.searchsorted(_signed_ranks(len(logs)), level / 2, side="right"))
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
