"""``treeattn paper``: the paper's experiments, run small, next to its numbers and a model of them."""

from __future__ import annotations

import sys
from typing import Any

import click
import msgspec

from treeattn.cli import options
from treeattn.cli.options import Output
from treeattn.collectives.clusters import description
from treeattn.report import Column, Report
from treeattn.study import environment
from treeattn.study.intervals import words
from treeattn.study.paper import EXPERIMENTS, Table, shown
from treeattn.study.paper.experiment import MACHINE


@click.command("paper")
@click.argument("experiments", nargs=-1, type=click.Choice(list(EXPERIMENTS)))
@click.option("--ranks-free", is_flag=True, help="Only the paper and the model: run nothing, need no MPI.")
@options.output_options(json="Write settings, tables and notes.")
def command(experiments: tuple[str, ...], ranks_free: bool, output: Output) -> None:
    """Print the paper's experiments, its numbers and the model side by side (default: all).

    What a rank holds and sends is counted on up to 4 ranks (mpiexec -n 4 treeattn paper memory volume); times
    are what treeattn compare measures. Which of the paper's numbers are not explained: docs/paper.md.
    """
    chosen = {name: one for name, one in EXPERIMENTS.items() if not experiments or name in experiments}
    world = None if ranks_free else options.world()
    output.open(world=world)
    run = None if world is None else environment.machine(world)
    measured: dict[str, list[Table]] = {}
    for name, experiment in chosen.items():
        if world is not None and world.rank == 0 and sys.stderr.isatty():
            click.echo(f"running: {experiment.TITLE}", err=True)
        counted = world is not None and hasattr(experiment, "measure")
        measured[name] = experiment.measure(world, **experiment.SMALL) if counted else []
    if world is None or world.rank == 0:
        output.report(_report(run, measured))


def _report(run: dict[str, Any] | None, measured: dict[str, list[Table]]) -> Report:
    facts: list[dict[str, Any]] = []
    made = Report({"run": run, "experiments": facts})
    for name, here in measured.items():
        experiment = EXPERIMENTS[name]
        model = experiment.model(**experiment.PAPER)
        facts.append({
            "name": name,
            "title": experiment.TITLE,
            "where": experiment.WHERE,
            "paper": msgspec.to_builtins(experiment.PAPER),
            "small": getattr(experiment, "SMALL", None),
            "model": list(map(_facts, model)),
            "measured": list(map(_facts, here)),
        })  # fmt: skip
        made.line(f"\n{name}: {experiment.TITLE}", style="bold")
        made.line(f"in the paper: {experiment.WHERE}")
        for found in (*model, *here):
            made.line(f"\n{found.title}")
            made.table(found.rows, [
                Column(heading, form=shown, words=index < 2) for index, heading in enumerate(found.rows[0])
            ])  # fmt: skip
        if not hasattr(experiment, "measure"):
            continue
        if run is None:
            made.line("not run: --ranks-free leaves out what needs ranks")
        elif not here:
            made.line(f"not run: this job has {len(run['ranks'])} rank; mpiexec -n 4 treeattn paper runs it")
    made.line(f"\nsimulated: {words(description.load(MACHINE))}")
    made.line("what these numbers assume, and what is not explained: docs/paper.md")
    made.note(run and run["warning"])
    return made


def _facts(table: Table) -> dict[str, Any]:
    rows = [list(row.values()) for row in table.rows]
    return {"title": table.title, "headings": list(table.rows[0]), "rows": rows}
