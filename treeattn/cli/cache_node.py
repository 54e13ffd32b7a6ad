"""``treeattn cache-node``: keep and attend for a model process."""

from __future__ import annotations

import click

from treeattn import cache_nodes
from treeattn.cache_nodes.memory import read_bytes
from treeattn.cli.options import read
from treeattn.mpi import job


@click.command("cache-node")
@click.option("--memory", callback=read(read_bytes), metavar="SIZE",
              help="For keys and values, such as 200GB; else what the model process asks for.")  # fmt: skip
def command(memory: int | None) -> int:
    """Keep keys and values for the model process, rank 0, and attend to them until it ends.

    Started beside it: mpiexec -n 1 python model.py : -n 16 treeattn cache-node
    """
    node = cache_nodes.serve(memory_bytes=memory)
    if not node.command:
        job.leave()
    return 0
