"""``treeattn plot``: figures of what was measured."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import asdict
from pathlib import Path

import click

from treeattn import files
from treeattn.cli.options import FILE, Output, choices, output_options, read
from treeattn.errors import ArgumentError, BackendError
from treeattn.report import Progress, Report
from treeattn.study import plot
from treeattn.study.figures import draw


def _inches(text: str) -> float:
    """3.3in, 84mm or 8.4cm. Raises `ArgumentError`."""
    units = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4}
    try:
        width = float(text[:-2]) * units[text[-2:]]
    except (KeyError, ValueError):
        width = math.nan
    if not 2 <= width <= 40:
        raise ArgumentError(f"{text!r:.20}: give 2in to 40in, such as 3.3in or 84mm")
    return width


@click.command("plot")
@click.argument("results", nargs=-1, required=True, type=FILE)
@click.option("--out", "folder", default="figures", metavar="FOLDER",
              help="The folder for the figures; made if its parent is there.")  # fmt: skip
@click.option("--format", "formats", callback=read(choices(draw.FORMATS)), default="png,svg",
              metavar="F[,F]", help="Of " + ", ".join(draw.FORMATS) + ".")  # fmt: skip
@click.option("--figures", callback=read(choices(("all", *plot.FIGURES))), default="all",
              metavar="F[,F..]|all", help="Of " + ", ".join(plot.FIGURES) + ".")  # fmt: skip
@click.option("--baseline", metavar="S", help="The scheme of relative times; default MPI_Allreduce(SUM).")
@click.option("--width", callback=read(_inches), default=f"{draw.WIDTH}in", metavar="3.3in|84mm",
              help="Of a figure.")  # fmt: skip
@click.option("--no-title", is_flag=True, help="Neither title nor notes, for a paper's own caption.")
@output_options(wide=False, json="Write the numbers in the figures.")
def command(
    results: tuple[Path, ...],
    folder: str,
    formats: tuple[str, ...],
    figures: tuple[str, ...],
    baseline: str | None,
    width: float,
    no_title: bool,
    output: Output,
) -> int:
    """Draw figures from files of `treeattn compare --out` and `treeattn roofline --json`. Needs no MPI.

    Each case has its own file; versions are never mixed. Exit code 1: a line could not be read, or a figure
    that was asked for by name is not in these results; the rest is drawn.
    """
    os.environ["MPLBACKEND"] = "agg"  # no screen is used, and a name unknown to matplotlib would stop it
    every = "all" in figures
    names = tuple(plot.FIGURES) if every else figures
    if why := draw.problem():
        raise BackendError(why)
    if not folder:
        raise ArgumentError("--out is empty: name a folder for the figures")
    output.open()
    study, problems = plot.read(results)
    study.baseline = plot.choose_baseline(study, baseline)
    for problem in problems:
        click.echo(f"treeattn: warning: {problem}", err=True)
    charts = {name: plot.FIGURES[name].charts(study) for name in names}
    missing = [name for name in names if not charts[name]]
    if len(missing) == len(names):
        reasons = "; ".join(f"{name}: {plot.FIGURES[name].needs}" for name in missing)
        raise ArgumentError(f"nothing to plot in {', '.join(map(str, results))} ({reasons})")
    drawn = [chart for name in names for chart in charts[name]]
    targets = [[Path(folder, f"{chart.name}.{form}") for form in formats] for chart in drawn]
    files.check_distinct([output.json, *itertools.chain(*targets)], list(results))
    try:
        Path(folder).mkdir(exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"--out {folder}: no folder can be made there ({error.strerror})") from None
    writers = [list(map(files.output_writer, paths)) for paths in targets]
    say = Progress()
    for done, chart in enumerate(drawn):
        say(f"{done} of {len(drawn)} figures are drawn")
        for path, write, content in zip(
            targets[done],
            writers[done],
            draw.render(chart, formats, width, not no_title).values(),
            strict=True,
        ):
            write(content)
            click.echo(str(path))
    output.report(Report([asdict(chart) for chart in drawn]))
    for name in names:
        for line in plot.FIGURES[name].left_out(study):
            click.echo(f"{name} leaves out {line}", err=True)
    for name in missing:
        click.echo(f"left out {name}: {plot.FIGURES[name].needs}", err=not every)
    return 1 if problems or (missing and not every) else 0
