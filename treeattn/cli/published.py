"""``treeattn published``: what others measured on supercomputers, predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from treeattn import files
from treeattn.cli.console import WIDE, Cell, Lines, console, microseconds, table
from treeattn.errors import ArgumentError
from treeattn.study import environment
from treeattn.study.published.held import Predicted, Score, held_out, ratio_error, score, winners
from treeattn.study.published.measurements import SHIPPED, Files, read

__all__ = ["command"]

_PATHS = click.Path(path_type=Path)


@click.command("published")
@click.option(
    "--known", multiple=True, type=_PATHS, metavar="FILE", help="Measurements to fit by.  [shipped]"
)
@click.option(
    "--held", multiple=True, type=_PATHS, metavar="FILE", help="Measurements to predict.  [shipped]"
)
@click.option("--allocations", multiple=True, type=_PATHS, metavar="FILE", help="Where their ranks were.")
@click.option("--runs", multiple=True, type=_PATHS, metavar="FILE", help="Their devices and tori.")
@click.option("--blind", is_flag=True, help="Give nothing of a held run.")
@WIDE
@click.option("--json", "json_path", type=_PATHS, help="Write every prediction.")
def command(
    known: tuple[Path, ...],
    held: tuple[Path, ...],
    allocations: tuple[Path, ...],
    runs: tuple[Path, ...],
    blind: bool,
    wide: bool,
    json_path: Path | None,
) -> None:
    """Predict all-reductions published of supercomputers. Needs no MPI; FILES are CSV or gzip of it.

    Each run of --held is predicted from all other runs of --known and, of its own, recursive doubling at two
    sizes and the ring at one. Options repeat. docs/predicted.md says how well this goes, and what it misses.
    """
    files.check_distinct([json_path], [*known, *held, *allocations, *runs])
    write = files.output_writer(json_path)
    about = (*SHIPPED.allocations, *allocations), (*SHIPPED.runs, *runs)
    fitted, asked = (read(Files(paths or SHIPPED.measurements, *about)) for paths in (known, held))
    if not fitted:
        raise ArgumentError(
            "--known holds no all-reduction that counts: one rank a node, 256 B to 1 MiB, our schemes"
        )
    say, rows = Lines(), []
    for row in held_out(fitted, asked, blind):
        rows.append(row)
        say(f"predicted {len(rows)} of at most {len(asked)}")
    if not rows:
        raise ArgumentError(
            "--held holds nothing to predict: one rank a node, 256 B to 1 MiB, programs that are our schemes"
        )
    _print(rows, wide)
    write(environment.as_json(_facts(rows)))


def _facts(rows: Sequence[Predicted]) -> dict[str, Any]:
    overall, simple = _score(rows), _two(rows)
    named, cases = winners(rows)
    return {
        "rows": [_row(row) for row in rows],
        "median_error": overall.median,
        "p90_error": overall.p90,
        "within_25": overall.within_25,
        "ratio_error": ratio_error(rows),
        "winner_named": named,
        "winner_cases": cases,
        "two_parameters": {
            "median_error": simple.median,
            "p90_error": simple.p90,
            "within_25": simple.within_25,
            "ratio_error": ratio_error(rows, two=True),
        },
    }


def _row(row: Predicted) -> dict[str, Any]:
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


def _score(rows: Sequence[Predicted]) -> Score:
    return score([row.error for row in rows])


def _two(rows: Sequence[Predicted]) -> Score:
    return score([abs(row.two_parameters / row.row.microseconds - 1) for row in rows])


def _print(rows: Sequence[Predicted], wide: bool) -> None:
    screen = console(wide)
    if wide:
        table(screen, _ROWS, rows, words=3)
        screen.print()
    by: tuple[Callable[[Predicted], Any], ...] = (
        lambda row: row.row.run.system,
        lambda row: row.row.scheme,
        lambda row: row.row.bytes,
    )
    groups = [
        (str(name), list(several)) for key in by for name, several in groupby(sorted(rows, key=key), key=key)
    ]
    table(screen, _GROUPS, [*groups, ("all", list(rows))])
    named, cases = winners(rows)
    screen.print(f"\nratio of two schemes, median error: {ratio_error(rows):.1%}; two parameters: "
                 f"{ratio_error(rows, two=True):.1%}")  # fmt: skip
    screen.print(f"fastest program named, or one within 5 % of it: {named} of {cases}")


_ROWS: dict[str, Cell[Predicted]] = {
    "system": lambda row: row.row.run.system,
    "run": lambda row: row.row.run.name,
    "program": lambda row: row.row.algorithm,
    "ranks": lambda row: str(row.row.run.ranks),
    "bytes": lambda row: str(row.row.bytes),
    "measured, µs": lambda row: microseconds(row.row.microseconds),
    "predicted": lambda row: microseconds(row.microseconds),
    "error": lambda row: f"{row.microseconds / row.row.microseconds - 1:+.0%}",
}
_Group = tuple[str, list[Predicted]]
_GROUPS: dict[str, Cell[_Group]] = {
    "": lambda group: group[0],
    "rows": lambda group: str(len(group[1])),
    "median\nerror": lambda group: f"{_score(group[1]).median:.1%}",
    "90 %": lambda group: f"{_score(group[1]).p90:.1%}",
    "within\n25 %": lambda group: f"{_score(group[1]).within_25:.0%}",
    "two parameters:\nmedian": lambda group: f"{_two(group[1]).median:.1%}",
    "\n90 %": lambda group: f"{_two(group[1]).p90:.1%}",
    "within\n25 % ": lambda group: f"{_two(group[1]).within_25:.0%}",
}
