"""Predicted against measured, in ``treeattn compare`` and on the page of ``treeattn report``."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from treeattn.collectives.clusters.disturbance import TOGETHER
from treeattn.report import Column, Report, microseconds
from treeattn.study import intervals
from treeattn.study.compare.results import Summary
from treeattn.study.published.held import score


class Pair(NamedTuple):
    """A scheme's measured microseconds and what was predicted; ratio: measured, to the scheme that the
    estimate's ratio is to, None where that was not measured."""

    summary: Summary
    measured: float
    ratio: float | None

    @property
    def predicted(self) -> float:
        """Microseconds."""
        return float(self.summary.facts["predicted"])

    @property
    def error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted / self.measured - 1

    def of_estimate(self, name: str) -> Any:
        """A field of the estimate; None in results that hold none."""
        return getattr(self.summary.facts["estimate"], name, None)

    @property
    def within(self) -> bool | None:
        """Whether what was measured lies in the interval."""
        low, high = self.of_estimate("low"), self.of_estimate("high")
        return None if low is None else low <= self.measured <= high

    @property
    def ratio_within(self) -> bool | None:
        """Likewise of the ratio."""
        if self.ratio is None or self.of_estimate("ratio_interval") is None:
            return None
        return bool(self.of_estimate("ratio_low") <= self.ratio <= self.of_estimate("ratio_high"))


def _series(row: Summary) -> str:
    """What is predicted: from the last entry where ranks were to enter together and did not."""
    together = row.key.arrivals == TOGETHER.text
    return str(row.facts["compared_by"]) if together else "completion"


def pairs(rows: Sequence[Summary]) -> list[Pair]:
    """Of the rows of one case that have both, in the order of what was measured."""
    known = [row for row in rows if row.facts["predicted"]]
    times = {row.key: row.times[_series(row)].median for row in known}
    first = next((row for row in known if row.facts["estimate"] and row.facts["estimate"].is_baseline), None)
    base = None if first is None else times[first.key]
    made = [Pair(row, times[row.key], base and times[row.key] / base) for row in known]
    return sorted(made, key=lambda pair: pair.measured)


def show(made: Report, case: str, rows: Sequence[Summary]) -> list[Pair]:
    """Add the table of one case, where there are predictions."""
    found = pairs(rows)
    if found:
        made.line(f"\npredicted: {case}")
        made.table(found, [
            Column("scheme", lambda pair: pair.summary.key.label, words=True),
            Column("measured", "measured", microseconds),
            Column("predicted", "predicted", microseconds),
            Column("95 %", lambda pair: pair.of_estimate("interval")),
            Column("error", "error", "+.0%"),
            Column("ratio", "ratio", ".2f"),
            Column("predicted", lambda pair: pair.of_estimate("ratio_interval")),
        ])  # fmt: skip
    of = [(p.summary.key.label, p.summary.facts["estimate"]) for p in found if p.summary.facts["estimate"]]
    if any(estimate.is_baseline for _, estimate in of):
        made.line(intervals.alike(of))
    return found


def facts(cases: Sequence[Sequence[Pair]]) -> dict[str, Any]:
    """How good the predictions of all cases were, as fractions; empty without any."""
    every = [pair for case in cases for pair in case]
    if not every:
        return {}
    of_ratios = [
        abs(pair.of_estimate("ratio") / pair.ratio - 1)
        for pair in every
        if pair.ratio is not None and pair.of_estimate("ratio_interval")
    ]
    chosen = [
        min(case, key=lambda pair: pair.predicted).measured / case[0].measured for case in cases if case
    ]
    return {
        **score([abs(pair.error) for pair in every])._asdict(),
        "within_interval": _share(pair.within for pair in every),
        "ratio_median": median(of_ratios) if of_ratios else None,
        "ratio_within_interval": _share(pair.ratio_within for pair in every),
        "worst_choice": max(chosen),
    }


def _share(held: Any) -> float | None:
    known = [one for one in held if one is not None]
    return sum(known) / len(known) if known else None


def summary(made: Report, cases: Sequence[Sequence[Pair]]) -> None:
    """Add the lines that say how good they were."""
    found = facts(cases)
    if not found:
        return
    text = (
        f"Predicted against measured, {found['rows']} times: median {found['median']:.0%} off, 90 % within "
        f"{found['p90']:.0%}, {found['within_25']:.0%} within 25 %"
    )
    if found["within_interval"] is not None:
        text += f", {found['within_interval']:.0%} in their intervals"
    if found["ratio_median"] is not None:
        text += (
            f"; ratios: median {found['ratio_median']:.0%} off, {found['ratio_within_interval']:.0%} in "
            "their intervals"
        )
    made.line(
        f"\n{text}; what is predicted fastest takes {found['worst_choice']:.2f} of the fastest's time at most"
    )
