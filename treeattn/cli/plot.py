"""``treeattn plot``: figures of what was measured."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treeattn import files
from treeattn.cli.options import FILE, Output, choices, output_options, read
from treeattn.errors import ArgumentError
from treeattn.report import Progress, Report
from treeattn.study import extra
from treeattn.study.compare import rows
from treeattn.study.compare.summary import summarise

if TYPE_CHECKING:
    import pandas


def frame(paths: tuple[Path, ...], baseline: str | None) -> pandas.DataFrame:
    """The summaries of what these files hold. Raises `ArgumentError`, and `MissingPackageError`."""
    found = rows.read(*paths)
    known = dict.fromkeys(row.label for row in found)
    if baseline is not None and baseline not in known:
        raise ArgumentError(f"--baseline {baseline}: not among these results; choose from {', '.join(known)}")
    made: pandas.DataFrame = extra("pandas").DataFrame(summarise(found, baseline))
    if made.empty:
        raise ArgumentError("these files hold no rows of treeattn compare --out")
    return made


def figures() -> Any:
    """The module that draws, without a screen. Raises `MissingPackageError`."""
    os.environ["MPLBACKEND"] = "agg"
    for name in ("matplotlib", "pandas"):
        extra(name)
    from treeattn.study import figures

    return figures


@click.command("plot")
@click.argument("results", nargs=-1, required=True, type=FILE)
@click.option("--out", "folder", default="figures", metavar="FOLDER",
              help="The folder for the figures; made if its parent is there.")  # fmt: skip
@click.option("--format", "formats", callback=read(choices(("png", "svg", "pdf"))), default="png,svg",
              metavar="F[,F]", help="Of png, svg, pdf.")  # fmt: skip
@click.option("--figures", "names", callback=read(choices(("time", "relative", "scaling", "predicted"))),
              metavar="F[,F..]", help="Of time, relative, scaling, predicted; default all.")  # fmt: skip
@click.option("--baseline", metavar="S", help="The scheme of relative times; default MPI_Allreduce(SUM).")
@click.option("--width", default="6.5in", metavar="3.3in|84mm", help="Of a figure.")
@output_options(json="Write the summaries that are drawn.")
def command(
    results: tuple[Path, ...],
    folder: str,
    formats: tuple[str, ...],
    names: tuple[str, ...] | None,
    baseline: str | None,
    width: str,
    output: Output,
) -> int:
    """Draw results of `treeattn compare --out`: time over size, relative to a baseline, scaling with ranks,
    predicted against measured. Needs no MPI; pip install '.[study]'.

    For other figures: pandas.read_json(FILE, lines=True). Exit code 1: a figure that was asked for by name is
    not in these results; the others are drawn.
    """
    draw = figures()
    wide = draw.inches(width)
    output.open(*results)
    click.get_current_context().with_resource(Progress())("drawing figures")
    summaries = frame(results, baseline)
    made = {name: draw.FIGURES[name](summaries, wide) for name in names or draw.FIGURES}
    drawn = {name: figure for name, figure in made.items() if figure is not None}
    if not folder:
        raise ArgumentError("--out is empty: name a folder for the figures")
    targets = {(name, form): Path(folder, f"{name}.{form}") for name in drawn for form in formats}
    files.check_distinct([output.json, *targets.values()], list(results))
    try:
        Path(folder).mkdir(exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"--out {folder}: no folder can be made there ({error.strerror})") from None
    for (name, form), path in targets.items():
        files.output_writer(path)(draw.content(drawn[name], form))
        click.echo(str(path))
    output.report(Report(summaries.astype(object).where(summaries.notna(), None).to_dict("records")))
    missing = [name for name in made if name not in drawn]
    if missing:
        click.echo(f"not in these results: {', '.join(missing)}", err=True)
    return 1 if missing and names else 0
