"""What ``treeattn compare`` and ``report`` say: which scheme is fastest and why, what was measured, and
predicted against measured. docs/measuring.md derives every column."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from treeattn.report import Column, Report, between, count, identical, microseconds, ratio
from treeattn.study.compare.rows import ENOUGH, SUM, Key
from treeattn.study.compare.summary import Summary, fewest
from treeattn.study.why import equal_messages, headline

COLUMNS: list[Column[Summary]] = [
    Column("scheme", "label", words=True),
    Column("µs from\nlast entry", "time_us", microseconds),
    Column("95 % interval", lambda row: between(row["low_us"], row["high_us"], microseconds), wide=True),
    Column("ratio", "ratio", ratio),
    Column("95 % interval", lambda row: between(row["ratio_low"], row["ratio_high"], ratio)),
    Column("verdict", lambda row: row["verdict"] or "", words=True),
    Column("p", "p", ".2g", wide=True),
    Column("identical\nbits", lambda row: bits(row), wide=True),
    *(Column(name.replace("_us", "").replace("_", " "), name, microseconds, wide=True)
      for name in ("completion_us", "plan_us", "first_us", "local_us", "reduce_us", "finish_us", "mean_us",
                   "slowest_us")),
    Column("algbw", form=".3g", wide=True),
    Column("busbw", form=".3g", wide=True),
    Column("blocks", wide=True),
    *(Column(name, form=count, wide=True) for name in ("rounds", "depth")),
    *(Column(name.replace("_", "\n"), name, count, wide=True)
      for name in ("rounds_inter", "messages_intra", "messages_inter", "bytes_intra", "bytes_inter",
                   "busiest_bytes")),
    Column("error\nof out", "error_out", ".1e", wide=True),
]  # fmt: skip

_PREDICTED: list[Column[Summary]] = [
    Column("scheme", "label", words=True),
    Column("measured, µs", "time_us", microseconds),
    Column("predicted, µs", "predicted_us", microseconds),
    Column("95 %", lambda r: between(r["predicted_low_us"], r["predicted_high_us"], microseconds)),
    Column("error", lambda row: row["predicted_us"] / row["time_us"] - 1, "+.0%"),
]


def headlines(summaries: Sequence[Summary]) -> dict[str, str]:
    """Case -> the sentence that says what is fastest in it, and why."""
    return {case: sentence(list(rows)) for case, rows in groupby(summaries, lambda row: row["case"])}


def sentence(rows: Sequence[Summary]) -> str:
    """The headline of the rows of a case."""
    first = rows[0]
    if first["ratio"] is None:
        said = f"{microseconds(first['time_us'])} µs"
    elif first["label"] == first["baseline"]:
        said = "what the ratios are to"
    else:
        said = f"{ratio(first['ratio'])} of {first['baseline']}"
    if ends := between(first["ratio_low"], first["ratio_high"], ratio):
        said += f" ({ends})"
    # Bits of different heads are not compared.
    return headline(
        first["label"], said, rows, first["same_bits"] is None and not first["scheme"].startswith(SUM)
    )


def bits(row: Summary) -> str:
    """Whether all ranks held one result, and all blocks."""
    if row["scheme"].startswith(SUM):
        return "-"
    text = identical(row["determinism"], row["same_bits"])
    return text if row["results"] <= 1 else f"{text}, {row['results']} results"


def own_jobs(rows: Sequence[Summary]) -> str | None:
    """What the library's algorithms among the rows are compared with."""
    names = [row["label"] for row in rows if row["scheme"].startswith(f"{SUM}/")]
    text = "the library's own algorithm, in a job started for it; the ratio is to that job's"
    return f"{', '.join(names)}: {text} {names[0].partition('/')[0]}" if names else None


def show(made: Report, summaries: Sequence[Summary], errors: Mapping[Key, str]) -> bool:
    """Add everything to a report, case by case; whether every result is right and equal on all ranks."""
    foretold = []
    for case, text in headlines(summaries).items():
        made.line(f"{case}: {text}")
    for case, group in groupby(summaries, lambda row: row["case"]):
        rows = list(group)
        made.line(f"\n{case}")
        made.table(rows, COLUMNS, style=lambda row: "red" if row["wrong"] else "")
        for row in rows:
            if row["wrong"]:
                made.line(f"wrong: {row['label']}: {row['wrong']}", style="red")
        for how in ("proved", "measured"):
            if names := [row["label"] for row in rows if bits(row).startswith(how)]:
                made.line(f"identical bits on all ranks ({how}): {', '.join(names)}")
        for text in filter(None, (equal_messages(rows), own_jobs(rows))):
            made.line(text)
        if known := [row for row in rows if row["predicted_us"] is not None]:
            foretold.append(known)
            made.table(known, _PREDICTED)
    causes: dict[Any, list[Key]] = {}
    for key, message in errors.items():
        causes.setdefault((key.case, message), []).append(key)
    for (_, message), keys in causes.items():
        schemes = ", ".join(key.label for key in keys)
        made.line(f"could not run: {schemes} ({keys[0].words}): {message}", style="red")
    _add_notes(made, summaries)
    if found := accuracy(foretold):
        made.line(
            f"predicted against measured, {found['rows']} times: median {found['median']:.0%} off, "
            f"{found['within_interval']:.0%} in their intervals; what is predicted fastest takes "
            f"{found['worst_choice']:.2f} of the fastest's time at most"
        )
    return not any(row["wrong"] for row in summaries)


def _add_notes(made: Report, summaries: Sequence[Summary]) -> None:
    if not summaries:
        return
    baselines = " or ".join(dict.fromkeys(row["baseline"] for row in summaries if row["baseline"]))
    if baselines:
        made.line(
            f"\nµs: from the last rank's entry to the last one's exit; ratio: to {baselines} within each "
            "repetition; bits proved: by the schedule; measured: in this run"
        )
        most = max(Counter(row["case"] for row in summaries).values())
        if max(row["blocks"] for row in summaries) < (needed := fewest(most - 1)):
            made.line(f"which of {most} is faster, --repetitions {needed} at least can tell")
        elif max(row["runs"] for row in summaries) == 1:
            made.line(
                "of one run: what only another run changes, such as the cores of ranks, is in no interval "
                "(the same command with more --repetitions adds blocks of another run)"
            )
    if (least := min(row["iterations"] for row in summaries)) < ENOUGH:
        made.line(f"as few as {least} iterations a block: a median wants {ENOUGH}")
    if (late := max(row["late"] / (row["blocks"] * row["iterations"]) for row in summaries)) > 0.1:
        made.line(f"some rank entered after the agreed instant in up to {min(late, 1):.0%} of the iterations")


def accuracy(cases: Sequence[Sequence[Summary]]) -> dict[str, float]:
    """How good the predictions of all cases were, as fractions; empty without any. worst_choice: the time of
    what is predicted fastest over that of the fastest, in the case where it is largest."""
    every = [row for case in cases for row in case]
    if not every:
        return {}

    def chosen(case: Sequence[Summary]) -> float:
        column = "ratio" if all(row["ratio"] for row in case) else "time_us"
        return float(
            min(case, key=lambda row: row["predicted_us"])[column] / min(row[column] for row in case)
        )

    return {
        "rows": len(every),
        "median": median(abs(row["predicted_us"] / row["time_us"] - 1) for row in every),
        "within_interval": sum(
            row["predicted_low_us"] <= row["time_us"] <= row["predicted_high_us"] for row in every
        ) / len(every),
        "worst_choice": max(map(chosen, cases)),
    }  # fmt: skip
