"""``treeattn plot``: figures of what was measured."""

from __future__ import annotations

import itertools
import os
from dataclasses import asdict
from pathlib import Path

import click

from treeattn import files
from treeattn.cli.console import choose
from treeattn.errors import ArgumentError, BackendError
from treeattn.study import environment, plot
from treeattn.study.figures import draw
from treeattn.study.figures.chart import Chart

__all__ = ["command"]


@click.command("plot")
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", default="figures", show_default=True, metavar="FOLDER",
              help="The folder for the figures; made if its parent is there.")  # fmt: skip
@click.option("--format", "forms", default=",".join(draw.FORMATS), show_default=True, metavar="F[,F]")
@click.option("--figures", default="all", show_default=True, metavar="F[,F..]|all",
              help="Of " + ", ".join(plot.FIGURES) + ".")  # fmt: skip
@click.option("--baseline", default=None, metavar="S",
              help="The scheme of relative times; default MPI_Allreduce(SUM).")  # fmt: skip
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write the numbers in the figures."
)
def command(
    results: tuple[Path, ...],
    out: str,
    forms: str,
    figures: str,
    baseline: str | None,
    json_path: Path | None,
) -> int:
    """Draw figures from files of `treeattn compare --out` and `treeattn roofline --json`. Needs no MPI.

    Each case has its own file; versions are never mixed. Exit code 1: a line could not be read, or a figure
    that was asked for by name is not in these results; the rest is drawn.
    """
    os.environ["MPLBACKEND"] = "agg"  # no screen is used, and a name unknown to matplotlib would stop it
    names = choose("--figures", figures, ("all", *plot.FIGURES))
    names = tuple(plot.FIGURES) if "all" in names else names
    formats = choose("--format", forms, draw.FORMATS)
    if why := draw.problem():
        raise BackendError(why)
    if not out:
        raise ArgumentError("--out is empty: name a folder for the figures")
    write_json = files.output_writer(json_path)
    study, problems = plot.read(results)
    study.baseline = plot.choose_baseline(study, baseline)
    for problem in problems:
        click.echo(f"treeattn: warning: {problem}", err=True)
    charts = {name: plot.FIGURES[name].charts(study) for name in names}
    missing = [name for name in names if not charts[name]]
    if len(missing) == len(names):
        reasons = "; ".join(f"{name}: {plot.FIGURES[name].needs}" for name in missing)
        raise ArgumentError(f"nothing to plot in {', '.join(map(str, results))} ({reasons})")
    every = [chart for name in names for chart in charts[name]]
    targets = {form: [Path(out, f"{chart.name}.{form}") for chart in every] for form in formats}
    files.check_distinct([json_path, *itertools.chain(*targets.values())], list(results))
    _write(out, every, targets)
    write_json(environment.as_json([asdict(chart) for chart in every]))
    for name in names:
        for line in plot.FIGURES[name].left_out(study):
            click.echo(f"{name} leaves out {line}", err=True)
    for name in missing:
        click.echo(f"left out {name}: {plot.FIGURES[name].needs}", err=figures != "all")
    return 1 if problems or (missing and figures != "all") else 0


def _write(out: str, charts: list[Chart], targets: dict[str, list[Path]]) -> None:
    """targets: format -> the file of each chart."""
    try:
        Path(out).mkdir(exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"--out {out}: no folder can be made there ({error.strerror})") from None
    writers = [{form: files.output_writer(targets[form][i]) for form in targets} for i in range(len(charts))]
    for place, chart in enumerate(charts):
        for form, content in draw.render(chart, tuple(targets)).items():
            writers[place][form](content)
            click.echo(str(targets[form][place]))
