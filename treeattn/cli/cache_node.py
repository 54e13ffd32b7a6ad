"""``treeattn cache-node``: keep and attend for a model process."""

from __future__ import annotations

import click

from treeattn import cache_nodes
from treeattn.mpi import job


@click.command("cache-node")
def command() -> int:
    """Keep keys and values for the model process, rank 0, and attend to them until it ends.

    Both in one job: mpiexec -n 1 python model.py : -n 16 treeattn cache-node
    """
    node = cache_nodes.serve()
    if not node.command:
        job.leave()
    return 0
