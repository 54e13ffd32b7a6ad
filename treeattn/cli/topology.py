"""``treeattn topology``: where the ranks of this job are."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from treeattn import comm as comm_
from treeattn import files
from treeattn.hardware import LEGEND
from treeattn.study import environment
from treeattn.topology import detect

__all__ = ["command"]


@click.command("topology")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write what was found.")
def command(json_path: Path | None) -> None:
    """Draw the ranks of this job on nodes and sockets, with GPUs, network cards, what joins them, and
    what the launcher says.

    Run it as the job would be: mpiexec -n 8 treeattn topology.
    """
    world = comm_.world()
    write = comm_.together(world, lambda: files.output_writer(json_path if world.rank == 0 else None))
    found = detect(world, devices=True)
    if world.rank:
        return
    cluster, places = found.cluster()
    facts = {
        "nodes": found.nodes,
        "sockets": found.sockets,
        "binding": found.binding,
        "ranks": [asdict(rank) for rank in found.ranks],
        "devices": [asdict(devices) for devices in found.devices],
        "cluster": cluster.about,
        "places": places,
        "over_sockets": found.over_sockets,
    }
    write(environment.as_json(facts))
    print(found.drawing())
    if any(devices.links for devices in found.devices):
        print(f"\n{LEGEND}")
    said = ", ".join(f"{name}={value}" for name, value in found.ranks[0].launcher.items())
    print(f"\nlauncher, rank 0: {said or 'says nothing of places'}")
    print(found.binding)
    if found.over_sockets:
        print(f"scheme over sockets and nodes: {found.over_sockets}")
    print(f"to simulate: {cluster.about}")
