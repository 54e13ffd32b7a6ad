"""The tables of `treeattn compare`; docs/measuring.md derives every column."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from treeattn.study.compare.results import Summary
from treeattn.study.compare.schema import NULL, SUM, Key, Run

__all__ = ["show"]


def show(console: Console, run: Run, summaries: Sequence[Summary], errors: dict[Key, str]) -> bool:
    """Print everything, case by case as `summaries` come; whether every result is within its bound and equal
    on all ranks."""
    passed = True
    for _, group in itertools.groupby(summaries, lambda summary: summary.key.case):
        rows = list(group)
        _show_times(console, rows)
        passed &= _show_results(console, rows)
    for (_, message), keys in _by_cause(errors).items():
        schemes = ", ".join(key.scheme for key in keys)
        console.print(f"could not run: {schemes} ({_case(keys[0])}): {message}", style="red")
    _show_notes(console, run, summaries)
    return passed


def _by_cause(errors: dict[Key, str]) -> dict[Any, list[Key]]:
    """(case, message) -> the keys that failed alike."""
    causes: dict[Any, list[Key]] = {}
    for key, message in errors.items():
        causes.setdefault((key.case, message), []).append(key)
    return causes


def _case(key: Key) -> str:
    text = f"{key.what}, {key.ranks} ranks, "
    if key.what == "decode":
        text += f"{key.tokens:,} tokens, "
    text += f"batch {key.batch}, {key.queries} queries, " if key.batch * key.queries > 1 else ""
    text += f"{key.heads} heads ({key.kv_heads} KV) x {key.head_dim}, {key.dtype}"
    text += f", records as {key.wire}" if key.wire != "float32" else ""
    return text + (f", arrival skew {key.skew:g} µs" if key.skew else "")


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("scheme", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def _show_times(console: Console, rows: Sequence[Summary]) -> None:
    key = rows[0].key
    parts = ("local", "reduce") if key.what == "decode" else ("null_merge",)
    headings = ["plan", "first", "median", "95 % interval", "p5", "p95", "p99", "slowest\nrank"]
    headings += ["from last\nentry"] if key.skew else []
    headings += [name.replace("_", "\n") for name in parts]
    table = _table(f"{_case(key)}: times in µs", [*headings, "x SUM", "blocks", "n", "late"])
    of_sum = next((row.times["completion"].median for row in rows if row.key.scheme == SUM), None)
    for row in sorted(rows, key=lambda row: row.times["completion"].median):
        time = row.times["completion"]
        interval = "-" if time.low is None or time.high is None else f"{_us(time.low)} to {_us(time.high)}"
        cells = [_us(row.times[name].median) for name in ("plan", "first")]
        cells += [_us(time.median), interval, _us(time.p5), _us(time.p95), _us(time.p99)]
        cells.append(_us(row.times["slowest"].median))
        if key.skew:
            cells.append(_us(row.times["after_last_entry"].median))
        cells += [_us(row.times[name].median) if name in row.times else "-" for name in parts]
        cells.append("-" if of_sum is None or row.key.scheme == NULL else f"{time.median / of_sum:.2f}")
        table.add_row(row.key.scheme, *cells, str(time.blocks), str(time.count), str(row.facts["late"]))
    console.print(table)


def _show_results(console: Console, rows: Sequence[Summary]) -> bool:
    """Print what does not depend on time; whether all of it is right."""
    headings = ["class", "rounds", "depth", "bits\nequal", "error of out\n(bound)", "error of lse\n(bound)"]
    headings += ["messages\nintra", "\ninter", "bytes\nintra", "\ninter", "bytes\nheld", "step\npeak"]
    table = _table(f"{_case(rows[0].key)}: results, payload of one step, memory of a rank", headings)
    wrong: dict[str, str | None] = {}
    for row in rows:
        if row.key.scheme in (SUM, NULL):
            continue
        facts, wrong[row.key.scheme] = row.facts, _wrong(row)
        table.add_row(
            row.key.scheme, facts["determinism"], _count(facts["rounds"]), _count(facts["depth"]),
            _bits(facts),
            f"{facts['error_out']:.1e} ({facts['bound_out']:.0e})",
            f"{facts['error_lse']:.1e} ({facts['bound_lse']:.0e})",
            *_payload(facts["sent"]), _count(facts["held"]), _count(facts["step_peak"]),
            style="red" if wrong[row.key.scheme] else None,
        )  # fmt: skip
    console.print(table)
    for scheme, reason in wrong.items():
        if reason:
            console.print(f"wrong: {scheme}: {reason}", style="red")
    return not any(wrong.values())


def _bits(facts: dict[str, Any]) -> str:
    """Whether all ranks held one result, and all blocks."""
    equal = {True: "yes", False: "NO", None: "-"}[facts["same_bits"]]
    return equal if len(facts["digests"]) == 1 else f"{equal}, {len(facts['digests'])} results"


def _payload(sent: dict[str, list[Any]] | None) -> list[str]:
    """Messages, then bytes, by tier; a library tells nothing, or what it was given to send."""
    if sent is None:
        return ["library"] * 4
    if "unknown" in sent:
        return ["library", "library", f"{sent['unknown'][1]:,}", "given"]
    counts = [sent[tier][index] for index in (0, 1) for tier in ("intra", "inter")]
    return ["library" if count is None else _count(count) for count in counts]


def _wrong(row: Summary) -> str | None:
    """What is wrong with a result: bits, payload against the schedule, error of float32 records; or None."""
    facts = row.facts
    if facts["same_bits"] is False:
        return "ranks ended with different bits"
    if facts["scheduled"] and facts["sent"] != facts["scheduled"]:
        return f"sent {facts['sent']}, the schedule says {facts['scheduled']}"
    exact = facts["error_out"] <= facts["bound_out"] and facts["error_lse"] <= facts["bound_lse"]
    return None if exact or row.key.wire == "bfloat16" else "the error is above the bound"


def _show_notes(console: Console, run: Run, summaries: Sequence[Summary]) -> None:
    nulls = [summary for summary in summaries if summary.key.scheme == NULL and summary.key.what == "reduce"]
    for null in nulls:
        console.print(
            f"harness: an iteration that does nothing takes {null.times['slowest'].median:.2f} µs "
            f"on the slowest of {null.key.ranks} ranks"
        )
    if run.clock is not None:
        source, method, error = run.clock.source, run.clock.method, run.clock.error
        console.print(f"clock: {source}, {method}; error at most {error:.2f} µs")
    if run.warning:
        console.print(f"note: {run.warning}", style="yellow")


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def _count(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:,.0f}"
