"""``treeattn schedule``: build a schedule, prove it, and draw or export it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from treeattn import collectives, files
from treeattn.baselines import BASELINES
from treeattn.collectives import Schedule
from treeattn.collectives.drawings import text as draw
from treeattn.errors import ArgumentError, ScheduleError

__all__ = ["command"]

# Each takes a schedule and the ranks of each node, which exports have no use for.
_FORMATS: dict[str, Callable[[Schedule, Any], str]] = {
    "text": draw.text,
    "svg": draw.svg,
    "html": draw.html,
    "json": lambda schedule, _: schedule.to_json(),
    "goal": lambda schedule, _: draw.goal(schedule),
}


@click.command("schedule")
@click.argument("scheme")
@click.option("--ranks", type=click.IntRange(1), required=True, help="Number of ranks.")
@click.option("--nodes", default=None, metavar="M|a+b+..",
              help="Number of nodes (balanced blocks of ranks), or the ranks of each.")  # fmt: skip
@click.option("--format", "form", type=click.Choice(list(_FORMATS)), default="text", show_default=True)
@click.option(
    "--out", type=click.Path(path_type=Path), help="Write the drawing here instead of to the screen."
)
@click.option("--json", "json_path", type=click.Path(path_type=Path),
              help="Write the schedule and its certificate here.")  # fmt: skip
def command(
    scheme: str, ranks: int, nodes: str | None, form: str, out: Path | None, json_path: Path | None
) -> None:
    """Show who sends what to whom in SCHEME, after proving that it counts every rank exactly once."""
    name = scheme.partition(":")[0].strip()
    if name in BASELINES:
        known = ", ".join(collectives.names("schedule"))
        raise ScheduleError(f"{name} is a baseline and has no schedule; schedules: {known}")
    sizes = None if nodes is None else _node_sizes(nodes, ranks)
    shaped = sizes is not None and collectives.needs_nodes(scheme)
    schedule = collectives.build(scheme, ranks, **({"nodes": sizes} if shaped else {}))
    certificate = collectives.check(schedule)
    drawing = _FORMATS[form](schedule, sizes)
    facts: dict[str, Any] = {"certificate": asdict(certificate), "schedule": json.loads(schedule.to_json())}
    files.check_distinct([json_path, out])
    write_json, write = files.output_writer(json_path), files.output_writer(out)
    write_json((json.dumps(facts) + "\n").encode())
    write((drawing.rstrip("\n") + "\n").encode())
    print(f"{schedule.name} on {ranks} ranks is in {out}" if out else drawing.rstrip("\n"))


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
