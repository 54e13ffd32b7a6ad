"""``treeattn trace``: a measured reduction as a trace, round by round."""

from __future__ import annotations

from pathlib import Path

import click

from treeattn import comm as comm_
from treeattn import files
from treeattn.cli.scheme import given
from treeattn.decoder import plan as routes
from treeattn.decoder.plan import select
from treeattn.errors import ArgumentError

__all__ = ["command"]


@click.command("trace")
@click.argument("scheme")
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="FILE.json")
@click.option("--queries", type=click.IntRange(1), default=1, show_default=True)
@click.option("--heads", type=click.IntRange(1), default=16, show_default=True)
@click.option("--head-dim", type=click.IntRange(1), default=128, show_default=True)
@click.option("--iterations", type=click.IntRange(1, 100_000), default=51, show_default=True,
              help="The one with the median time is kept.")  # fmt: skip
def command(scheme: str, out: Path, queries: int, heads: int, head_dim: int, iterations: int) -> None:
    """Run the reduction of SCHEME, or FILE.json, on the ranks of this job and write what each did when, for
    ui.perfetto.dev: mpiexec -n 8 treeattn trace hierarchical --out trace.json.

    Python runs the rounds, so that they can be seen. simulate --format trace writes the same of a simulation.
    """
    from treeattn.study import trace  # needs an MPI library, which help does not

    world = comm_.world()
    said = (scheme, str(out), queries, heads, head_dim, iterations)
    comm_.agree(world, {"the command line": said})
    if "," in scheme:
        raise ArgumentError(f"{scheme}: one scheme at a time is traced; name one")
    (name,) = given(world, scheme)
    write = comm_.together(world, lambda: files.output_writer(out if world.rank == 0 else None))
    schedule = routes.schedule(select(name), world)
    if schedule is None:
        raise ArgumentError(f"{name} has no schedule whose rounds could be seen: take a schedule")
    text = trace.measure(world, schedule, heads, head_dim, queries, iterations)
    if text is not None:
        write(text.encode())
        print(f"{out} holds a step of {schedule.name} on {world.size} ranks: open it in ui.perfetto.dev")
