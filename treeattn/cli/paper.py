"""``treeattn paper``: the paper's experiments, run small, beside its numbers and a model of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table as RichTable

from treeattn import comm as comm_
from treeattn import files
from treeattn.errors import ArgumentError, TreeattnError
from treeattn.study import environment
from treeattn.study.compare.clock import Clock
from treeattn.study.paper import EXPERIMENTS, Experiment, Table, shown

__all__ = ["command"]


@click.command("paper")
@click.argument("experiments", nargs=-1, metavar="[EXPERIMENT]...")
@click.option("--list", "listing", is_flag=True, help="Only name the experiments.")
@click.option("--ranks-free", is_flag=True, help="Only the paper and the model: run nothing, need no MPI.")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write settings, tables and notes."
)
def command(
    experiments: tuple[str, ...], listing: bool, ranks_free: bool, json_path: Path | None
) -> int | None:
    """Print the paper's experiments: ours, the paper's number and the model side by side (default: all).

    Small settings run for real on up to 4 ranks (mpiexec -n 4 treeattn paper), large ones are the model's.
    Where a number of the paper is not explained, it says so.
    """
    if listing:
        return _list()
    if ranks_free:
        write = files.output_writer(json_path)
        chosen = _chosen(experiments)
        _finish(write, None, chosen, {experiment.name: [] for experiment in chosen})
        return 0
    return _run(experiments, json_path)


def _list() -> int:
    width = max(map(len, EXPERIMENTS))
    for name, experiment in EXPERIMENTS.items():
        print(f"{name:{width}}  {experiment.title} ({experiment.where})")
    return 0


def _chosen(names: Sequence[str]) -> list[Experiment]:
    for name in names:
        if name not in EXPERIMENTS:
            raise ArgumentError(f"experiment {name!r} is unknown: choose from {', '.join(EXPERIMENTS)}")
    return [experiment for name, experiment in EXPERIMENTS.items() if not names or name in names]


def _run(names: Sequence[str], json_path: Path | None) -> int:
    world = comm_.world()
    error: TreeattnError | None = None
    try:
        chosen = _chosen(names)
        write = files.output_writer(json_path if world.rank == 0 else None)
    except TreeattnError as problem:
        error = problem
    comm_.agree(world, {"the command line": (names, str(json_path))}, error)
    run = environment.job(Clock(world), {"experiments": list(names)})
    found: dict[str, list[Table]] = {}
    for experiment in chosen:
        if world.rank == 0 and sys.stderr.isatty():
            click.echo(f"running: {experiment.title}", err=True)
        found[experiment.name] = experiment.measure(world)
    if world.rank == 0:
        _finish(write, run, chosen, found)
    return 0


def _finish(write: Any, run: Any, chosen: Sequence[Experiment], measured: dict[str, list[Table]]) -> None:
    """Write and print everything."""
    models = {experiment.name: experiment.model() for experiment in chosen}
    facts = [_facts(experiment, models[experiment.name], measured[experiment.name]) for experiment in chosen]
    write(environment.as_json({"run": run, "experiments": facts}))
    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, highlight=False)
    for experiment in chosen:
        _show(console, experiment, models[experiment.name], measured[experiment.name], run)
    if run is not None and run["warning"]:
        console.print(f"note: {run['warning']}", style="yellow")


def _facts(experiment: Experiment, model: Sequence[Table], here: Sequence[Table]) -> dict[str, Any]:
    return {
        "name": experiment.name,
        "title": experiment.title,
        "where": experiment.where,
        "claims": [asdict(claim) for claim in experiment.claims],
        **asdict(experiment),
        "model": [asdict(table) for table in model],
        "measured": [asdict(table) for table in here],
        "assumptions": experiment.assumptions,
        "differences": experiment.differences,
    }


def _show(
    console: Console, experiment: Experiment, model: Sequence[Table], here: Sequence[Table], run: Any
) -> None:
    console.print(f"{os.linesep}{experiment.name}: {experiment.title}", style="bold")
    console.print(f"in the paper: {experiment.where}")
    for claim in experiment.claims:
        says = f"{claim.says} {claim.unit}".rstrip()
        console.print(f"the paper says: {claim.what}: {says} ({claim.where})")
    for table in (*model, *here):
        console.print(_drawn(table))
    if not here and experiment.small is not None:
        console.print(_why_nothing(run))
    console.print(f"the paper's setting on a simulated cluster: {experiment.predictions}")
    for heading, notes in (("assumed", experiment.assumptions), ("note", experiment.differences)):
        for text in notes:
            console.print(f"{heading}: {text}")


def _drawn(table: Table) -> RichTable:
    drawn = RichTable(title=table.title, title_justify="left")
    for index, heading in enumerate(table.headings):
        words = any(isinstance(row[index], str) for row in table.rows)
        drawn.add_column(heading, justify="left" if words else "right")
    for row in table.rows:
        drawn.add_row(*map(shown, row))
    return drawn


def _why_nothing(run: Any) -> str:
    if run is None:
        return "not run: --ranks-free leaves out what needs ranks"
    return f"not run: this job has {len(run['ranks'])} rank; mpiexec -n 4 treeattn paper runs it"
