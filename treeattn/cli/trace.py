"""``treeattn trace``: a measured reduction as a trace, round by round."""

from __future__ import annotations

import click

from treeattn.cli import options
from treeattn.cli.scheme import given
from treeattn.decoder import plan as routes
from treeattn.errors import ArgumentError
from treeattn.selection import select


@click.command("trace")
@click.argument("scheme")
@click.option("--queries", type=options.SIZE, default=1)
@click.option("--heads", type=options.SIZE, default=16)
@click.option("--head-dim", type=options.SIZE, default=128)
@click.option("--iterations", type=click.IntRange(1, 100_000), default=51,
              help="The one with the median time is kept.")  # fmt: skip
@options.output_options("The trace to write.", "FILE.json", wide=False, json=None)
def command(
    scheme: str, queries: int, heads: int, head_dim: int, iterations: int, output: options.Output
) -> None:
    """Run the reduction of SCHEME, or FILE.json, on the ranks of this job and write what each did when, for
    ui.perfetto.dev: mpiexec -n 8 treeattn trace hierarchical --out trace.json.

    Python runs the rounds, so that they can be seen. simulate --format trace writes the same of a simulation.
    """
    from treeattn.study import trace  # needs an MPI library, which help does not

    world = options.world()
    if "," in scheme:
        raise ArgumentError(f"{scheme}: one scheme at a time is traced; name one")
    (chosen,) = given(world, scheme)
    output.open(world=world)
    schedule = routes.schedule(select(chosen), world)
    if schedule is None:
        raise ArgumentError(f"{chosen} has no schedule whose rounds could be seen: take a schedule")
    text = trace.measure(world, schedule, heads, head_dim, queries, iterations)
    if text is not None:
        output.write(text.encode())
        print(
            f"{output.out} holds a step of {schedule.name} on {world.size} ranks: open it in ui.perfetto.dev"
        )
