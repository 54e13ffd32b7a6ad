"""The tables of `treeattn compare`; docs/measuring.md derives every column."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from rich.console import Console

from treeattn.cli.console import LEGEND, Columns, count, identical, magnitude, microseconds, table
from treeattn.study.compare.results import Summary
from treeattn.study.compare.schema import NCCL_SUM, NULL, SUM, Key, Run

__all__ = ["show"]

# What stands in 80 columns: with a skew the time from the last entry, else the error.
_NARROW = (
    "scheme",
    "transport",
    "median",
    "95 % interval",
    "predicted",
    "from last\nentry",
    "x SUM",
    "identical\nbits",
)
_ERRORS = tuple(itertools.product(("out", "lse"), ("error", "bound")))
_EXACT = "error\nof out"


def show(
    console: Console, run: Run, summaries: Sequence[Summary], errors: dict[Key, str], wide: bool = False
) -> bool:
    """Print everything, case by case; whether every result is within its bound and equal on all ranks."""
    passed = True
    for _, group in itertools.groupby(summaries, lambda summary: summary.key.case):
        rows = sorted(group, key=lambda row: row.times["completion"].median)
        times, results = _times(rows), _results(rows[0].key)
        words = len(_named(rows[0].key))
        console.print(f"\n{_case(rows[0].key)}; times in µs")
        if wide:
            judged = [row for row in rows if row.key.scheme not in (SUM, NULL)]
            table(console, times, rows, words=words, style=_style)
            table(console, results, judged, words=words, style=_style)
        else:
            chosen = _NARROW if rows[0].key.skew or "predicted" in times else (*_NARROW, _EXACT)
            both = {**times, **results}
            columns = {name: both[name] for name in chosen if name in both}
            table(console, columns, rows, words=words, style=_style)
        wrong = {row.key.label: _wrong(row) for row in rows}
        for scheme, reason in wrong.items():
            if reason:
                console.print(f"wrong: {scheme}: {reason}", style="red")
        passed &= not any(wrong.values())
    causes: dict[Any, list[Key]] = {}
    for key, message in errors.items():
        causes.setdefault((key.case, message), []).append(key)
    for (_, message), keys in causes.items():
        schemes = ", ".join(key.label for key in keys)
        console.print(f"could not run: {schemes} ({_case(keys[0])}): {message}", style="red")
    _show_notes(console, run, summaries)
    return passed


def _style(row: Summary) -> str:
    return "red" if _wrong(row) else ""


def _case(key: Key) -> str:
    text = f"{key.what}, {key.ranks} ranks, "
    if key.what == "decode":
        text += f"{key.tokens:,} tokens, "
    text += f"batch {key.batch}, {key.queries} queries, " if key.batch * key.queries > 1 else ""
    text += f"{key.heads} heads ({key.kv_heads} KV) x {key.head_dim}, {key.dtype}"
    text += ", on GPUs" if key.device == "cuda" else ""
    text += f", records as {key.wire}" if key.wire != "float32" else ""
    return text + (f", arrival skew {key.skew:g} µs" if key.skew else "")


def _times(rows: Sequence[Summary]) -> Columns[Summary]:
    """Heading -> what depends on time."""
    sums = {row.key.transport: row.times["completion"].median for row in rows if row.key.scheme == SUM}
    key = rows[0].key

    def median(name: str) -> Callable[[Summary], str]:
        return lambda row: microseconds(row.times[name].median) if name in row.times else "-"

    def completion(name: str) -> Callable[[Summary], str]:
        return lambda row: microseconds(getattr(row.times["completion"], name))

    def times_sum(row: Summary) -> str:
        of_sum = sums.get(row.key.transport)
        if not of_sum or row.key.scheme == NULL:
            return "-"
        return f"{row.times['completion'].median / of_sum:.2f}"

    parts: tuple[str, ...] = ("local", "reduce") if key.what == "decode" else ("null_merge",)
    if key.device == "cuda":
        parts = ()
    return {
        **_named(key),
        **{name: median(name) for name in ("plan", "first")},
        "median": completion("median"),
        "95 % interval": _interval,
        **({"predicted": _predicted} if any(row.facts["predicted"] for row in rows) else {}),
        **{name: completion(name) for name in ("p5", "p95", "p99")},
        "slowest\nrank": median("slowest"),
        **({"from last\nentry": median("after_last_entry")} if key.skew else {}),
        **{name.replace("_", "\n"): median(name) for name in parts},
        "x SUM": times_sum,
        "blocks": lambda row: str(row.times["completion"].blocks),
        "n": lambda row: str(row.times["completion"].count),
        "late": lambda row: str(row.facts["late"]),
    }


def _named(key: Key) -> Columns[Summary]:
    """What a row is of: from GPUs the same scheme may travel in several ways."""
    if key.device == "cpu":
        return {"scheme": attrgetter("key.label")}
    return {
        "scheme": lambda row: NCCL_SUM if row.key.label == NCCL_SUM else row.key.scheme,
        "transport": attrgetter("key.transport"),
    }


def _interval(row: Summary) -> str:
    time = row.times["completion"]
    if time.low is None or time.high is None:
        return "-"
    return f"{microseconds(time.low)} to {microseconds(time.high)}"


def _predicted(row: Summary) -> str:
    value = row.facts["predicted"]
    return "-" if value is None else microseconds(value)


def _results(key: Key) -> Columns[Summary]:
    """Heading -> what does not: the result, the payload of one step, the memory of a rank."""

    def fact(name: str, shown: Callable[[Any], str] = count) -> Callable[[Summary], str]:
        return lambda row: shown(row.facts[name])

    def payload(index: int) -> Callable[[Summary], str]:
        return lambda row: _payload(row.facts["sent"])[index]

    headings = ("messages\nintra", "messages\ninter", "bytes\nintra", "bytes\ninter")
    return {
        **_named(key),
        "identical\nbits": _bits,
        **{name: fact(name) for name in ("rounds", "depth")},
        **{f"{what}\nof {of}": fact(f"{what}_{of}", magnitude) for of, what in _ERRORS},
        **{heading: payload(index) for index, heading in enumerate(headings)},
        "bytes\nheld": fact("held"),
        "step\npeak": fact("step_peak"),
    }


def _bits(row: Summary) -> str:
    """Whether all ranks held one result, and all blocks."""
    text, results = identical(row.facts["determinism"], row.facts["same_bits"]), len(row.facts["digests"])
    return text if results <= 1 else f"{text}, {results} results"


def _payload(sent: dict[str, list[Any]] | None) -> list[str]:
    """Messages, then bytes, by tier; a library tells nothing, or what it was given to send."""
    if sent is None:
        return ["library"] * 4
    if "unknown" in sent:
        return ["library", "library", count(sent["unknown"][1]), "given"]
    counts = [sent[tier][index] for index in (0, 1) for tier in ("intra", "inter")]
    return ["library" if number is None else count(number) for number in counts]


def _wrong(row: Summary) -> str | None:
    """What is wrong with a result: bits, payload against the schedule, error of float32 records; or None."""
    facts = row.facts
    if row.key.scheme in (SUM, NULL):
        return None
    if facts["same_bits"] is False:
        return "ranks ended with different bits"
    if facts["scheduled"] and facts["sent"] != facts["scheduled"]:
        return f"sent {facts['sent']}, the schedule says {facts['scheduled']}"
    exact = facts["error_out"] <= facts["bound_out"] and facts["error_lse"] <= facts["bound_lse"]
    return None if exact or row.key.wire == "bfloat16" else "the error is above the bound"


def _show_notes(console: Console, run: Run, summaries: Sequence[Summary]) -> None:
    by_way = ", over the same transport" if any(row.key.device == "cuda" for row in summaries) else ""
    console.print(f"\nx SUM: of the median of {SUM} over as many bytes{by_way}\n{LEGEND}")
    for null in summaries:
        if null.key.scheme == NULL and null.key.what == "reduce":
            console.print(
                f"harness: an iteration that does nothing takes {null.times['slowest'].median:.2f} µs "
                f"on the slowest of {null.key.ranks} ranks"
            )
    if run.clock is not None:
        source, method, error = run.clock.source, run.clock.method, run.clock.error
        console.print(f"clock: {source}, {method}; error at most {error:.2f} µs")
    if run.warning:
        console.print(f"note: {run.warning}", style="yellow")
