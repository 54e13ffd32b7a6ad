"""``treeattn paper``: the paper's experiments, its numbers next to a model of them."""

from __future__ import annotations

import click
import msgspec

from treeattn.cli import options
from treeattn.cli.options import Output
from treeattn.collectives.clusters import description
from treeattn.report import Column, Progress, Report
from treeattn.study.intervals import words
from treeattn.study.paper import EXPERIMENTS, MACHINE, shown


@click.command("paper")
@click.argument("experiments", nargs=-1, type=click.Choice(list(EXPERIMENTS)))
@options.output_options(wide=True, json="Write settings, tables and notes.")
def command(experiments: tuple[str, ...], output: Output) -> None:
    """Print the paper's experiments, its numbers and the model side by side (default: all).

    Needs no MPI. Times are what treeattn compare measures. Which of the paper's numbers are not explained:
    docs/paper.md.
    """
    output.open()
    click.get_current_context().with_resource(Progress())("simulating the clusters of the paper")
    facts: list[dict[str, object]] = []
    made = Report({"experiments": facts})
    for name, experiment in EXPERIMENTS.items():
        if experiments and name not in experiments:
            continue
        title, where, paper, model = experiment
        tables = model(**paper)
        facts.append({
            "name": name, "title": title, "where": where, "paper": msgspec.to_builtins(paper),
            "model": [
                {"title": of, "headings": list(rows[0]), "rows": [list(row.values()) for row in rows]}
                for of, rows in tables.items()
            ],
        })  # fmt: skip
        made.line(f"\n{name}: {title}", style="bold")
        made.line(f"in the paper: {where}")
        for of, rows in tables.items():
            made.line(f"\n{of}")
            made.table(rows, [Column(name, form=shown, words=at < 2) for at, name in enumerate(rows[0])])
    made.line(f"\nsimulated: {words(description.load(MACHINE))}")
    made.line("what these numbers assume, and what is not explained: docs/paper.md")
    output.report(made)
