"""``treeattn export``: results for other tools."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from treeattn.cli.options import FILE, Output, output_options
from treeattn.errors import ArgumentError
from treeattn.study import export
from treeattn.study.compare import results


@click.command("export")
@click.argument("files", nargs=-1, required=True, type=FILE, metavar="RESULTS..")
@click.option("--format", "form", type=click.Choice(list(export.FORMATS)), default="csv",
              help="Those of benchmarks (all but csv, parquet) hold reductions alone.")  # fmt: skip
@click.option("--scheme", "schemes", multiple=True, metavar="S", help="Only this one; again for several.")
@output_options("Write here instead of to the screen.", wide=False, json=None)
def command(files: tuple[Path, ...], form: str, schemes: tuple[str, ...], output: Output) -> int:
    """Write results of `treeattn compare --out` as CSV or Parquet, or as OSU's and NCCL's benchmarks would.

    CSV and Parquet have a row for each block and series of times; the others have the median that compare
    shows. Needs no MPI. Exit code 1: a line could not be read; the rest is written.
    """
    if form == "parquet" and output.out is None:
        raise ArgumentError("--format parquet is not for a screen: name a file with --out")
    output.open(*files)
    found = results.read(*files)
    for problem in found.problems:
        click.echo(f"treeattn: warning: {problem}", err=True)
    labels = dict.fromkeys(point.key.label for point in found.points)
    for scheme in schemes:
        if scheme not in labels:
            raise ArgumentError(f"--scheme {scheme}: is not among these results: {', '.join(labels)}")
    if schemes:
        found.points = [point for point in found.points if point.key.label in schemes]
    if not found.points:
        raise ArgumentError("these files hold no results of treeattn compare --out")
    content = export.FORMATS[form](found)
    output.write(content)
    if output.out is None:
        sys.stdout.write(content.decode())
    return 1 if found.problems else 0
