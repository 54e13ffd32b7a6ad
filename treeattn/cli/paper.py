"""``treeattn paper``: the paper's experiments, its numbers next to a model of them."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from treeattn.cli import options
from treeattn.cli.options import Output
from treeattn.collectives.clusters import description
from treeattn.report import Column, Progress, Report
from treeattn.study.intervals import words
from treeattn.study.paper import EXPERIMENTS, shown
from treeattn.study.paper.experiment import MACHINE


@click.command("paper")
@click.argument("experiments", nargs=-1, type=click.Choice(list(EXPERIMENTS)))
@options.output_options(json="Write settings, tables and notes.")
def command(experiments: tuple[str, ...], output: Output) -> None:
    """Print the paper's experiments, its numbers and the model side by side (default: all).

    Needs no MPI. Times are what treeattn compare measures. Which of the paper's numbers are not explained:
    docs/paper.md.
    """
    output.open()
    click.get_current_context().with_resource(Progress())("simulating the clusters of the paper")
    facts: list[dict[str, Any]] = []
    made = Report({"experiments": facts})
    for name, experiment in EXPERIMENTS.items():
        if experiments and name not in experiments:
            continue
        model = experiment.model(**experiment.PAPER)
        facts.append(
            {
                "name": name,
                "title": experiment.TITLE,
                "where": experiment.WHERE,
                "paper": msgspec.to_builtins(experiment.PAPER),
                "model": [
                    {
                        "title": found.title,
                        "headings": list(found.rows[0]),
                        "rows": [list(row.values()) for row in found.rows],
                    }
                    for found in model
                ],
            }
        )
        made.line(f"\n{name}: {experiment.TITLE}", style="bold")
        made.line(f"in the paper: {experiment.WHERE}")
        for found in model:
            made.line(f"\n{found.title}")
            made.table(found.rows, [
                Column(heading, form=shown, words=index < 2) for index, heading in enumerate(found.rows[0])
            ])  # fmt: skip
    made.line(f"\nsimulated: {words(description.load(MACHINE))}")
    made.line("what these numbers assume, and what is not explained: docs/paper.md")
    output.report(made)
