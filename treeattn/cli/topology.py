"""``treeattn topology``: where the ranks of this job are."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from treeattn import comm as comm_
from treeattn import files
from treeattn.study import environment
from treeattn.topology import detect

__all__ = ["command"]


@click.command("topology")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write what was found.")
def command(json_path: Path | None) -> None:
    """Draw the ranks of this job on nodes and sockets, with GPUs, links and what the launcher says.

    Run it as the job would be: mpiexec -n 8 treeattn topology.
    """
    world = comm_.world()
    write = comm_.together(world, lambda: files.output_writer(json_path if world.rank == 0 else None))
    found = detect(world)
    if world.rank:
        return
    cluster, places = found.cluster()
    facts = {
        "nodes": found.nodes,
        "ranks": [asdict(rank) for rank in found.ranks],
        "gpu_links": found.links,
        "cluster": cluster.about,
        "places": places,
    }
    write(environment.as_json(facts))
    print(found.drawing())
    if found.links:
        print(f"\n{found.links}")
    said = ", ".join(f"{name}={value}" for name, value in found.ranks[0].launcher.items())
    print(f"\nlauncher, rank 0: {said or 'says nothing of places'}")
    print(f"to simulate: {cluster.about}")
