"""``treeattn schedule``: build a schedule, prove it, and draw or export it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from treeattn import collectives, files
from treeattn.cli.scheme import from_file, is_file
from treeattn.collectives import Schedule
from treeattn.collectives.drawings import text as draw
from treeattn.decoder import auto
from treeattn.decoder.plan import select
from treeattn.errors import ArgumentError, ScheduleError

__all__ = ["command"]

# Each takes a schedule and the ranks of each node, which exports have no use for.
_FORMATS: dict[str, Callable[[Schedule, Any], str]] = {
    "text": draw.text,
    "svg": draw.svg,
    "html": draw.html,
    "json": lambda schedule, _: schedule.to_json(),
}


@click.command("schedule")
@click.argument("scheme")
@click.option("--ranks", type=click.IntRange(1), help="Number of ranks; FILE.json says it itself.")
@click.option("--nodes", default=None, metavar="M|a+b+..",
              help="Number of nodes (balanced blocks of ranks), or the ranks of each.")  # fmt: skip
@click.option("--format", "form", type=click.Choice([*_FORMATS, "goal"]), default="text", show_default=True)
@click.option(
    "--out", type=click.Path(path_type=Path), help="Write the drawing here instead of to the screen."
)
@click.option("--json", "json_path", type=click.Path(path_type=Path),
              help="Write the schedule and its certificate here.")  # fmt: skip
@click.option("--records", type=click.IntRange(1), help="For goal: records of a rank, such as heads.  [16]")
@click.option("--record-bytes", type=click.IntRange(1), help="For goal: bytes of a record.  [520]")
@click.option("--merge-ns", "merge_nanoseconds", type=click.IntRange(0),
              help="For goal: nanoseconds to merge a record.  [0]")  # fmt: skip
def command(
    scheme: str,
    ranks: int | None,
    nodes: str | None,
    form: str,
    out: Path | None,
    json_path: Path | None,
    **costs: int | None,
) -> None:
    """Show who sends what to whom in SCHEME, after proving that it counts every rank exactly once.

    SCHEME is a name with its parameters, or FILE.json, a schedule of one's own, as --format json writes it.
    """
    schedule, sizes = _schedule(scheme, ranks, nodes)
    certificate = collectives.check(schedule)
    priced = {name: cost for name, cost in costs.items() if cost is not None}
    if priced and form != "goal":
        raise ArgumentError(f"--format {form} draws no cost: records, bytes and merges go with --format goal")
    drawing = draw.goal(schedule, **priced) if form == "goal" else _FORMATS[form](schedule, sizes)
    facts: dict[str, Any] = {"certificate": asdict(certificate), "schedule": json.loads(schedule.to_json())}
    files.check_distinct([json_path, out])
    write_json, write = files.output_writer(json_path), files.output_writer(out)
    write_json((json.dumps(facts) + "\n").encode())
    write((drawing.rstrip("\n") + "\n").encode())
    print(f"{schedule.name} on {schedule.size} ranks is in {out}" if out else drawing.rstrip("\n"))


def _schedule(scheme: str, ranks: int | None, nodes: str | None) -> tuple[Schedule, tuple[int, ...] | None]:
    """The schedule, and the ranks of each node where they are given."""
    own = from_file(scheme, ranks, "--ranks says") if is_file(scheme) else None
    if own is not None:
        return own, None if nodes is None else _node_sizes(nodes, own.size)
    if ranks is None:
        raise ArgumentError(f"--ranks N: over how many ranks is {scheme} to be shown?")
    selection = select(scheme)
    if selection.row is auto.ROW:
        raise ScheduleError(auto.NOT_NAMED)
    if selection.row.kind == "baseline":
        known = ", ".join(collectives.names("schedule"))
        raise ScheduleError(f"{selection.row.name} is a baseline and has no schedule; schedules: {known}")
    sizes = None if nodes is None else _node_sizes(nodes, ranks)
    return selection.build(ranks, sizes if selection.needs_nodes else None), sizes


def _node_sizes(text: str, ranks: int) -> tuple[int, ...]:
    """Ranks of each node: from a number of nodes, balanced blocks; from a list, as it says."""
    try:
        numbers = tuple(int(part) for part in text.split("+"))
    except ValueError:
        raise ArgumentError(
            f"--nodes {text}: give a number of nodes, or the ranks of each as 4+4+2"
        ) from None
    if min(numbers) < 1:
        raise ArgumentError(f"--nodes {text}: every number must be at least 1")
    if len(numbers) == 1:
        count = numbers[0]
        if count > ranks:
            raise ArgumentError(f"--nodes {count}: {ranks} ranks cannot fill {count} nodes")
        return tuple((i + 1) * ranks // count - i * ranks // count for i in range(count))
    if sum(numbers) != ranks:
        raise ArgumentError(f"--nodes {text} adds up to {sum(numbers)} ranks, --ranks says {ranks}")
    return numbers
