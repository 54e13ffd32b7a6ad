"""``treeattn schedule``: build a schedule, prove it, and draw or export it."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from treeattn import collectives
from treeattn.cli.options import HEAD_DIM, HEADS, RANKS, RESULT, Output, output_options
from treeattn.cli.scheme import build, from_file, is_file
from treeattn.collectives.catalog import with_result
from treeattn.collectives.drawings import text as draw
from treeattn.collectives.schedule import Result
from treeattn.errors import ArgumentError
from treeattn.report import Progress, Report

_DRAWINGS = {"text": draw.text, "svg": draw.svg, "html": draw.html}


@click.command("schedule")
@click.argument("scheme")
@click.option("--ranks", type=RANKS, help="Number of ranks; FILE.json says it itself.")
@click.option("--nodes", metavar="M|a+b+..",
              help="Number of nodes (balanced blocks of ranks), or the ranks of each.")  # fmt: skip
@RESULT
@click.option("--format", "form", type=click.Choice([*_DRAWINGS, "json", "goal"]), default="text",
              help="goal, with messages of --heads, is for simulators of networks.")  # fmt: skip
@HEADS
@HEAD_DIM
@output_options("Write the drawing here instead of to the screen.",
                json="Write the schedule and its certificate here.")  # fmt: skip
def command(
    scheme: str,
    ranks: int | None,
    nodes: str | None,
    result: Result,
    form: str,
    heads: int,
    head_dim: int,
    output: Output,
) -> None:
    """Show who sends what to whom in SCHEME, after proving that it counts every rank exactly once.

    SCHEME is a name with its parameters, or a file: FILE.json, a schedule of one's own as --format json
    writes it; FILE.xml, an algorithm of MSCCL.
    --result root shows what of it leads to rank 0: half of a tree.
    """
    own = from_file(scheme, ranks, "--ranks says") if is_file(scheme) else None
    ranks = ranks if own is None else own.size
    if ranks is None:
        raise ArgumentError(f"--ranks N: over how many ranks is {scheme} to be shown?")
    grouped = None if nodes is None else _node_sizes(nodes, ranks)
    with Progress() as say:
        say(f"proving {scheme} on {ranks} ranks")
        schedule = with_result(own or build(scheme, ranks, grouped), result)
        certificate = collectives.check(schedule)
    output.open()
    facts = Report({"certificate": asdict(certificate), "schedule": json.loads(schedule.to_json())})
    if form in _DRAWINGS:
        drawing = _DRAWINGS[form](schedule, grouped)
    else:
        record = 4 * (head_dim + 2)
        drawing = schedule.to_json() if form == "json" else draw.goal(schedule, heads, record)
    output.report(facts)
    output.draw(drawing, f"{schedule.name} on {schedule.size} ranks")


def _node_sizes(text: str, ranks: int) -> tuple[int, ...]:
    """Read the ranks of each node: from a number of nodes, balanced blocks; from a list, as it says."""
    sizes = tuple(int(part) if part.isdecimal() else 0 for part in text.split("+"))
    if len(sizes) == 1 and 1 <= (count := sizes[0]) <= ranks:
        return tuple((i + 1) * ranks // count - i * ranks // count for i in range(count))
    if min(sizes) < 1 or sum(sizes) != ranks:
        raise ArgumentError(
            f"--nodes {text}: give a number of nodes that {ranks} ranks fill, or the ranks of each, as 4+4+2"
        )
    return sizes
