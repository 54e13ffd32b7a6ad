"""``treeattn published``: what others measured on supercomputers, predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import click

from treeattn.cli.options import FILE, Output, output_options
from treeattn.collectives.clusters.description import as_toml
from treeattn.errors import ArgumentError
from treeattn.report import Column, Progress, Report, microseconds
from treeattn.study.published.held import Predicted, held_out, ratio_error, score, winners
from treeattn.study.published.measurements import SHIPPED, Files, Measurement, read
from treeattn.study.published.prices import Fit


def _files(name: str, about: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(f"--{name}", multiple=True, type=FILE, metavar="FILE", help=about)


@click.command("published")
@_files("known", "Measurements to fit by.  [shipped]")
@_files("held", "Measurements to predict.  [shipped]")
@_files("allocations", "Where their ranks were.")
@_files("runs", "Their devices and tori.")
@click.option("--blind", is_flag=True, help="Give nothing of a held run.")
@click.option("--run", "name", metavar="NAME", help="The run of --known whose prices --out gets.")
@output_options("Write a cluster file instead.", json="Write every prediction.")
def command(
    known: tuple[Path, ...],
    held: tuple[Path, ...],
    allocations: tuple[Path, ...],
    runs: tuple[Path, ...],
    blind: bool,
    name: str | None,
    output: Output,
) -> None:
    """Predict all-reductions published of supercomputers. Needs no MPI; each FILE is CSV or gzip of it.

    Each run of --held is predicted from all other runs of --known and, of its own, recursive doubling at two
    sizes and the ring at one. Options repeat. docs/predicted.md says how well this goes, and what it misses.
    With --run NAME --out FILE.toml the prices of that run are written as a cluster, by which simulate, tune
    and --scheme auto:cluster=FILE.toml price any schedule.
    """
    if (name is None) != (output.out is None):
        raise ArgumentError(
            "--run NAME and --out FILE.toml go together: one names the run, one takes its prices"
        )
    output.open(*known, *held, *allocations, *runs)
    about = (*SHIPPED.allocations, *allocations), (*SHIPPED.runs, *runs)
    fitted, asked = (read(Files(paths or SHIPPED.measurements, *about)) for paths in (known, held))
    if not fitted:
        raise ArgumentError(
            "--known holds no all-reduction that counts: one rank a node, 256 B to 1 MiB, our schemes"
        )
    if name is not None:
        _write_cluster(fitted, name, output)
        return
    say, rows = Progress(), []
    for row in held_out(fitted, asked, blind):
        rows.append(row)
        say(f"predicted {len(rows)} of at most {len(asked)}")
    if not rows:
        raise ArgumentError(
            "--held holds nothing to predict: one rank a node, 256 B to 1 MiB, programs that are our schemes"
        )
    output.report(_report(rows))


def _write_cluster(known: Sequence[Measurement], name: str, output: Output) -> None:
    runs = {row.run.name: row.run for row in known if row.stack == "mpi"}
    if name not in runs:
        raise ArgumentError(f"--run {name}: there is no such run; take one of {', '.join(sorted(runs))}")
    cluster = Fit(known, known).cluster(runs[name])
    output.write(as_toml(cluster, (cluster.about, "Fitted by treeattn published.")).encode())
    print(f"{cluster.about}: its prices are in {output.out}")


def _report(predicted: Sequence[Predicted]) -> Report:
    rows = list(map(_facts, predicted))
    named, cases = winners(predicted)
    ratio, simple = ratio_error(predicted), ratio_error(predicted, two=True)
    made = Report({
        "rows": rows,
        **_score(rows),
        "ratio_error": ratio,
        "winner_named": named,
        "winner_cases": cases,
        "two_parameters": {**_score(rows, "two_parameters_us"), "ratio_error": simple},
    })  # fmt: skip
    made.table(rows, _EVERY)
    made.table([*_groups(rows), {"group": "all", "rows": rows}], [
        Column("", "group", words=True),
        Column("rows", lambda group: len(group["rows"])),
        Column("median\nerror", lambda group: _score(group["rows"])["median_error"], ".1%"),
        Column("90 %", lambda group: _score(group["rows"])["p90_error"], ".1%"),
        Column("within\n25 %", lambda group: _score(group["rows"])["within_25"], ".0%"),
        Column("two parameters:\nmedian", lambda group: _simple(group)["median_error"], ".1%"),
        Column("\n90 %", lambda group: _simple(group)["p90_error"], ".1%"),
        Column("within\n25 % ", lambda group: _simple(group)["within_25"], ".0%"),
    ])  # fmt: skip
    made.line(f"\nratio of two schemes, median error: {ratio:.1%}; two parameters: {simple:.1%}")
    made.line(f"fastest program named, or one within 5 % of it: {named} of {cases}")
    return made


_EVERY: list[Column[dict[str, Any]]] = [
    Column("system", words=True, wide=True),
    Column("run", words=True, wide=True),
    Column("program", "algorithm", words=True, wide=True),
    Column("ranks", wide=True),
    Column("bytes", wide=True),
    Column("measured, µs", "measured_us", microseconds, wide=True),
    Column("predicted", "predicted_us", microseconds, wide=True),
    Column("error", lambda row: row["predicted_us"] / row["measured_us"] - 1, "+.0%", wide=True),
]


def _facts(row: Predicted) -> dict[str, Any]:
    return {
        "system": row.row.run.system,
        "run": row.row.run.name,
        "ranks": row.row.run.ranks,
        "algorithm": row.row.algorithm,
        "scheme": row.row.scheme,
        "bytes": row.row.bytes,
        "measured_us": row.row.microseconds,
        "predicted_us": row.microseconds,
        "two_parameters_us": row.two_parameters,
    }


def _groups(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for name in ("system", "scheme", "bytes"):
        for value, several in groupby(sorted(rows, key=itemgetter(name)), itemgetter(name)):
            yield {"group": str(value), "rows": list(several)}


def _simple(group: dict[str, Any]) -> dict[str, float]:
    return _score(group["rows"], "two_parameters_us")


def _score(rows: Sequence[dict[str, Any]], model: str = "predicted_us") -> dict[str, float]:
    found = score([abs(row[model] / row["measured_us"] - 1) for row in rows])
    return {"median_error": found.median, "p90_error": found.p90, "within_25": found.within_25}
