"""What blocks say together: of each scheme a time, and whether it is faster than a baseline.

A block is planned anew, so blocks are the units of everything here, however many iterations each had: the
median over iterations of one block is one value. The time of a scheme is the median of these, with the exact
interval of a median, from order statistics (`scipy.stats.quantile_test`).

The schemes of a case are measured in turn within each repetition, so that what disturbs the machine meets the
blocks of one repetition alike: ratios are taken within it. Of their logarithms nothing is assumed but that
they lie symmetrically about their middle (Wilcoxon, "Individual comparisons by ranking methods", 1945; Hodges
and Lehmann, "Estimates of location based on rank tests", 1963). Where nothing differs, 5 of 100 tables at
most hold a verdict, however many schemes they have (Holm, "A simple sequentially rejective multiple test
procedure", 1979).

Blocks of one run share what only another run changes, such as where ranks were put, so many blocks do not
make up for few runs (Hunold and Carpen-Amarie, "Reproducible MPI benchmarking is still not as easy as you
think", TPDS 27(12), 2016). Where one run alone says the opposite of all together, there is no verdict."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from treeattn.study import extra
from treeattn.study.compare.rows import SUM, Key, Row, settings, version

#: Repetitions below which no verdict at 95 percent confidence can come out.
FEWEST = 6
_MOST = 500  # of more blocks every second, third and so on is taken
_TESTED = (
    "low_us",
    "high_us",
    "baseline",
    "ratio",
    "ratio_low",
    "ratio_high",
    "p",
    "verdict",
    "like_fastest",
)
_MEDIANS = ("completion_us", "slowest_us", "least_us", "mean_us", "local_us", "reduce_us", "finish_us",
"plan_us",
            "first_us", "algbw", "busbw")  # fmt: skip

#: A scheme of one case: the columns of a row, of all of its blocks together, and those that `summarise` adds.
Summary = dict[str, Any]


def summarise(rows: Iterable[Row], baseline: str | None = None, tested: bool = True) -> list[Summary]:
    """One entry for each scheme of each case and version, those of a case from fast to slow.

    baseline: label of the scheme that others are compared with, by default the library's sum, of several
    transports the fastest. tested: with intervals, ratios and verdicts, which need scipy: raises
    `MissingPackageError`.

    An entry has the columns of the last row, medians over blocks instead of its times, and ``label``,
    ``blocks``, ``runs``, ``wrong`` (None, or what is wrong with a result), ``results`` (how many different
    ones), ``iterations`` (fewest of a block). Where tested also ``low_us`` and ``high_us``, and, against
    ``baseline``, ``ratio``, ``ratio_low``, ``ratio_high``, ``p`` (corrected for all schemes of the case) and
    ``verdict``; each None where there are too few blocks, or no baseline. ``like_fastest``: whether it cannot
    be told apart from the first of its case; None where so few blocks cannot tell.
    """
    cases: dict[Any, dict[Key, list[Row]]] = {}
    for row in rows:
        if row.time_us is not None:
            cases.setdefault((version(row), row.case), {}).setdefault(row.key, []).append(row)
    found = []
    for case in cases.values():
        of_case = {key: _together(blocks) for key, blocks in case.items()}
        if tested:
            _compare(of_case, case, baseline)
        ordered = sorted(of_case, key=lambda key: _order(of_case[key]))
        if tested:
            for key, one in _against(case, ordered[0]).items():
                first = of_case[ordered[0]]  # of which a pair with the baseline has its verdict already
                pair = first if of_case[key]["label"] == first["baseline"] else one
                told = pair["verdict"] in ("faster", "slower")
                able = of_case[key]["blocks"] >= fewest(len(case) - 1)
                of_case[key]["like_fastest"] = not told if told or able else None
        found += [of_case[key] for key in ordered]
    return found


def _order(one: Summary) -> tuple[bool, float]:
    """From fast to slow, by the ratio; what has none comes last."""
    return one["ratio"] is None, one["ratio"] or one["time_us"]


def _together(blocks: Sequence[Row]) -> Summary:
    """The summary of the blocks of one key, without intervals."""
    last = blocks[-1]
    made = {name: getattr(last, name) for name in last.__struct_fields__}
    for name in _MEDIANS:
        known = [value for value in (getattr(row, name) for row in blocks) if value is not None]
        made[name] = median(known) if known else None
    return made | {
        "label": last.label,
        "case": ", ".join(filter(None, (last.words, settings(last)))),
        "time_us": median(row.time_us for row in blocks if row.time_us is not None),
        "blocks": len(blocks),
        "runs": len({row.run for row in blocks}),
        "iterations": min(row.iterations for row in blocks),
        "late": sum(row.late for row in blocks),
        "wrong": next((row.wrong for row in blocks if row.wrong), None),
        "results": len({row.digest for row in blocks if row.digest}),
        **dict.fromkeys(_TESTED),
    }


def _compare(of_case: Mapping[Key, Summary], case: Mapping[Key, Sequence[Row]], baseline: str | None) -> None:
    """Add intervals, and what each is to the baseline."""
    for key, made in of_case.items():
        times = [row.time_us for row in case[key] if row.time_us is not None]
        made["low_us"], made["high_us"] = interval(times)
    named = [key for key in case if (key.scheme == SUM if baseline is None else key.label == baseline)]
    if not named:
        return
    base = min(named, key=lambda key: float(of_case[key]["time_us"]))
    of_case[base]["ratio"] = 1.0
    for key, one in _against(case, base).items():
        of_case[key] |= one
    for made in of_case.values():
        made["baseline"] = base.label


def _against(case: Mapping[Key, Sequence[Row]], base: Key) -> dict[Key, dict[str, Any]]:
    """Of each other scheme the ratio to `base` within repetitions, and whether it is faster: as columns."""
    theirs = {(row.run, row.repetition): row.time_us for row in case[base]}
    ratios: dict[Key, list[tuple[str, float]]] = {}
    for key, blocks in case.items():
        logs = [
            (row.run, float(np.log(row.time_us / other)))
            for row in blocks
            if row.time_us and (other := theirs.get((row.run, row.repetition)))
        ]
        if logs and key != base:
            ratios[key] = logs[:: 1 + len(logs) // _MOST]
    found: dict[Key, dict[str, Any]] = {}
    corrected = holm([p_value([log for _, log in logs]) for logs in ratios.values()])
    for (key, logs), p in zip(ratios.items(), corrected, strict=True):
        middle, low, high = hodges_lehmann([log for _, log in logs])
        found[key] = {"ratio": middle, "ratio_low": low, "ratio_high": high, "p": p}
        found[key]["verdict"] = _verdict(logs, middle, p)
    return found


def _verdict(logs: Sequence[tuple[str, float]], ratio: float, p: float) -> str:
    runs = {run: [log for name, log in logs if name == run] for run, _ in logs}
    for own in runs.values():
        if p_value(own) <= 0.05 and (hodges_lehmann(own)[0] < 1) != (ratio < 1):
            return "runs disagree"
    if p > 0.05:
        return "not told apart"
    return "faster" if ratio < 1 else "slower"


def interval(times: Sequence[float]) -> tuple[float | None, float | None]:
    """The 95 percent interval of the median of the population; None below 6 values."""
    if len(times) < FEWEST:
        return None, None
    found = extra("scipy.stats").quantile_test(times, q=0, p=0.5).confidence_interval(0.95)
    return float(found.low), float(found.high)


def fewest(others: int) -> int:
    """Repetitions below which none of so many others can be told from a scheme: the least p that signed ranks
    have, corrected for all of them, is above 0.05."""
    return 1 + math.ceil(math.log2(20 * max(others, 1)))


def p_value(logs: Sequence[float]) -> float:
    """Two-sided, of Wilcoxon's signed ranks: of no difference."""
    if len(logs) < 2:  # of one difference scipy says so itself, but for 0, which it refuses
        return 1.0
    return float(extra("scipy.stats").wilcoxon(logs, zero_method="zsplit").pvalue)


def hodges_lehmann(logs: Sequence[float]) -> tuple[float, float | None, float | None]:
    """The ratio, the median of Walsh averages, and its 95 percent interval by Wilcoxon's distribution."""
    first, second = np.triu_indices(len(logs))
    values = np.asarray(logs)
    walsh = np.exp(np.sort((values[first] + values[second]) / 2))
    chance = np.ones(1)  # of each sum of ranks whose signs are positive, if signs fall like coins
    for rank in range(1, len(values) + 1):
        chance = (np.pad(chance, (0, rank)) + np.pad(chance, (rank, 0))) / 2
    cut = int(np.searchsorted(np.cumsum(chance), 0.025, side="right"))  # P(sum < cut) <= 0.025
    ends = (float(walsh[cut - 1]), float(walsh[-cut])) if cut else (None, None)
    return float(np.median(walsh)), *ends


def holm(chances: Sequence[float]) -> list[float]:
    """Each times the number of those not smaller, and never below a smaller one's."""
    order = sorted(range(len(chances)), key=lambda at: chances[at])
    scaled = (min(1.0, chances[at] * (len(chances) - place)) for place, at in enumerate(order))
    corrected = dict(zip(order, itertools.accumulate(scaled, max), strict=True))
    return [corrected[at] for at in range(len(chances))]
