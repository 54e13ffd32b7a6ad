"""``treeattn paper``: the paper's experiments, run small, beside its numbers and a model of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from treeattn import comm as comm_
from treeattn import files
from treeattn.cli.console import WIDE, console, table
from treeattn.errors import ArgumentError
from treeattn.study import environment
from treeattn.study.compare.clock import Clock
from treeattn.study.paper import EXPERIMENTS, NOTHING_TO_SIMULATE, Table, shown

__all__ = ["command"]


@click.command("paper")
@click.argument("experiments", nargs=-1, metavar="[EXPERIMENT]...")
@click.option("--list", "listing", is_flag=True, help="Only name the experiments.")
@click.option("--ranks-free", is_flag=True, help="Only the paper and the model: run nothing, need no MPI.")
@WIDE
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write settings, tables and notes."
)
def command(
    experiments: tuple[str, ...], listing: bool, ranks_free: bool, wide: bool, json_path: Path | None
) -> int | None:
    """Print the paper's experiments: ours, the paper's number and the model side by side (default: all).

    Small settings run for real on up to 4 ranks (mpiexec -n 4 treeattn paper), large ones are the model's.
    What the numbers mean, and which of the paper's are not explained, stands in docs/paper.md.
    """
    if listing:
        if experiments or ranks_free or json_path:
            raise ArgumentError("--list only names the experiments: leave out what stands beside it")
        return _list()
    if ranks_free:
        write = files.output_writer(json_path)
        chosen = _chosen(experiments)
        _finish(write, None, chosen, {name: [] for name in chosen}, wide)
        return 0
    return _run(experiments, json_path, wide)


def _list() -> int:
    width = max(map(len, EXPERIMENTS))
    for name, experiment in EXPERIMENTS.items():
        print(f"{name:{width}}  {experiment.title} ({experiment.where})")
    return 0


def _chosen(names: Sequence[str]) -> list[str]:
    for name in names:
        if name not in EXPERIMENTS:
            raise ArgumentError(f"experiment {name!r} is unknown: choose from {', '.join(EXPERIMENTS)}")
    return [name for name in EXPERIMENTS if not names or name in names]


def _run(names: Sequence[str], json_path: Path | None, wide: bool) -> int:
    world = comm_.world()
    with comm_.Agreement(world) as agreed:
        agreed.equal = {"the command line": (names, str(json_path))}
        chosen = _chosen(names)
        write = files.output_writer(json_path if world.rank == 0 else None)
    run = environment.job(Clock(world), {"experiments": list(names)})
    found: dict[str, list[Table]] = {}
    for name in chosen:
        if world.rank == 0 and sys.stderr.isatty():
            click.echo(f"running: {EXPERIMENTS[name].title}", err=True)
        found[name] = EXPERIMENTS[name].measure(world, **EXPERIMENTS[name].small or {})
    if world.rank == 0:
        _finish(write, run, chosen, found, wide)
    return 0


def _finish(
    write: Any, run: Any, chosen: Sequence[str], measured: dict[str, list[Table]], wide: bool
) -> None:
    """Write and print everything."""
    models = {name: EXPERIMENTS[name].model(**EXPERIMENTS[name].paper) for name in chosen}
    simulated = {name: _simulated(name) for name in chosen}
    facts = [_facts(name, models[name], measured[name], simulated[name]) for name in chosen]
    write(environment.as_json({"run": run, "experiments": facts}))
    screen = console(wide)
    for name in chosen:
        experiment = EXPERIMENTS[name]
        screen.print(f"{os.linesep}{name}: {experiment.title}", style="bold")
        screen.print(f"in the paper: {experiment.where}")
        for made in (*models[name], *simulated[name], *measured[name]):
            _print(screen, made)
        if not measured[name] and experiment.small is not None:
            screen.print(_why_nothing(run))
        if not simulated[name]:
            screen.print(NOTHING_TO_SIMULATE)
    screen.print(f"{os.linesep}what these numbers assume, and what is not explained: docs/paper.md")
    if run is not None and run["warning"]:
        screen.print(f"note: {run['warning']}", style="yellow")


def _simulated(name: str) -> list[Table]:
    """The paper's setting on simulated clusters."""
    experiment = EXPERIMENTS[name]
    return [] if experiment.simulated is None else experiment.simulated(**experiment.paper)


def _facts(
    name: str, model: Sequence[Table], here: Sequence[Table], simulated: Sequence[Table]
) -> dict[str, Any]:
    facts = asdict(EXPERIMENTS[name])
    del facts["measure"], facts["simulated"]
    return {
        "name": name,
        **facts,
        "predictions": [asdict(table) for table in simulated] or NOTHING_TO_SIMULATE,
        "model": [asdict(table) for table in model],
        "measured": [asdict(table) for table in here],
    }


def _print(screen: Console, made: Table) -> None:
    screen.print(f"{os.linesep}{made.title}")
    columns = {heading: partial(_cell, index) for index, heading in enumerate(made.headings)}
    table(screen, columns, made.rows, words=2)


def _cell(index: int, row: Sequence[Any]) -> str:
    return shown(row[index])


def _why_nothing(run: Any) -> str:
    if run is None:
        return "not run: --ranks-free leaves out what needs ranks"
    return f"not run: this job has {len(run['ranks'])} rank; mpiexec -n 4 treeattn paper runs it"
