"""The tables of ``treeattn compare`` and ``report``: what was measured, which schemes are faster than a
baseline, and predicted against measured. docs/measuring.md derives every column."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from treeattn.collectives.clusters.disturbance import TOGETHER
from treeattn.report import LEGEND, Column, Report, count, identical, microseconds
from treeattn.study import intervals
from treeattn.study.compare.answer import FEWEST, LOOKS, UNTOLD, Answer, answers
from treeattn.study.compare.results import Results, Summary, compared_series, lacking, summarise
from treeattn.study.compare.schema import NCCL_SUM, NULL, SUM, Key, Run
from treeattn.study.intervals import Estimate
from treeattn.study.published.held import score
from treeattn.study.statistics import Statistics

# What a time is counted from is said where it is not the first entry.
_SINCE = {"completion": "", "after_last_entry": ", from the last rank's entry"}
_SENT = ("messages\nintra", "messages\ninter", "bytes\nintra", "bytes\ninter")


def show(made: Report, run: Run, summaries: Sequence[Summary], errors: Mapping[Key, str]) -> bool:
    """Add everything to a report, case by case; whether every result is right and equal on all ranks."""
    late, foretold = False, []
    for _, group in itertools.groupby(summaries, lambda summary: summary.key.case):
        of_case = list(group)
        series = compared_series(of_case)
        late |= series == "after_last_entry"
        rows = sorted(of_case, key=lambda row: row.times[series].median)
        made.line(f"\n{case(rows[0].key)}; times in µs{_SINCE[series]}")
        sums = {row.key.transport: row.times[series].median for row in rows if row.key.scheme == SUM}
        cells = [_cells(row, series, sums.get(row.key.transport)) for row in rows]
        made.table(cells, _columns(rows[0].key, series), style=lambda row: "red" if row["wrong"] else "")
        for row in rows:
            if reason := _wrong(row):
                made.line(f"wrong: {row.key.label}: {reason}", style="red")
        show_answers(made, rows)
        foretold.append(_show_predicted(made, case(rows[0].key), rows))
    _show_accuracy(made, foretold)
    causes: dict[Any, list[Key]] = {}
    for key, message in errors.items():
        causes.setdefault((key.case, message), []).append(key)
    for (_, message), keys in causes.items():
        schemes = ", ".join(key.label for key in keys)
        made.line(f"could not run: {schemes} ({case(keys[0])}): {message}", style="red")
    _add_notes(made, run, summaries, late)
    return not any(map(_wrong, summaries))


def case(key: Key) -> str:
    """All of a key that its case has, in words."""
    text = f"{key.what}, {key.ranks} ranks, "
    text += f"{key.ranks_per_node} a node, " if key.ranks_per_node else ""
    if key.what == "decode":
        text += f"{key.tokens:,} tokens, "
    text += f"batch {key.batch}, {key.queries} queries, " if key.batch * key.queries > 1 else ""
    text += f"{key.heads} heads ({key.kv_heads} KV) x {key.head_dim}, {key.dtype}"
    text += ", on GPUs" if key.device == "cuda" else ""
    text += f", records as {key.wire}" if key.wire != "float32" else ""
    return text + (f", arrivals {key.arrivals}" if key.arrivals != TOGETHER.text else "")


def _columns(key: Key, series: str) -> list[Column[dict[str, Any]]]:
    """Choose what stands in 80 columns: another series beside the compared one, else the error."""
    others: list[Column[dict[str, Any]]] = []
    if key.arrivals != TOGETHER.text:
        others = [Column("from last\nentry", "after_last_entry", microseconds)]
    if series == "after_last_entry":
        others = [Column("from first\nentry", "completion", microseconds, wide=True)]
    parts = ("local", "reduce") if key.what == "decode" else ("null_merge",)
    return [
        Column("scheme", words=True),
        *([Column("transport", words=True)] if key.device == "cuda" else []),
        *(Column(name, form=microseconds, wide=True) for name in ("plan", "first")),
        Column("median", form=microseconds),
        Column("95 % interval"),
        *(Column(name, form=microseconds, wide=True) for name in ("p5", "p95", "p99")),
        Column("slowest\nrank", "slowest", microseconds, wide=True),
        *(Column(f"a rank's\n{name}", name, microseconds, wide=True) for name in ("least", "mean", "most")),
        Column("most: of\nrank", "slowest_rank", count, wide=True),
        *others,
        *(Column(name.replace("_", "\n"), name, microseconds, wide=True)
          for name in parts if key.device == "cpu"),
        Column("x SUM", form=".2f"),
        Column("blocks", wide=True),
        Column("n"),
        Column("late"),
        Column("identical\nbits", "bits"),
        *(Column(name, form=count, wide=True) for name in ("rounds", "depth")),
        Column("error\nof out", "error_out", ".1e", wide=bool(others)),
        *(Column(name.replace("_", "\nof "), name, ".1e", wide=True)
          for name in ("bound_out", "error_lse", "bound_lse")),
        *(Column(name, form=count, wide=True) for name in _SENT),
        Column("bytes\nheld", "held", count, wide=True),
        Column("step\npeak", "step_peak", count, wide=True),
    ]  # fmt: skip


def _cells(row: Summary, series: str, of_sum: float | None) -> dict[str, Any]:
    """All that a row can show. of_sum: the median of the library's own sum over the same transport."""
    key, compared, every = row.key, row.times[series], row.times["completion"]
    of_ranks = row.facts["of_ranks"]
    ranks = [min(of_ranks), fmean(of_ranks), max(of_ranks)] if of_ranks else [None] * 3
    return {
        **dict.fromkeys(("local", "reduce", "null_merge")),  # which not every row has
        **row.facts,
        **{name: time.median for name, time in row.times.items()},
        "scheme": key.scheme if key.device == "cuda" and key.label != NCCL_SUM else key.label,
        "transport": key.transport,
        **{name: getattr(compared, name) for name in ("median", "p5", "p95", "p99")},
        "95 % interval": interval(compared),
        **dict(zip(("least", "mean", "most"), ranks, strict=True)),
        "slowest_rank": of_ranks and of_ranks.index(max(of_ranks)),
        "x SUM": compared.median / of_sum if of_sum and key.scheme != NULL else None,
        "blocks": every.blocks,
        "n": every.count,
        "bits": _bits(row),
        **dict(zip(_SENT, _sent(row.facts["sent"]), strict=True)),
        "wrong": _wrong(row),
    }


def interval(time: Statistics) -> str | None:
    """The interval of a median, where it has one."""
    if time.low is None or time.high is None:
        return None
    return f"{microseconds(time.low)} to {microseconds(time.high)}"


def _bits(row: Summary) -> str:
    """Whether all ranks held one result, and all blocks."""
    if row.key.scheme in (SUM, NULL):
        return "-"
    text, results = identical(row.facts["determinism"], row.facts["same_bits"]), len(row.facts["digests"])
    return text if results <= 1 else f"{text}, {results} results"


def _sent(sent: dict[str, Any] | None) -> tuple[object, ...]:
    """What `_SENT` names; a library tells nothing, or what it was given to send."""
    if sent is None:
        return ("library",) * 4
    if "unknown" in sent:
        return "library", "library", sent["unknown"][1], "given"
    numbers = (sent[tier][at] for at in (0, 1) for tier in ("intra", "inter"))
    return tuple("library" if number is None else number for number in numbers)


def _wrong(row: Summary) -> str | None:
    """Say what is wrong with a result: bits, payload against the schedule, error of float32 records."""
    facts = row.facts
    if row.key.scheme in (SUM, NULL):
        return None
    if facts["same_bits"] is False:
        return "ranks ended with different bits"
    if facts["scheduled"] and facts["sent"] != facts["scheduled"]:
        return f"sent {facts['sent']}, the schedule says {facts['scheduled']}"
    exact = facts["error_out"] <= facts["bound_out"] and facts["error_lse"] <= facts["bound_lse"]
    return None if exact or row.key.wire == "bfloat16" else "the error is above the bound"


def _add_notes(made: Report, run: Run, summaries: Sequence[Summary], late: bool) -> None:
    if late:
        made.line(
            "\nfrom the last rank's entry: ranks enter further apart (by the row that does nothing) than a "
            "tenth of the fastest scheme's time; x SUM is of these times"
        )
    if few := lacking(summaries):
        made.line(f"\n{few}")
    by_way = ", over the same transport" if any(row.key.device == "cuda" for row in summaries) else ""
    made.line(f"\nx SUM: of the median of {SUM} over as many bytes{by_way}\n{LEGEND}")
    for null in summaries:
        if null.key.scheme == NULL and null.key.what == "reduce":
            median, ranks = null.times["slowest"].median, null.key.ranks
            nothing = f"an iteration that does nothing takes {median:.2f} µs"
            made.line(f"harness: {nothing} on the slowest of {ranks} ranks")
    if run.clock is not None:
        source, method, error = run.clock.source, run.clock.method, run.clock.error
        made.line(f"clock: {source}, {method}; error at most {error:.2f} µs")
    made.note(run.warning)


def answer(rows: Iterable[Summary], measured: Results, baseline: str | None) -> None:
    """Give each summary of one case the series that it is compared by, and its answer or None."""
    of_case = {row.key: row for row in rows}
    series = compared_series(of_case.values())
    used = [
        point
        for point in measured.points
        if point.key in of_case and measured.version(point) == of_case[point.key].version
    ]
    early = any(measured.runs[run].options.get("stop_early") for run in {point.run for point in used})
    found = {one.key: one for one in answers(used, series, baseline, early)}
    for row in of_case.values():
        row.facts.update(compared_by=series, answer=found.get(row.key), stops_early=early)


def answered(case: Results, baseline: str | None) -> set[Key]:
    """Keys of one case that need no further block: those with a verdict, and then all if none lacks it."""
    rows = summarise(case)
    answer(rows, case, baseline)
    asked = [row.facts["answer"] for row in rows if row.facts["answer"]]
    told = {one.key for one in asked if one.verdict != UNTOLD}
    return {row.key for row in rows} if asked and len(told) == len(asked) else told


def show_answers(made: Report, rows: Sequence[Summary]) -> None:
    """Add the table of one case, or the line that says what it lacks."""
    found: list[Answer] = [row.facts["answer"] for row in rows if row.facts.get("answer")]
    if not found:
        return
    baselines = " or ".join(dict.fromkeys(one.baseline for one in found))
    early = any(row.facts["stops_early"] for row in rows)
    if max(one.blocks for one in found) < (LOOKS[0] if early else FEWEST):
        made.line(f"faster than {baselines}? --repetitions {LOOKS[0] if early else FEWEST} at least can tell")
        return
    made.line(f"\nagainst {baselines}, within each repetition")
    made.table(sorted(found, key=lambda one: one.ratio), [
        Column("scheme", lambda one: one.key.label, words=True),
        Column("ratio", "ratio", ".2f"),
        Column("95 % interval", lambda one: None if one.low is None else f"{one.low:.2f} to {one.high:.2f}"),
        Column("p", "p", ".2g"),
        Column("verdict", "verdict", words=True),
        Column("blocks", "blocks", wide=not early),
    ])  # fmt: skip
    if disagree := [one.key.label for one in found if one.disagree]:
        made.line(f"launches disagree, one alone says the opposite of all: {', '.join(disagree)}")
    if max(one.launches for one in found) == 1:
        made.line(
            "of one launch: what only another launch changes, such as the cores of ranks, is in no interval "
            "(--launch 2)"
        )
    if early:
        made.line(
            "blocks ended with the answer: it was looked for after 8, 16, 32 .. of them, and p and intervals "
            "hold for all looks together"
        )


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


def _predicted_series(row: Summary) -> str:
    """What is predicted: from the last entry where ranks were to enter together and did not."""
    together = row.key.arrivals == TOGETHER.text
    return str(row.facts["compared_by"]) if together else "completion"


def pairs(rows: Sequence[Summary]) -> list[Pair]:
    """Of the rows of one case that have both, in the order of what was measured."""
    known = [(row, row.times[_predicted_series(row)].median) for row in rows if row.facts["estimate"]]
    base = next((time for row, time in known if row.facts["estimate"].is_baseline), None)
    made = [Pair(row.key.label, time, row.facts["estimate"], base and time / base) for row, time in known]
    return sorted(made, key=lambda pair: pair.measured)


def _show_predicted(made: Report, case: str, rows: Sequence[Summary]) -> list[Pair]:
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


def accuracy(cases: Sequence[Sequence[Pair]]) -> dict[str, Any]:
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


def _show_accuracy(made: Report, cases: Sequence[Sequence[Pair]]) -> None:
    """Add the lines that say how good they were."""
    found = accuracy(cases)
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
