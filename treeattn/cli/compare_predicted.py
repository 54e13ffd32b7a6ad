"""Predicted against measured, in ``treeattn compare`` and on the page of ``treeattn report``."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from treeattn.collectives.clusters.disturbance import TOGETHER
from treeattn.report import Column, Report, microseconds
from treeattn.study import intervals
from treeattn.study.compare.results import Summary
from treeattn.study.intervals import Estimate
from treeattn.study.published.held import score


class Pair(NamedTuple):
    """A scheme's measured microseconds and what was predicted; ratio: measured, to the scheme that the
    estimate's ratio is to, None where that was not measured."""

    label: str
    measured: float
    estimate: Estimate
    ratio: float | None

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.estimate.time / self.measured - 1

    @property
    def within(self) -> bool:
        """Whether what was measured lies in the interval."""
        return self.estimate.low <= self.measured <= self.estimate.high

    @property
    def ratio_within(self) -> bool | None:
        """Likewise of the ratio."""
        if self.ratio is None or self.estimate.is_baseline:
            return None
        return self.estimate.ratio_low <= self.ratio <= self.estimate.ratio_high


def _series(row: Summary) -> str:
    """What is predicted: from the last entry where ranks were to enter together and did not."""
    together = row.key.arrivals == TOGETHER.text
    return str(row.facts["compared_by"]) if together else "completion"


def pairs(rows: Sequence[Summary]) -> list[Pair]:
    """Of the rows of one case that have both, in the order of what was measured."""
    known = [(row, row.times[_series(row)].median) for row in rows if row.facts["estimate"]]
    base = next((time for row, time in known if row.facts["estimate"].is_baseline), None)
    made = [Pair(row.key.label, time, row.facts["estimate"], base and time / base) for row, time in known]
    return sorted(made, key=lambda pair: pair.measured)


def show(made: Report, case: str, rows: Sequence[Summary]) -> list[Pair]:
    found = pairs(rows)
    if found:
        made.line(f"\npredicted: {case}")
        made.table(found, [
            Column("scheme", "label", words=True),
            Column("measured", "measured", microseconds),
            Column("predicted", lambda pair: pair.estimate.time, microseconds),
            Column("95 %", lambda pair: pair.estimate.interval),
            Column("error", "error", "+.0%"),
            Column("ratio", "ratio", ".2f"),
            Column("predicted", lambda pair: pair.estimate.ratio_interval),
        ])  # fmt: skip
    if any(pair.estimate.is_baseline for pair in found):
        made.line(intervals.alike((pair.label, pair.estimate) for pair in found))
    return found


def facts(cases: Sequence[Sequence[Pair]]) -> dict[str, Any]:
    """How good the predictions of all cases were, as fractions; empty without any."""
    every = [pair for case in cases for pair in case]
    if not every:
        return {}
    of_ratios = [pair for pair in every if pair.ratio_within is not None]
    errors = [abs(pair.estimate.ratio / pair.ratio - 1) for pair in of_ratios if pair.ratio]
    chosen = [
        min(case, key=lambda pair: pair.estimate.time).measured / case[0].measured for case in cases if case
    ]
    return {
        **score([abs(pair.error) for pair in every])._asdict(),
        "within_interval": fmean(pair.within for pair in every),
        "ratio_median": median(errors) if errors else None,
        "ratio_within_interval": fmean(map(bool, (p.ratio_within for p in of_ratios))) if errors else None,
        "worst_choice": max(chosen),
    }


def summary(made: Report, cases: Sequence[Sequence[Pair]]) -> None:
    """Add the lines that say how good they were."""
    found = facts(cases)
    if not found:
        return
    text = (
        f"Predicted against measured, {found['rows']} times: median {found['median']:.0%} off, 90 % within "
        f"{found['p90']:.0%}, {found['within_25']:.0%} within 25 %, {found['within_interval']:.0%} in their "
        "intervals"
    )
    if found["ratio_median"] is not None:
        text += (
            f"; ratios: median {found['ratio_median']:.0%} off, {found['ratio_within_interval']:.0%} in "
            "their intervals"
        )
    made.line(
        f"\n{text}; what is predicted fastest takes {found['worst_choice']:.2f} of the fastest's time at most"
    )
